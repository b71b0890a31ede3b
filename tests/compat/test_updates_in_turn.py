"""The update of one variable waits for that of the variable before."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasmem.compat import keras_training
from kerasmem.compat.borrowing import Borrowed
from kerasmem.compat.keras_training import update_in_turn

SHAPES = [(4, 3), (3,), (3, 2)]


def traced(optimizer, *, is_in_turn):
    weights = [tf.Variable(np.ones(shape, "float32")) for shape in SHAPES]
    optimizer.build(weights)

    @tf.function
    def update(*gradients):
        if not is_in_turn:
            return optimizer.apply(gradients, weights)
        with update_in_turn():
            return optimizer.apply(gradients, weights)

    update(*[0.1 * tf.reshape(tf.range(float(np.prod(shape))), shape) for shape in SHAPES])
    return update.get_concrete_function(*[tf.TensorSpec(shape) for shape in SHAPES]).graph, weights


def assignments(graph, weights):
    handles = {id(weight.handle): inside for outside, inside in graph.captures for weight in weights
               if outside is weight.handle}  # fmt: skip
    return [
        [op for op in graph.get_operations() if op.type.startswith("Assign") and op.inputs[0] is handles[id(w.handle)]]
        for w in weights
    ]


def before(op):
    found, waiting = set(), [op]
    while waiting:
        each = waiting.pop()
        for other in (*each.control_inputs, *(tensor.op for tensor in each.inputs)):
            if other.name not in found:
                found.add(other.name)
                waiting.append(other)
    return found


@pytest.mark.parametrize("make", [keras.optimizers.SGD, keras.optimizers.AdamW], ids=["SGD", "AdamW"])
def test_one_variable_waits_for_the_one_before(make):
    def waits(graph, weights):
        pairs = itertools.pairwise(assignments(graph, weights))
        return [one[-1].name in before(other[-1]) for one, other in pairs]

    graph, weights = traced(make(0.1), is_in_turn=True)
    assert waits(graph, weights) == [True, True]
    usual, others = traced(make(0.1), is_in_turn=False)
    assert waits(usual, others) == [False, False]
    for weight, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(weight, other)


def test_without_what_it_takes_nothing_changes(monkeypatch):
    monkeypatch.setattr(keras_training, "DECAY", Borrowed("json:gone", feature="an example"))
    own = keras_training.UPDATE.get()
    with update_in_turn():
        assert keras_training.UPDATE.get() is own
