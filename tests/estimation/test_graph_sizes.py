"""A traced step at other batch sizes: what follows from two others is what tracing would give."""

from __future__ import annotations

from dataclasses import replace

import keras
import numpy as np
import pytest

import kerasmem
from kerasmem.estimation import live
from kerasmem.estimation.graph.program import Node, Program, Tensor
from kerasmem.estimation.graph.sizes import KnownSizes, SizedStep

layers = keras.layers


def convnet():
    stack = [
        keras.Input((12, 12, 3), name="input"), layers.Conv2D(8, 3, activation="relu", name="conv"),
        layers.BatchNormalization(name="norm"), layers.MaxPooling2D(name="pool"), layers.Flatten(name="flat"),
        layers.Dropout(0.5, name="dropout"), layers.Dense(10, activation="softmax", name="dense"),
    ]  # fmt: skip
    model = keras.Sequential(stack, name="convnet")
    adam = keras.optimizers.Adam(name="adam")  # else the next model's is `adam_1`, and so is the operation at the peak
    model.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def test_a_search_traces_few_sizes_and_says_what_an_estimate_of_each_says(monkeypatch):
    traced = []
    trace = live.trace_step
    monkeypatch.setattr(live, "trace_step", lambda prepared: traced.append(prepared.x.shape[0]) or trace(prepared))
    found = kerasmem.max_batch_size(convnet, device="64MB", method="graph")
    assert len(set(traced)) == len(traced) < len(found.evaluations)
    others = [each for each in found.evaluations if each.size not in traced]
    for each in (others[0], others[-1]):
        alone = kerasmem.estimate(convnet, batch_size=each.size, method="graph", device="64MB").bytes
        assert (alone.total, alone.low, alone.high) == (each.total, each.low, each.high)
    assert found.largest is not None
    alone = kerasmem.estimate(convnet, batch_size=found.largest, method="graph", device="64MB")
    assert alone == found.report


def step(size: int, *shapes: tuple[int, ...], **changes: object) -> SizedStep:
    """Return a step whose one operation makes tensors of these shapes from a constant, the batch size."""
    constant = Node("size", "Const", (), (), (Tensor((), "int32", 4),), {"value": np.array(size)})
    outputs = tuple(Tensor(shape, "float32", 4 * int(np.prod(shape))) for shape in shapes)
    node = Node("make", "Op", ((0, 0),), (), outputs, {"strides": [1, 1]})
    return SizedStep(Program((constant, replace(node, **changes)), (), (), ()), (), {}, (), ())


class Traced:
    """Traces on paper, and notes at which sizes."""

    def __init__(self, make):
        self.make, self.sizes = make, []

    def __call__(self, size):
        self.sizes.append(size)
        return self.make(size)


def test_from_the_third_size_on_one_is_traced_ahead():
    known, trace = KnownSizes(), Traced(lambda size: step(size, (size, 7), (3, 2 * size), (5,)))
    found = {size: known.at(size, trace) for size in (1, 32, 100, 1000, 33, 32)}
    assert trace.sizes == [1, 32, 1601]
    for size, each in found.items():
        assert each.program.nodes[1] == step(size, (size, 7), (3, 2 * size), (5,)).program.nodes[1]


EACH = [96, 100, 60, 2000]  # the first is a look a little below 100


@pytest.mark.parametrize(("make", "traced"), [
    pytest.param(lambda size: step(size, (min(size, 100), 7)), [96, 100, 32001], id="no more than a number of rows"),
    pytest.param(lambda size: step(size, (size + 3,)), EACH, id="neither the same nor for each sample"),
    pytest.param(lambda size: step(size, (5 * size // 2,)), EACH, id="half a row for each sample"),
    pytest.param(
        lambda size: step(size, (size,), type="Op" if size < 90 else "Other"), [96, 59, 60, 2000],
        id="another operation",
    ),
    pytest.param(
        lambda size: step(size, (size,), name="make" if size % 2 else "made"), [96, 100, 2000],
        id="odd sizes are others",
    ),
    pytest.param(lambda size: step(size, *[(size,)] * (1 + size // 90)), EACH, id="more outputs"),
    pytest.param(lambda size: step(size, (size,), attributes={"strides": [size]}), EACH, id="another attribute"),
    pytest.param(lambda size: step(size, (size,), type="Split"), EACH, id="another axis"),
    pytest.param(lambda size: replace(step(size, (size,)), notes=(str(size),)), EACH, id="another note"),
])  # fmt: skip
def test_what_is_another_step_at_another_size_does_not_follow_from_it(make, traced):
    known, trace = KnownSizes(), Traced(make)
    for size in (1, 32, 100, 60, 2000):
        found, made = known.at(size, trace), make(size)
        assert (found.program.nodes[1], found.notes) == (made.program.nodes[1], made.notes)
    assert trace.sizes == [1, 32, 1601, *traced]


def test_where_the_step_becomes_another_one_it_is_traced_a_little_below():
    def make(size):
        return step(size, (size,), type="Op" if size < 9000 else "Other")

    known, trace = KnownSizes(), Traced(make)
    sizes = (1, 32, 500, 10_000, 9_900, 9_800, 9_711)
    for size in sizes:
        assert known.at(size, trace).program.nodes[1] == make(size).program.nodes[1]
    assert trace.sizes == [1, 32, 8_001, 160_001, 9_472]


def test_what_fails_ahead_is_asked_as_it_is():
    def make(size):
        if size > 1000:
            raise ValueError("too many elements")
        return step(size, (size,))

    known, trace = KnownSizes(), Traced(make)
    assert [known.at(size, trace) for size in (1, 32, 100, 200)] == [make(size) for size in (1, 32, 100, 200)]
    assert trace.sizes == [1, 32, 1601, 100, 200]
    with pytest.raises(ValueError, match="too many"):
        known.at(1002, trace)
