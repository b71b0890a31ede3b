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
    """A custom training step for JAX."""

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


def test_estimate_plans_the_step_that_keras_compiles():
    before = sum(array.nbytes for array in jax.live_arrays())
    report = kerasmem.estimate(dense, batch_size=64, optimizer="adam", loss="mse")
    assert sum(array.nbytes for array in jax.live_arrays()) < before + 4096, "no weight was allocated"
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


@pytest.mark.parametrize("build", [convolutional, two_inputs, attention, Subclassed], ids=lambda build: build.__name__)
def test_estimate_covers_several_kinds_of_models(build):
    shape = (8,) if build is Subclassed else None
    report = kerasmem.estimate(build, batch_size=16, method="xla", optimizer="sgd", input_shape=shape)
    assert report.bytes.total >= 4 * report.model.parameters
    assert sum(row.bytes or 0 for row in report.layers) > 0
    names = [row.name for row in report.layers]
    assert len(names) == len(set(names)) and report.formula.total_bytes > 0


def test_estimate_compiles_a_custom_train_step():
    inputs = keras.Input((64,))
    model = OwnStep(inputs, layers.Dense(1)(layers.Dense(128)(inputs)))
    model.compile("adam", "mse")
    weights = model.get_weights()
    report = kerasmem.estimate(model, batch_size=32)
    assert report.settings.method == "xla"
    assert all((before == after).all() for before, after in zip(weights, model.get_weights(), strict=True))


def test_batch_size_precision_and_mode_change_the_estimate():
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


def test_estimate_matches_a_real_process():
    estimated, measured = estimated_and_measured(wide, batch_size=256, optimizer="adam", loss="mse")
    assert measured.settings.method == "measure" and measured.settings.execution == "xla"
    assert measured.bytes.optimizer == pytest.approx(estimated.bytes.optimizer, rel=1e-3)
    assert measured.bytes.inputs == estimated.bytes.inputs
    assert measured.bytes.total == pytest.approx(estimated.bytes.total, rel=0.05)
    assert measured.bytes.total > 60 * MIB
    assert any("resident memory" in note for note in measured.notes)


def wide():
    return dense(1024, 5)


def test_max_batch_size_uses_xla_and_refuses_confirm():
    result = kerasmem.max_batch_size(dense, device="32MB", optimizer="sgd", loss="mse", maximum=4096)
    assert result.largest is not None and result.report.settings.method == "xla"
    assert result.report.bytes.high <= 32 * 10**6
    with pytest.raises(UsageError, match="confirm needs the TensorFlow backend"):
        kerasmem.max_batch_size(dense, device="32MB", confirm=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("estimate", "--method", "graph"), "method 'graph': not on Keras's jax backend, only on TensorFlow; use xla"),
        (("estimate", "--method", "xla", "--no-jit-compile"), "jit_compile=False"),
        (("profile",), "profile needs the TensorFlow backend"),
        (("max-batch", "--device", "1GB", "--confirm"), "confirm needs the TensorFlow backend"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_unsupported_features_are_refused_in_one_line(cli, model_file, arguments, message):
    result = cli(arguments[0], model_file, *arguments[1:])
    assert result.code == 2
    assert message in result.err and len(result.err.strip().splitlines()) == 1


def test_commands_print_json(cli, model_file):
    for command in (("estimate", "-b", 8), ("max-batch", "--device", "64MB", "--maximum", 64), ("cards",)):
        result = cli(command[0], model_file, *command[1:], "--json")
        assert result.code == 0, result.err
        assert json.loads(result.out)["format_version"] == 1
    result = cli("compare", model_file, model_file, "--json")
    assert result.code == 0, result.err


def test_advise_refuses_remedies_of_tensorflow():
    advice = kerasmem.advise(small, device="2MB", batch_size=1024, optimizer="adam", loss="mse", budget_seconds=None)
    assert {plan.method for plan in advice} == {"xla"}
    assert any("smaller batch" in plan.name or "batches of" in plan.name for plan in advice)
    refused = [remedy.name for remedy in advice.considered if "Keras runs on JAX" in remedy.why]
    assert len(refused) == 3, advice.considered
    assert not any("defect" in remedy.why for remedy in advice.considered)


def small():
    return dense(128, 1)
