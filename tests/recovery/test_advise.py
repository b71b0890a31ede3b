"""`kerasmem.advise`: each remedy is what the estimator says of the changed model, and its script trains within that."""

from __future__ import annotations

import statistics
from pathlib import Path

import advised_models
import keras
import pytest
from advice_scripts import measured

import kerasmem
from kerasmem.devices.catalogue import resolve_device
from kerasmem.errors import KerasmemError
from kerasmem.recovery.building import Origin, build
from kerasmem.recovery.estimator import StepEstimator
from kerasmem.recovery.remedies import RemedySearch
from kerasmem.recovery.script import script
from kerasmem.recovery.traits import Traits

pytestmark = pytest.mark.usefixtures("loaded_python")

MODELS = Path(advised_models.__file__)
RESIDUAL = f"{MODELS}:residual"
BATCH = 1024


def search_for(name, *, device="16GB", batch_size=BATCH, **options):
    """A search for remedies, with the step as it is estimated."""
    origin = Origin(f"{MODELS}:{name}", options)
    estimator = StepEstimator(
        origin, resolve_device(device), batch_size, "train", jit_compile=False, method="graph",
        budget_seconds=None,
    )  # fmt: skip
    estimator.estimate_current()
    return RemedySearch(estimator, Traits(origin, batch_size, "auto"))


@pytest.fixture(scope="module")
def advice():
    of = {"factory_args": {"blocks": 2}, "method": "graph", "budget_seconds": None}
    return kerasmem.advise(RESIDUAL, device="14MB", batch_size=BATCH, **of)


def named(advice, word):
    return next(each for each in advice if word in each.name)


def test_each_remedy_saves_and_the_best_comes_first(advice):
    assert advice.device.verdict == "does not fit"
    assert len(advice) == len(advice.remedies) >= 5
    assert all(each.saving > 0 and each.before == advice.need.total for each in advice)
    assert [each.worth for each in advice] == sorted((each.worth for each in advice), reverse=True)
    assert {each.verdict for each in advice} >= {"fits", "does not fit"}
    assert advice.verdict == "fits"


@pytest.mark.slow
def test_a_remedy_is_the_estimate_of_the_changed_step(advice):
    of = {"factory_args": {"blocks": 2}, "method": "graph"}
    batch = next(each for each in advice if each.name.startswith("batches of"))
    assert batch.total == kerasmem.estimate(RESIDUAL, batch_size=batch.changes[0]["value"], **of).bytes.total
    largest = kerasmem.max_batch_size(RESIDUAL, device="14MB", maximum=BATCH - 1, **of)
    assert batch.changes[0]["value"] == largest.largest
    half = kerasmem.estimate(RESIDUAL, batch_size=BATCH, dtype_policy="mixed_float16", **of)
    assert named(advice, "half precision").total == half.bytes.total

    def recomputed():
        return kerasmem.recompute(advised_models.residual(blocks=2), batch_size=BATCH)

    again = kerasmem.estimate(recomputed, batch_size=BATCH, method="graph")
    found = named(advice, "recomputation")
    assert (found.total, found.result) == (again.bytes.total, "same training trajectory")


def test_plans_fit_and_the_least_harmful_comes_first(advice):
    assert advice.plans[0].result == "same training trajectory"
    assert all(each.verdict == "fits" and each.high <= advice.device.available_bytes for each in advice.plans)


def test_what_is_not_offered_is_told(advice):
    told = {each.name: each.why for each in advice.considered}
    assert "depend on its input's size" in told["smaller input"]
    offered = " ".join(each.name for each in advice)
    for word in ("XLA", "Adafactor", "Lion", "SGD", "frozen", "LoRA", "cards"):
        assert word in offered + " ".join(told), word


def test_results_to_and_from_data(advice):
    data = advice.to_dict()
    assert kerasmem.Advice.from_dict(data) == advice
    assert data["remedies"][0]["saving"] == advice[0].before - advice[0].total
    with pytest.raises(kerasmem.KerasmemError, match="format_version is 99"):
        kerasmem.Advice.from_dict({**data, "format_version": 99})
    with pytest.raises(kerasmem.KerasmemError, match="not a kerasmem advice"):
        kerasmem.Advice.from_dict({"format_version": 1})
    assert advice[:2] == advice.remedies[:2]


