"""What XLA is asked to compile, and its flags while it plans."""

from __future__ import annotations

import os

import pytest
import tensorflow as tf

from kerasmem.compat import xla
from kerasmem.compat.borrowing import NotAvailableError


class Compiler:
    """Stands in XLA's place and notes the flags that it would read."""

    def get(self):
        return lambda *arguments, **options: lambda **stage: self.compile()

    def compile(self):
        self.flags = os.environ.get("XLA_FLAGS")
        return b""


@pytest.fixture
def compiler(monkeypatch):
    made = Compiler()
    monkeypatch.setattr(xla, "COMPILE_FUNCTION", made)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return made


def test_code_that_will_not_run_is_not_optimised(compiler):
    with xla.only_planned():
        xla.compile_function(None, [])
    assert compiler.flags == "--xla_backend_optimization_level=0"
    assert "XLA_FLAGS" not in os.environ  # nor do children inherit it


def test_the_users_flags_count_more(compiler, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=2")
    with xla.only_planned():
        xla.compile_function(None, [])
    assert compiler.flags == "--xla_backend_optimization_level=0 --xla_backend_optimization_level=2"
    assert os.environ["XLA_FLAGS"] == "--xla_backend_optimization_level=2"


def test_a_process_that_trains_keeps_its_flags(compiler):
    xla.compile_function(None, [])
    assert compiler.flags is None


def known(function, names=("first", "second")):
    """Return a function of two tensors, which are called so in it; TensorFlow's runtime knows it while it lives."""
    return tf.function(function).get_concrete_function(*(tf.TensorSpec([4], "float32", name) for name in names))


def body(function):
    return xla.body_of(function.function_def.signature.name)


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
    assert xla.body_of("no such function") == "no such function"

    def gone(self):
        raise NotAvailableError("gone")

    monkeypatch.setattr(xla.Borrowed, "get", gone)
    assert body(same[0]) != body(same[1])
