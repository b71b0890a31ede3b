"""Which method answers under "auto", and what is said where one cannot."""

from __future__ import annotations

from dataclasses import replace

import keras
import pytest

from kerasmem.devices import host
from kerasmem.devices.catalogue import resolve_device
from kerasmem.errors import KerasmemError, MissingExtraError, ModelError, UsageError
from kerasmem.estimation import methods
from kerasmem.estimation.estimating import estimate
from kerasmem.estimation.methods import METHODS, Method
from kerasmem.estimation.report import Outcome, Pool
from kerasmem.estimation.shapes import StepCache, shape_step
from kerasmem.models.spec import StepSpec

layers = keras.layers
CARD, SIZE = resolve_device("t4"), resolve_device("16GB")
EXECUTION = {"graph": "graph", "probe": "graph", "xla": "xla", "gpu-target": "xla"}


def outcome(method):
    return Outcome(
        method=method, execution=EXECUTION[method], total=100, low=90, high=120, pool=Pool(80, 100, 200),
        weights=100,
    )  # fmt: skip


@pytest.fixture
def ask(monkeypatch):
    """Estimate a step by methods that are replaced: those named in `fails` refuse."""

    def run(method="auto", jit_compile="auto", target=None, fails=(), model=None, formula_bytes=1000, replicas=1):
        if model is None:
            model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        refusals = {name: KerasmemError(f"{name} will not") for name in fails}
        refusals.update(fails if isinstance(fails, dict) else {})
        tried = []

        def answer_of(name):
            def answer(step):
                tried.append(name)
                if name in refusals:
                    raise refusals[name]
                return outcome(name)

            return answer

        for name in EXECUTION:
            monkeypatch.setitem(METHODS, name, replace(METHODS[name], outcome=answer_of(name)))
        spec = StepSpec(model, 8, method, jit_compile=jit_compile, replicas=replicas)
        with spec.open_model() as opened:
            step = shape_step(spec, target, opened, StepCache())
            formula = replace(step.formula, total_bytes=formula_bytes)
            step = replace(step, formula=formula, opened=replace(opened, model=model))
            return methods.step_outcome(step), tried

    return run


class NoJit(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.supports_jit = False

    def call(self, x):
        return x


def no_jit():
    return keras.Sequential([keras.Input((3,)), NoJit(name="stubborn"), layers.Dense(2)])


def recurrent():
    return keras.Sequential([keras.Input((3, 2)), layers.GRU(2, name="memory")])


def other_recurrent():
    first = layers.LSTM(2, activation="relu", return_sequences=True)
    return keras.Sequential([keras.Input((3, 2)), first, layers.GRU(2, use_cudnn=False)])


@pytest.mark.parametrize(
    ("jit_compile", "target", "build", "first", "why"),
    [
        ("auto", None, None, "graph", "no card is named"),
        ("auto", SIZE, None, "graph", "a memory size alone does not name a GPU"),
        ("auto", CARD, None, "gpu-target", "--no-jit-compile"),
        ("auto", CARD, no_jit, "graph", "layer 'stubborn' cannot be compiled by XLA"),
        ("auto", CARD, recurrent, "graph", "cuDNN runs layer 'memory'"),
        ("auto", CARD, other_recurrent, "gpu-target", "Keras compiles with XLA on a GPU"),
        (True, None, None, "xla", "jit_compile=True"),
        (True, CARD, None, "gpu-target", "jit_compile=True"),
        (False, None, None, "graph", "jit_compile=False"),
        (False, CARD, None, "graph", "jit_compile=False"),
    ],
)
def test_the_method_follows_how_keras_would_run_the_step(ask, jit_compile, target, build, first, why):
    answer, tried = ask(jit_compile=jit_compile, target=target, model=None if build is None else build())
    assert answer.method == tried[0] == first
    assert any(note.startswith(f"{first}, since") and why in note for note in answer.notes), answer.notes


@pytest.mark.parametrize(
    ("target", "fails", "answers"),
    [(None, ("graph",), "probe"), (CARD, ("gpu-target",), "xla"), (CARD, ("gpu-target", "xla"), "graph")],
)
def test_auto_tries_the_next_method_and_notes_why(ask, target, fails, answers):
    answer, _ = ask(target=target, fails=fails)
    assert answer.method == answers
    assert [note for note in answer.notes if "has no answer" in note] == [
        f"{name} has no answer: {name} will not" for name in fails
    ]


def test_several_devices_keep_the_plan_of_the_card(ask, monkeypatch):
    answer, tried = ask(target=CARD, replicas=2, jit_compile=True)
    assert tried == [answer.method] == ["gpu-target"]
    assert any("packed into one buffer" in note for note in answer.notes)
    monkeypatch.setattr(methods, "runs_on_jax", lambda: True)
    answer, tried = ask(target=CARD, replicas=2)
    assert tried == [answer.method] == ["gpu-target"] and answer.total == 100
    assert not any("packed" in note for note in answer.notes)
    assert [entry.what for entry in answer.unmodelled] == ["gradient exchange"]


def test_the_upper_end_of_a_plan_has_the_buffers_of_the_exchange(ask):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(200)])  # gradients of 3,200 B
    answer, _ = ask("gpu-target", target=CARD, replicas=2, model=model)
    assert (answer.total, answer.low, answer.high) == (100 + 2 * 3200, 90, 120 + 3 * 3200)


