"""`kerasmem.advise`: each remedy is the estimate of the changed step, and its code trains within that."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import advised_models
import keras
import pytest
from advice_scripts import measured

import kerasmem
from kerasmem.devices.catalogue import resolve_device
from kerasmem.errors import KerasmemError
from kerasmem.models.spec import StepSpec
from kerasmem.recovery.advice import Advice
from kerasmem.recovery.changed_model import build, is_loaded, traits_of
from kerasmem.recovery.changes import Traits, code_of
from kerasmem.recovery.estimator import StepEstimator
from kerasmem.recovery.remedies import RemedySearch

pytestmark = pytest.mark.usefixtures("loaded_python")

MODELS = Path(advised_models.__file__)
RESIDUAL = f"{MODELS}:residual"
BATCH = 1024
OPTIONS = {"factory_args": {"blocks": 2}, "method": "graph"}


@pytest.fixture(scope="module")
def advice():
    return kerasmem.advise(RESIDUAL, device="14MB", batch_size=BATCH, budget_seconds=None, **OPTIONS)


@pytest.fixture(scope="module")
def search():
    origin = StepSpec(RESIDUAL, factory_args={"blocks": 2})
    estimator = StepEstimator(
        origin, resolve_device("14MB"), BATCH, "train", jit_compile=False, method="graph", budget_seconds=None
    )
    estimator.estimate_current()
    search = RemedySearch(estimator)
    search.traits = traits_of(origin, BATCH)
    return search


def test_each_remedy_saves_and_the_best_comes_first(advice):
    assert advice.device.verdict == "does not fit"
    assert len(advice) == len(advice.remedies) >= 5
    assert all(each.saving > 0 and each.before == advice.need.total for each in advice)
    worth = [each.saving / each.compute for each in advice]
    assert worth == sorted(worth, reverse=True)
    assert {each.verdict for each in advice} >= {"fits", "does not fit"}
    assert advice.verdict == "fits"


def test_a_remedy_is_the_estimate_of_the_changed_step(advice):
    by_kind = {each.changes[0]["kind"]: each for each in advice}
    batch = by_kind["batch_size"]
    assert batch.total == kerasmem.estimate(RESIDUAL, batch_size=batch.changes[0]["value"], **OPTIONS).bytes.total
    half = kerasmem.estimate(RESIDUAL, batch_size=BATCH, dtype_policy="mixed_float16", **OPTIONS)
    assert by_kind["dtype_policy"].total == half.bytes.total

    def recomputed():
        return kerasmem.recompute(advised_models.residual(blocks=2), batch_size=BATCH)

    again = kerasmem.estimate(recomputed, batch_size=BATCH, method="graph")
    found = by_kind["recompute"]
    assert (found.total, found.result) == (again.bytes.total, "same training trajectory")


def test_plans_fit_and_the_least_harmful_comes_first(advice):
    assert advice.plans[0].result == "same training trajectory"
    assert all(each.verdict == "fits" and each.high <= advice.device.available_bytes for each in advice.plans)


def test_every_remedy_is_offered_or_refused_with_a_reason(advice):
    names = " ".join(each.name for each in (*advice, *advice.considered))
    for word in ("XLA", "Adafactor", "Lion", "SGD", "frozen", "LoRA", "cards"):
        assert word in names, word
    assert all(each.why for each in advice.considered)


def test_results_to_and_from_data(advice):
    data = advice.to_dict()
    assert Advice.from_dict(data) == advice
    assert data["remedies"][0]["saving"] == advice[0].before - advice[0].total
    for wrong, message in (({**data, "format_version": 99}, "format_version"), ({"format_version": 1}, "advice")):
        with pytest.raises(KerasmemError, match=message):
            Advice.from_dict(wrong)
    assert advice[:2] == advice.remedies[:2]


def test_the_code_of_a_plan_trains_within_the_prediction(advice):
    plan = advice.plans[0]
    assert plan.changes[0]["kind"] == "micro_batches"
    peaks = measured("residual", plan.code, BATCH, blocks=2)
    assert plan.low <= statistics.median(peaks) <= plan.high
    assert max(peaks) <= advice.device.available_bytes


def test_the_code_of_a_combination_trains_within_the_prediction(search):
    values = {"dtype_policy": "mixed_bfloat16", "recompute": "auto", "optimizer": "sgd_momentum", "batch_size": 512}
    changes = tuple(search.traits.change(kind, value) for kind, value in values.items())
    found = search.remedy(changes, search.estimator.estimate(changes))
    assert found.result == "other optimizer"
    peaks = measured("residual", found.code, BATCH, blocks=2)
    assert found.low <= max(peaks) and statistics.median(peaks) <= found.high  # a step's order of operations is chance
    assert statistics.median(peaks) < found.before / 2


def test_micro_batches_keep_slices_of_gradients_as_fit_does():
    """The embedding's gradients are slices, for which `fit` makes no accumulator."""
    origin = StepSpec(f"{MODELS}:vocabulary")

    def need(changes):
        arguments = {"origin": origin, "changes": changes}
        return kerasmem.estimate(build, factory_args=arguments, batch_size=64, method="graph").bytes.total

    added = need([{"kind": "micro_batches", "value": 4}]) - need([])
    assert 0 < added < 40_000 * 32 * 4 / 4


TRAITS = Traits(64, has_own_step=False, has_batch_norm=False, head_start=2, can_lora=True)
COMPILE = "model.compile(optimizer, loss=loss, metrics=metrics"


