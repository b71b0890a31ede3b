"""XLA's flags while it plans."""

from __future__ import annotations

import os

import pytest

from kerasmem.compat import xla


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