def test_a_plan_for_the_cpu_is_not_passed_off_as_the_cards(ask):
    answer, _ = ask(target=CARD, fails={"gpu-target": MissingExtraError("a plan for a card", "gpu-targets")})
    assert any("pip install" in note for note in answer.notes)
    assert answer.method == "xla" and answer.stands_in


def test_real_steps_on_a_cpu_are_not_passed_off_as_the_cards(ask, monkeypatch):
    """A card that the driver lists may be hidden from TensorFlow."""
    for device, stands_in in (("CPU:0", True), ("GPU:0", False)):
        ran = replace(outcome("probe"), ran_on=device)
        monkeypatch.setattr(f"{__name__}.outcome", lambda method, ran=ran: ran)
        answer, _ = ask("probe", target=CARD)
        assert answer.stands_in is stands_in
        assert ask("probe")[0].stands_in is False


@pytest.mark.parametrize("limit", [10**6, None])
def test_auto_runs_steps_only_within_the_memory_of_the_job(ask, monkeypatch, limit):
    monkeypatch.setattr(host, "tightest_limit", lambda: limit and host.MemoryLimit(limit, None, "a job"))
    answer, tried = ask(fails=("graph",), formula_bytes=10**6)
    assert tried == (["graph"] if limit else ["graph", "probe"])
    assert answer.method == ("formula" if limit else "probe")


@pytest.mark.parametrize("target", [None, CARD])
def test_the_formula_answers_with_the_reasons_if_no_other_method_does(ask, target):
    answer, _ = ask(target=target, fails=("graph", "probe", "gpu-target", "xla"))
    assert answer.method == "formula" and "the formula answers instead of other methods" in answer.notes
    assert "graph has no answer: graph will not" in answer.fallback


@pytest.mark.parametrize(("target", "first"), [(None, "graph"), (CARD, "gpu-target")])
def test_a_defect_of_a_method_leads_to_the_formula_and_runs_no_step(ask, target, first):
    answer, tried = ask(target=target, fails={first: ZeroDivisionError("by our own fault")})
    assert tried == [first] and answer.method == "formula"
    assert "ZeroDivisionError: by our own fault; a defect in kerasmem" in answer.fallback


def test_no_step_is_run_that_may_not_fit_here(ask):
    answer, tried = ask(fails=("graph",), formula_bytes=10**15)
    assert tried == ["graph"]
    assert answer.method == "formula"
    assert any("no step was run" in note and "--method probe" in note for note in answer.notes)


@pytest.mark.parametrize("method", ["graph", "xla", "gpu-target", "probe"])
def test_a_method_that_was_named_answers_or_fails(ask, method):
    assert ask(method, target=CARD)[0].method == method
    with pytest.raises(KerasmemError, match=f"{method} will not"):
        ask(method, target=CARD, fails=(method,))


def test_a_plan_for_a_card_needs_a_card(mnist_cnn):
    for device in (None, "16GB"):
        with pytest.raises(UsageError, match="name one with --device"):
            estimate(mnist_cnn, method="gpu-target", device=device)


def test_figures_of_a_method_are_the_reports(monkeypatch):
    known = replace(outcome("graph"), layers={"dense": 60}, weights=70, allocator=30)
    monkeypatch.setitem(METHODS, "graph", Method(lambda step: None, lambda step: known))
    report = estimate(lambda: keras.Sequential([keras.Input((3,)), layers.Dense(2, name="dense")]))
    assert (report.bytes.total, report.bytes.low, report.bytes.high) == (100, 90, 120)
    assert (report.bytes.weights, report.bytes.allocator, report.bytes.optimizer) == (70, 30, None)
    assert {row.name: row.bytes_at_peak for row in report.layers}["dense"] == 60
    assert report.pool == Pool(80, 100, 200)


