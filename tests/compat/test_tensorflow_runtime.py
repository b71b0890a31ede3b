"""Bodies of functions that XLA compiles, and its flags for a plan."""

from __future__ import annotations

import os

import pytest
import tensorflow as tf

from kerasmem.compat import tensorflow_runtime
from kerasmem.compat.borrowing import NotAvailableError
from kerasmem.processes.children import child_environment, off_the_cards


@pytest.mark.parametrize("own", ["", "--xla_backend_optimization_level=2"])
def test_code_that_will_not_run_is_not_optimised(monkeypatch, own):
    monkeypatch.setenv("XLA_FLAGS", own)
    with off_the_cards():
        assert os.environ["XLA_FLAGS"] == f"--xla_backend_optimization_level=0 {own}".strip()
        assert child_environment()["XLA_FLAGS"] == own
    assert os.environ["XLA_FLAGS"] == own


def known(function, names=("first", "second")):
    """Return a function of two tensors, which are called so in it; TensorFlow's runtime knows it while it lives."""
    return tf.function(function).get_concrete_function(*(tf.TensorSpec([4], "float32", name) for name in names))


def body(function):
    return tensorflow_runtime.body_of(function.function_def.signature.name)


def difference(one, other):
    return tf.tanh(one - other)


def test_functions_that_differ_in_names_alone_are_one(monkeypatch):
    same = known(difference), known(lambda x, y: tf.tanh(tf.subtract(x, y, "a"), "b"), ("third", "fourth"))
    others = [
        known(lambda x, y: tf.tanh(y - x)),
        known(lambda x, y: tf.tanh(x + y)),
        known(lambda x, y: x - y),
        known(lambda x, y: tf.tanh(tf.cast(tf.cast(x - y, "int32"), "float32"))),
        known(lambda x, y: tf.tanh(tf.cast(tf.cast(x - y, "int64"), "float32"))),
    ]
    assert body(same[0]) == body(same[1])
    assert len({body(each) for each in (*same, *others)}) == 1 + len(others)
    assert tensorflow_runtime.body_of("no such function") == "no such function"

    def gone(self):
        raise NotAvailableError("gone")

    monkeypatch.setattr(tensorflow_runtime.Borrowed, "get", gone)
    assert body(same[0]) != body(same[1])
