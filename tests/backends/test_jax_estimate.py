"""Estimates and measurements where Keras runs on JAX: `scripts/test --with jax`."""

from __future__ import annotations

import json
import os

import pytest

if os.environ.get("KERAS_BACKEND") != "jax":
    pytest.skip("of Keras on JAX: run by `scripts/test --with jax`", allow_module_level=True)

import jax
import keras
from keras import layers, ops

import kerasmem
from kerasmem.errors import UsageError
from kerasmem.units import MIB


def dense(width=512, depth=4):
    return keras.Sequential(
        [keras.Input((256,)), *(layers.Dense(width, activation="relu") for _ in range(depth)), layers.Dense(10)]
    )


def convolutional():
    inputs = keras.Input((32, 32, 3))
    x = layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(inputs))
    x = layers.Dropout(0.2)(layers.MaxPooling2D()(layers.ReLU()(x)))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.Flatten()(x)))


def two_inputs():
    image, words = keras.Input((16, 16, 3), name="image"), keras.Input((12,), dtype="int32", name="words")
    x = layers.Concatenate()([layers.Flatten()(image), layers.Flatten()(layers.Embedding(100, 8)(words))])
    return keras.Model({"image": image, "words": words}, [layers.Dense(4)(x), layers.Dense(1)(x)])


def attention():
    inputs = keras.Input((24, 32))
    x = layers.Add()([inputs, layers.MultiHeadAttention(2, 16)(inputs, inputs)])
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(32, activation="relu"), layers.Dense(2)

    def call(self, inputs):
        return self.second(ops.tanh(self.first(inputs)))