def test_a_live_model_that_cannot_be_rebuilt_is_traced():
    class Odd(keras.Model):
        def __init__(self, thing):
            super().__init__()
            self.dense = layers.Dense(2)
            self.thing = thing

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    odd = Odd(object())
    odd.build((None, 3))
    report = estimate(odd, input_shape=(3,))
    assert report.settings.method == "graph" and report.model.parameters == 8


class OwnAttention(layers.MultiHeadAttention):
    """Keras's layer under another name."""


class Pairs(layers.Layer):
    """All pairs of a row's values, reduced to their mean."""

    def call(self, x):
        return keras.ops.mean(x[:, :, None] * x[:, None, :], axis=2)


class OwnStep(keras.Model):
    def train_step(self, data):
        keras.ops.matmul(data[0], keras.ops.transpose(data[0]))
        return super().train_step(data)


def twice(x):
    return 2 * x


def all_pairs(y, prediction):
    return keras.ops.mean(keras.ops.square(y[:, None] - prediction[None]))


class Largest(keras.metrics.Mean):
    pass


def attention(inputs):
    rows = layers.Reshape((8, 1))(inputs)
    return layers.Flatten()(OwnAttention(2, 2, name="part")(rows, rows))


def pairs(inputs):
    return Pairs(name="part")(inputs)


@pytest.mark.parametrize(
    ("part", "options"),
    [
        (attention, {}),
        (pairs, {}),
        (layers.Lambda(twice, name="part"), {}),
        (layers.Dense(2, activation=twice, name="part"), {}),
        (layers.SpectralNormalization(layers.Dense(2, kernel_regularizer=lambda w: 0.0), name="part"), {}),
        (lambda x: keras.ops.vectorized_map(twice, x), {}),
        (layers.Dense(2), {"base": OwnStep}),
        (layers.Dense(2), {"loss": all_pairs}),
        (layers.Dense(2), {"metrics": [Largest(name="part")]}),
        (layers.Dense(2), {"weighted_metrics": [keras.metrics.AUC(name="part")]}),
    ],
)
def test_the_formula_has_no_upper_end_with_code_of_the_user(part, options):
    inputs = keras.Input((8,))
    options = {"loss": "mse", **options}
    model = options.pop("base", keras.Model)(inputs, layers.Dense(1)(part(inputs)))
    model.compile("sgd", **options)
    report = estimate(model, method="formula", device="16GB")
    assert (report.bytes.high, report.device.verdict) == (None, "too close to call")
    assert [entry for entry in report.unmodelled if entry.what.startswith("the inside of")]
    plain = keras.Model(inputs, layers.Dense(1)(layers.Dense(2, activation="relu")(inputs)))
    plain.compile("sgd", "mse", metrics=["mae"])
    assert estimate(plain, method="formula").bytes.high


@pytest.mark.parametrize("loss", ["binary_focal_crossentropy", "mse"])
def test_the_upper_end_of_the_formula_has_the_inner_values_of_the_loss(loss):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4096)])
    model.compile("sgd", loss, metrics=["categorical_accuracy"])
    graph = estimate(model, method="graph", batch_size=512)
    assert estimate(model, method="formula", batch_size=512).bytes.high >= graph.peak


@pytest.mark.parametrize("optimizer", ["rmsprop", "adadelta", "lion"])
def test_the_upper_end_of_the_formula_has_the_inner_values_of_the_update(optimizer):
    model = keras.Sequential([keras.Input((1024,)), layers.Dense(1024)])
    model.compile(optimizer, "mse")
    high = estimate(model, method="formula", batch_size=4).bytes.high
    assert high >= estimate(model, method="graph", batch_size=4).peak


def test_a_normalization_must_be_built_before_its_first_step():
    """TensorFlow cannot use the constants of a layer that is built in a graph."""
    model = keras.Sequential([layers.Normalization(name="scale"), layers.Dense(1)])
    model.compile("sgd", "mse")
    for method in ("auto", "graph", "formula"):
        with pytest.raises(ModelError, match=r"'scale'.*adapt"):
            estimate(model, input_shape=(8,), method=method)
    model.layers[0].build((None, 8))
    assert estimate(model, input_shape=(8,)).settings.method == "graph"