def test_the_script_of_a_plan_trains_within_what_is_predicted(advice, tmp_path):
    plan = advice.plans[0]
    assert plan.changes[0]["kind"] == "micro_batches"
    (peaks,) = measured([plan.code], folder=tmp_path)
    assert isinstance(peaks, list), peaks
    assert plan.low <= statistics.median(peaks) <= plan.high
    assert max(peaks) <= advice.device.available_bytes


def test_the_script_of_a_combination(tmp_path):
    search = search_for("residual")
    kinds = {
        "recompute": "auto",
        "batch_size": BATCH // 2,
        "dtype_policy": "mixed_bfloat16",
        "optimizer": "sgd_momentum",
    }
    changes = tuple(search.traits.change(kind, value) for kind, value in kinds.items())
    found = search.remedy(changes, search.estimator.estimate(changes))
    assert found.result == "other optimizer"
    (peaks,) = measured([found.code], folder=tmp_path)
    assert isinstance(peaks, list), peaks
    assert found.low <= max(peaks) and statistics.median(peaks) <= found.high  # a step's order of operations is chance
    assert statistics.median(peaks) < found.before / 2


def test_segments_are_cut_too_where_that_is_needed_and_saves(tmp_path):
    search = search_for("stack", device="20MB", batch_size=8192)
    search._recomputed()
    once, twice = search.remedies
    assert (once.name, twice.name) == ("recomputation", "recomputation, segments cut too")
    assert twice.total < 0.9 * once.total and twice.compute > once.compute
    assert "levels=2" in twice.code and "levels" not in once.code
    (peaks,) = measured([twice.code], folder=tmp_path)
    assert isinstance(peaks, list), peaks
    assert twice.low <= max(peaks) and statistics.median(peaks) <= twice.high
    roomy = search_for("stack", device="16GB", batch_size=8192)
    roomy._recomputed()
    assert len(roomy.remedies) == 1


@pytest.mark.slow
def test_scripts_of_all_kinds_run(tmp_path):
    """Not measured one by one: what a script leaves behind counts for the next."""
    codes = {}
    for name, batch, kinds in (
        ("double", 32, {"float32": True, "freeze": True}),
        ("double", 32, {"lora": 4, "optimizer": "adafactor", "jit_compile": True}),
        ("two_headed", 8, {"separable": True, "replicas": 2}),
        ("tagger", 4, {"input_size": [[32]], "micro_batches": 2}),
    ):
        traits = Traits(Origin(f"{MODELS}:{name}"), batch, "auto")
        changes = [traits.change(kind, value) for kind, value in kinds.items()]
        codes[(name, *kinds)] = script(traits, changes, "A heading.")
    for key, answer in zip(codes, measured(codes.values(), folder=tmp_path), strict=True):
        assert isinstance(answer, list), (key, answer, codes[key])


