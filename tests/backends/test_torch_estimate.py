"""Estimates and measurements where Keras runs on PyTorch: `scripts/test --with torch`."""

from __future__ import annotations

import os

import pytest

if os.environ.get("KERAS_BACKEND") != "torch":
    pytest.skip("of Keras on PyTorch: run by `scripts/test --with torch`", allow_module_level=True)

import keras
import torch
from keras import layers, ops

import kerasmem
from kerasmem.errors import UsageError
from kerasmem.units import GIB


def dense():
    return keras.Sequential(
        [keras.Input((256,)), *(layers.Dense(512, activation="gelu") for _ in range(3)), layers.Dense(10)]
    )


def convolutional():
    inputs = keras.Input((32, 32, 3))
    x = layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(inputs))
    x = layers.Dropout(0.2)(layers.MaxPooling2D()(layers.ReLU()(x)))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.Flatten()(x)))


def attention():
    inputs = keras.Input((24, 32))
    x = layers.Add()([inputs, layers.MultiHeadAttention(2, 16)(inputs, inputs)])
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))))


def recurrent():
    return keras.Sequential([keras.Input((12, 16)), layers.LSTM(64, return_sequences=True), layers.LSTM(32)])


class Distilled(keras.Model):
    """A training step of its own, as PyTorch has it."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = layers.Dense(64), layers.Dense(64)

    def call(self, inputs):
        return self.student(inputs)

    def train_step(self, data):
        x, _ = data
        self.zero_grad()
        loss = ops.mean(ops.square(self(x) - ops.stop_gradient(self.teacher(x))))
        loss.backward()
        weights = self.student.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([each.value.grad for each in weights], weights)
        return {"loss": loss}


def distilled():
    model = Distilled()
    inputs = keras.Input((32,))
    model(inputs)
    model.teacher(inputs)
    model.compile("adam", "mse")
    return model


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("KERASMEM_CACHE", "off")
    keras.backend.clear_session()


def estimated(model, batch_size=64, **options):
    options = {"optimizer": "adam", "loss": "mse", **options}
    return kerasmem.estimate(model, batch_size=batch_size, **options)


def measured(name, batch_size=64, **options):
    options = {"optimizer": "adam", "loss": "mse", **options}
    return kerasmem.measure(f"{__file__}:{name}", batch_size=batch_size, steps=2, **options)


@pytest.mark.parametrize("model", [dense, recurrent])
def test_the_total_is_what_the_profiler_sees(model):
    report, truth = estimated(model), measured(model.__name__)
    assert report.settings.method == report.settings.execution == "eager"
    assert truth.settings.execution == "eager"
    assert report.bytes.total == pytest.approx(truth.bytes.total, rel=0.002)
    assert "PyTorch's profiler" in truth.notes[0]


def test_an_optimizer_that_looks_at_values():
    report, truth = estimated(dense, optimizer="sgd"), measured("dense", optimizer="sgd")
    assert report.bytes.total == pytest.approx(truth.bytes.total, rel=0.002)
    for optimizer in ("rmsprop", "lion", "adamw", "nadam"):
        assert estimated(dense, optimizer=optimizer).bytes.total > report.bytes.total


@pytest.mark.parametrize("model", [convolutional, attention])
def test_copies_of_a_cpus_kernels_are_in_the_interval(model):
    report, truth = estimated(model), measured(model.__name__)
    assert report.bytes.low <= truth.bytes.total <= report.bytes.high
    assert report.bytes.total == pytest.approx(truth.bytes.total, rel=0.25)
    assert [each.what for each in report.unmodelled] == ["scratch of kernels"]


def test_half_precision_and_other_modes():
    whole = estimated(dense, 4096)
    half = estimated(dense, 4096, dtype_policy="mixed_bfloat16")
    evaluated, predicted = (estimated(dense, 4096, mode=mode) for mode in ("evaluate", "inference"))
    assert half.bytes.total < 0.8 * whole.bytes.total
    assert predicted.bytes.total <= evaluated.bytes.total < whole.bytes.total
    truth = measured("dense", 4096, mode="inference")
    assert predicted.bytes.total == pytest.approx(truth.bytes.total, rel=0.002)


def test_what_is_held_is_divided_by_category_and_layer():
    report = estimated(dense, device="t4")
    assert sum(getattr(report.bytes, name) or 0 for name in report.bytes.CATEGORIES) == report.bytes.total
    assert report.bytes.weights >= 4 * report.model.parameters
    assert report.bytes.gradients >= 4 * report.model.trainable_parameters
    assert report.bytes.total % 512 == 0  # as the caching allocator of a card rounds
    assert report.device.verdict == "fits"
    rows = {row.name: row.bytes for row in report.layers}
    assert rows["dense_1"] > rows["dense_3"] > 0
    assert report.instant.phase == "optimizer"
    report = estimated(convolutional)
    assert report.instant.layer in {row.name for row in report.layers}


def test_a_step_of_ones_own():
    assert estimated(distilled, optimizer=None, loss=None).bytes.total > 2 * 32 * 64 * 4


def test_weights_are_not_allocated():
    def wide():
        return keras.Sequential([keras.Input((60_000,)), layers.Dense(60_000)])

    assert estimated(wide, 1).bytes.weights > 13 * GIB


def test_what_is_not_there_is_one_line():
    for options, said in (
        ({"method": "graph"}, "method 'graph': not on Keras's torch backend; on PyTorch there are eager"),
        ({"replicas": 2}, "not on Keras's torch backend"),
    ):
        with pytest.raises(UsageError, match=said):
            estimated(dense, **options)
    with pytest.raises(UsageError, match="on PyTorch it estimates, measures, logs and streams, and no more"):
        kerasmem.recompute(dense())
    with pytest.raises(UsageError, match="on PyTorch it estimates, measures, logs and streams, and no more"):
        kerasmem.advise(dense, device="4GB")
    with pytest.raises(UsageError, match=r"torch\.compile"):
        measured("dense", jit_compile=True)