@pytest.mark.parametrize(
    ("kinds", "mode", "expected"),
    [
        ({"micro_batches": 4}, "train", "kerasmem.fit(model, x, y, batch_size=64, micro_batches=4)"),
        ({"batch_size": 16}, "train", "model.fit(x, y, batch_size=16)"),
        ({"batch_size": 16}, "evaluate", "model.evaluate(x, y, batch_size=16)"),
        ({"batch_size": 16}, "inference", "model.predict(x, batch_size=16)"),
        ({"recompute": "auto", "micro_batches": 4}, "train", "model = kerasmem.recompute(model, batch_size=16)"),
        ({"optimizer": "sgd_momentum"}, "train", "optimizer = keras.optimizers.SGD(0.01, momentum=0.9)"),
        ({"freeze": True}, "train", "for layer in model.layers[:2]:"),
        ({"lora": 8}, "train", "model = with_lora(model, 8)"),
        ({"jit_compile": True}, "train", f"{COMPILE}, jit_compile=True)"),
        ({"replicas": 2}, "train", 'strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])'),
    ],
)
def test_code_has_the_changed_lines(kinds, mode, expected):
    code = code_of([TRAITS.change(*each) for each in kinds.items()], TRAITS, mode, is_loaded=False)
    compile(code, "code", "exec")
    assert expected in code
    assert (COMPILE in code) == bool({"optimizer", "freeze", "lora", "jit_compile"} & set(kinds))


def test_a_smaller_batch_trains_otherwise_and_predicts_alike():
    assert TRAITS.change("batch_size", 16).result == "same network, other training"
    predicts = replace(TRAITS, trains=False)
    assert predicts.change("batch_size", 16).result == "same outputs"


def test_a_loaded_model_changes_the_policies_of_its_layers(tmp_path):
    half = [TRAITS.change("dtype_policy", "mixed_float16")]
    built = code_of(half, TRAITS, "train", is_loaded=is_loaded(StepSpec(RESIDUAL)))
    assert built.startswith('keras.config.set_dtype_policy("mixed_float16")')
    model = advised_models.residual(blocks=1)
    assert is_loaded(StepSpec("model.keras")) and is_loaded(StepSpec(model))
    assert not is_loaded(StepSpec(advised_models.residual)) and not is_loaded(StepSpec("w.h5", factory="m:f"))
    names = {"model": model, "optimizer": "adam", "loss": "mse", "metrics": []}
    exec(code_of(half, TRAITS, "train", is_loaded=True), names)
    assert {each.compute_dtype for each in names["model"].layers} == {"float16"}


def test_a_frozen_backbone_leaves_the_head_to_train():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)])
    arguments = {"origin": StepSpec(model), "changes": [{"kind": "freeze", "value": True}]}
    need = kerasmem.estimate(build, factory_args=arguments, batch_size=16, method="formula")
    assert need.model.trainable_parameters == 16 * 4 + 4


def test_recomputation_that_saves_nothing_is_no_warning(recwarn):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    arguments = {"origin": StepSpec(model), "changes": [{"kind": "recompute", "value": "auto"}]}
    kerasmem.estimate(build, factory_args=arguments, batch_size=16, method="formula")
    assert not [each for each in recwarn if "recompute" in str(each.message)]


def test_no_time():
    found = kerasmem.advise(RESIDUAL, device="14MB", method="graph", budget_seconds=0, factory_args={"blocks": 1})
    assert found.remedies == ()
    assert sum("time limit" in each.why for each in found.considered) >= 6


def test_a_short_time_goes_to_what_takes_one_estimate(search, monkeypatch):
    asked = []

    def no_answer(changes):
        asked.extend(each.kind for each in changes)
        raise KerasmemError("no answer")

    def no_batch(*_, **__):
        asked.append("batch_size")
        raise KerasmemError("no answer")

    monkeypatch.setattr(search.estimator, "estimate", no_answer)
    monkeypatch.setattr("kerasmem.recovery.remedies.max_batch_size", no_batch)
    search.run()
    order = ["dtype_policy", "optimizer", "freeze", "lora", "batch_size", "micro_batches", "recompute", "replicas"]
    assert list(dict.fromkeys(asked)) == [*order, "jit_compile"]


def test_nothing_needs_to_be_done():
    found = kerasmem.advise(RESIDUAL, device="1GB", batch_size=64, budget_seconds=0, **OPTIONS)
    assert found.verdict == "fits"
    assert found.plans == ()


def test_a_model_without_a_configuration():
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
    assert found.settings.method == "graph"
    assert found.plans or found.remedies


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "nothing"}, "device must be a card of the catalogue"),
        ({"device": "1GB", "budget_seconds": -1}, "budget_seconds"),
        ({"device": "1GB", "batch_size": 0}, "batch_size"),
        ({"device": "1GB", "method": "guess"}, "method"),
        ({"device": "1GB", "samples": 0}, "samples"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(KerasmemError, match=message):
        kerasmem.advise(RESIDUAL, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [("attention", 256), ("autoencoder", 128), ("towers", 1024)])
def test_predicted_and_measured_savings(name, batch):
    """Each remedy in a process of its own. Less must be measured if the intervals do not overlap."""
    source = f"{MODELS}:{name}"
    base = kerasmem.estimate(source, batch_size=batch, method="graph")
    found = kerasmem.advise(source, device=base.bytes.low // 2, batch_size=batch, method="graph", budget_seconds=None)
    now = statistics.median(measured(name, "", batch))
    rows = {each.name: each for each in (*found, *found.plans) if "cards" not in each.name}
    wrong = []
    for each in rows.values():
        peaks = measured(name, each.code, batch)
        is_within = each.low <= max(peaks) and min(peaks) <= each.high
        if not is_within or (each.high < base.bytes.low and statistics.median(peaks) >= now):
            wrong.append((each.name, each.low, each.total, each.high, peaks))
    assert not wrong