@pytest.mark.parametrize("kind", ["file", "weights", "json", "live", "function"])
def test_every_source(kind, tmp_path, monkeypatch):
    """The script opens the model by the source that was given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(MODELS.parent))
    model = advised_models.double()
    options, names = {}, {}
    if kind == "file":
        model.save("model.keras")
        source = "model.keras"
    elif kind == "weights":
        model.save_weights("only.weights.h5")
        source, options = "only.weights.h5", {"factory": "advised_models:double"}
    elif kind == "json":
        Path("model.json").write_text(model.to_json())
        source = "model.json"
    elif kind == "live":
        source, names = model, {"model": model}
    else:
        source = advised_models.double
    origin = Origin(source, options)
    traits = Traits(origin, 16, "auto")
    code = script(traits, [traits.change("optimizer", "sgd_momentum"), traits.change("batch_size", 8)], "Heading.")
    compile(code, "script", "exec")
    exec(code, names)
    assert names["model"].optimizer.momentum == 0.9
    assert names["model"].optimizer.iterations == 4
    need = kerasmem.estimate(build, factory_args={"origin": origin, "changes": [{"kind": "freeze", "value": True}]},
                             batch_size=16, method="formula")  # fmt: skip
    assert need.model.trainable_parameters == 256 * 4 + 4


def test_no_time(monkeypatch):
    found = kerasmem.advise(RESIDUAL, device="14MB", method="graph", budget_seconds=0, factory_args={"blocks": 1})
    assert found.remedies == ()
    assert sum("no time" in each.why for each in found.considered) >= 6


def test_a_short_time_goes_to_what_takes_one_estimate(monkeypatch):
    asked = []

    def no_answer(changes):
        asked.extend(each.kind for each in changes)
        raise KerasmemError("no answer")

    def no_batch(*_, **__):
        asked.append("batch_size")
        raise KerasmemError("no answer")

    search = search_for("residual", device="14MB", batch_size=64, factory_args={"blocks": 1})
    monkeypatch.setattr(search.estimator, "estimate", no_answer)
    monkeypatch.setattr("kerasmem.recovery.remedies.max_batch_size", no_batch)
    search.run()
    first = {"dtype_policy", "optimizer", "freeze", "input_size", "separable", "float32", "lora"}
    last = [each for each in dict.fromkeys(asked) if each not in first]
    assert asked[: -len(last)] and set(asked[: -len(last)]) <= first, asked
    assert last == ["batch_size", "micro_batches", "recompute", "replicas", "jit_compile"]


def test_nothing_needs_to_be_done():
    found = kerasmem.advise(f"{MODELS}:double", device="1GB", batch_size=64, method="graph", budget_seconds=2)
    assert found.verdict == "fits"
    assert found.plans == ()


def test_a_model_that_cannot_be_rebuilt():
    class Own(keras.Model):
        def __init__(self, size):
            super().__init__()
            self.dense = keras.layers.Dense(size)

        def call(self, inputs):
            return self.dense(inputs)

    model = Own(4)
    model(keras.ops.zeros((1, 8)))
    model.compile("sgd", "mse")
    model.get_config = lambda: (_ for _ in ()).throw(NotImplementedError("no configuration"))
    found = kerasmem.advise(model, device="1MiB", batch_size=4096)
    assert found.settings.method == "formula"
    assert any("no remedy can be estimated" in note or "formula" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "nothing"}, "not in the catalogue"),
        ({"device": "1GB", "budget_seconds": -1}, "budget_seconds"),
        ({"device": "1GB", "batch_size": 0}, "batch_size"),
        ({"device": "1GB", "method": "guess"}, "method"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(kerasmem.KerasmemError, match=message):
        kerasmem.advise(RESIDUAL, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [("attention", 256), ("autoencoder", 128), ("towers", 1024)])
def test_predicted_and_measured_savings_of_odd_models(name, batch, tmp_path):
    """Every remedy on models that were not looked at while this was written, each script in a process of its own.

    Less must be measured wherever the intervals say so: wherever they do not overlap.
    """
    source = f"{MODELS}:{name}"
    base = kerasmem.estimate(source, batch_size=batch, method="graph")
    found = kerasmem.advise(source, device=base.bytes.low // 2, batch_size=batch, method="graph", budget_seconds=None)
    traits = Traits(Origin(source), batch, "auto")
    (now,) = measured([script(traits, [], "As it is.")], folder=tmp_path)
    rows = [each for each in {each.name: each for each in (*found, *found.plans)}.values() if "cards" not in each.name]
    wrong = []
    for each in rows:
        (peaks,) = measured([each.code], folder=tmp_path)
        assert isinstance(peaks, list), (each.name, peaks)
        median = statistics.median(peaks)
        row = f"{each.name}: {each.low:,} {each.total:,} {each.high:,}, measured {median:,.0f}; saves {each.saving:,}"
        print(f"{row}, measured {statistics.median(now) - median:,.0f}")
        is_within = each.low <= max(peaks) and min(peaks) <= each.high
        if not is_within or (each.high < base.bytes.low and median >= statistics.median(now)):
            wrong.append(row)
    assert not wrong, wrong
