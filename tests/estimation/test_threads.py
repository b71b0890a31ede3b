"""Estimates in several threads at once."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import pytest

from kerasmem.estimation import estimating
from kerasmem.estimation.estimating import estimate_spec
from kerasmem.models.spec import StepSpec

layers = keras.layers


def dense():
    stack = [layers.Dense(24, activation="relu", name=f"dense_{number}") for number in range(2)]
    return compiled(keras.Sequential([keras.Input((16,), name="x"), *stack], name="plain"), keras.optimizers.Adam)


def convolutional():
    first = layers.Conv2D(8, 3, name="first")
    second = layers.BatchNormalization(name="second")
    last = layers.Flatten(name="last")
    return compiled(
        keras.Sequential([keras.Input((12, 12, 3), name="x"), first, second, last], name="conv"), keras.optimizers.SGD
    )


def branched():
    inputs = keras.Input((10,), name="x")
    left, right = layers.Dense(5, name="left")(inputs), layers.Dense(5, name="right")(inputs)
    return compiled(keras.Model(inputs, layers.Add(name="sum")([left, right]), name="branched"), keras.optimizers.Adam)


def compiled(model, optimizer):
    model.compile(optimizer(name="own"), "mse")
    return model


SPECS = [
    StepSpec(dense, 8, "graph"),
    StepSpec(convolutional, 4, "graph"),
    StepSpec(dense, 4, "xla"),
    StepSpec(branched, 16, "formula"),
]


def test_estimates_in_four_threads_are_those_one_after_another():
    alone = [estimate_spec(spec) for spec in SPECS]
    begin = threading.Barrier(len(SPECS))

    def estimate_together(spec):
        begin.wait()
        return estimate_spec(spec)

    with ThreadPoolExecutor(len(SPECS)) as threads:
        assert list(threads.map(estimate_together, SPECS)) == alone


@pytest.mark.parametrize("daemon", [False, True])
def test_garbage_is_collected_while_another_thread_works(monkeypatch, daemon):
    enabled, shape_step = [], estimating.shape_step

    def noted(*arguments):
        enabled.append(gc.isenabled())
        return shape_step(*arguments)

    monkeypatch.setattr(estimating, "shape_step", noted)
    end = threading.Event()
    worker = threading.Thread(target=end.wait, daemon=daemon)
    # without threads that other tests have left
    monkeypatch.setattr(estimating.threading, "enumerate", lambda: [threading.current_thread(), worker])
    worker.start()
    try:
        estimate_spec(SPECS[-1])
    finally:
        end.set()
        worker.join()
    assert enabled == [not daemon] and gc.isenabled()