class OwnStep(keras.Model):
    """A training step of its own, as JAX takes one."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "twice": 2 * logs["loss"]}, state


@pytest.fixture(autouse=True)
def clear_session():
    keras.backend.clear_session()


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "model.keras"
    dense(32, 1).save(path)
    return path


def test_the_plan_is_of_the_step_that_keras_compiles():
    before = sum(each.nbytes for each in jax.live_arrays())
    report = kerasmem.estimate(dense, batch_size=64, optimizer="adam", loss="mse")
    assert sum(each.nbytes for each in jax.live_arrays()) < before + 4096, "no weight was allocated"
    weights = 4 * report.model.parameters
    assert (report.settings.method, report.settings.execution) == ("xla", "xla")
    assert sum(getattr(report.bytes, name) for name in report.bytes.CATEGORIES) == report.bytes.total
    assert report.bytes.weights >= weights
    assert 2 * weights <= report.bytes.optimizer <= 2 * weights + 1024
    assert report.bytes.inputs == 4 * 64 * (256 + 10)
    assert report.bytes.total < 5 * weights, "weights and slots are donated: not there twice"
    assert report.bytes.low < report.bytes.total <= report.bytes.high
    assert report.pool.requested <= report.bytes.total
    assert any("Keras runs on JAX" in note for note in report.notes)


@pytest.mark.parametrize("build", [convolutional, two_inputs, attention, Subclassed], ids=lambda each: each.__name__)
def test_models_of_several_kinds(build):
    shape = (8,) if build is Subclassed else None
    report = kerasmem.estimate(build, batch_size=16, method="xla", optimizer="sgd", input_shape=shape)
    assert report.bytes.total >= 4 * report.model.parameters
    assert sum(row.bytes or 0 for row in report.layers) > 0
    names = [row.name for row in report.layers]
    assert len(names) == len(set(names)) and report.formula.total_bytes > 0


def test_a_step_written_for_jax_is_compiled_as_it_is():
    inputs = keras.Input((64,))
    model = OwnStep(inputs, layers.Dense(1)(layers.Dense(128)(inputs)))
    model.compile("adam", "mse")
    weights = [each.numpy().copy() for each in model.weights] if hasattr(model.weights[0], "numpy") else None
    report = kerasmem.estimate(model, batch_size=32)
    assert report.settings.method == "xla"
    assert weights is None or all((a == b.numpy()).all() for a, b in zip(weights, model.weights, strict=True))


def test_precision_mode_and_batch_count():
    full = kerasmem.estimate(convolutional, batch_size=64, method="xla", optimizer="adam").bytes
    more = kerasmem.estimate(convolutional, batch_size=128, method="xla", optimizer="adam").bytes
    half = kerasmem.estimate(convolutional, batch_size=64, dtype_policy="mixed_float16", optimizer="adam", method="xla")
    inference = kerasmem.estimate(convolutional, batch_size=64, mode="inference", method="xla").bytes
    evaluate = kerasmem.estimate(convolutional, batch_size=64, mode="evaluate", method="xla").bytes
    assert more.total > 1.5 * full.total
    assert half.settings.dtype_policy == "mixed_float16" and half.bytes.optimizer >= full.optimizer
    assert inference.optimizer == 0 and evaluate.optimizer == full.optimizer, "Keras makes slots for evaluate too"
    assert inference.total < full.total and evaluate.total < full.total


def estimated_and_measured(build, **settings):
    name = f"{__file__}:{build.__name__}"
    return kerasmem.estimate(name, method="xla", **settings), kerasmem.measure(name, steps=3, **settings)


def test_the_estimate_is_what_a_process_really_takes():
    estimated, measured = estimated_and_measured(wide, batch_size=256, optimizer="adam", loss="mse")
    assert measured.settings.method == "measure" and measured.settings.execution == "xla"
    assert measured.bytes.optimizer == pytest.approx(estimated.bytes.optimizer, rel=1e-3)
    assert measured.bytes.inputs == estimated.bytes.inputs
    assert measured.bytes.total == pytest.approx(estimated.bytes.total, rel=0.05)
    assert measured.bytes.total > 60 * MIB
    assert any("resident memory" in note for note in measured.notes)


def wide():
    return dense(1024, 5)


def test_the_largest_batch_and_the_comparison():
    found = kerasmem.max_batch_size(dense, device="32MB", optimizer="sgd", loss="mse", maximum=4096)
    assert found.largest is not None and found.report.settings.method == "xla"
    assert found.report.bytes.high <= 32 * 10**6
    with pytest.raises(UsageError, match="confirm needs the TensorFlow backend"):
        kerasmem.max_batch_size(dense, device="32MB", confirm=True)


def test_the_summary(capsys):
    kerasmem.summary(dense(32, 2), batch_size=8)
    assert "dense" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("estimate", "--method", "graph"), "method 'graph' needs the TensorFlow backend of Keras, not JAX; use xla"),
        (("estimate", "--method", "probe"), "method 'probe' needs the TensorFlow backend"),
        (("estimate", "--method", "xla", "--no-jit-compile"), "jit_compile=False"),
        (("measure", "--no-jit-compile"), "jit_compile=False"),
        (("profile",), "profile needs the TensorFlow backend"),
        (("max-batch", "--device", "1GB", "--confirm"), "confirm needs the TensorFlow backend"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_not_there_says_so_in_one_line(cli, model_file, arguments, said):
    result = cli(arguments[0], model_file, *arguments[1:])
    assert result.code == 2
    assert said in result.err and len(result.err.strip().splitlines()) == 1


def test_commands(cli, model_file):
    for command in (("estimate", "-b", 8), ("max-batch", "--device", "64MB", "--maximum", 64), ("cards",)):
        result = cli(command[0], model_file, *command[1:], "--json")
        assert result.code == 0, result.err
        assert json.loads(result.out)["format_version"] == 1
    result = cli("compare", model_file, model_file, "--json")
    assert result.code == 0, result.err


def test_advice_leaves_out_what_only_tensorflow_has():
    advice = kerasmem.advise(small, device="2MB", batch_size=1024, optimizer="adam", loss="mse", budget_seconds=None)
    assert {each.method for each in advice} == {"xla"}
    assert any("smaller batch" in each.name or "batches of" in each.name for each in advice)
    refused = [each.name for each in advice.considered if "Keras runs on JAX" in each.why]
    assert len(refused) == 3, advice.considered
    assert not any("defect" in each.why for each in advice.considered)


def small():
    return dense(128, 1)
