"""kerasmem works on TensorFlow; a process that only compiles may say that it runs on JAX."""

from __future__ import annotations

import keras  # noqa: F401 - on TensorFlow, before a test asks for another backend
import pytest

from kerasmem.errors import UsageError
from kerasmem.models.backend import allow_jax, import_keras


def test_another_backend_is_refused_before_and_after_it_was_allowed(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(UsageError, match="KERAS_BACKEND is 'jax'"):
        import_keras()
    with allow_jax():
        assert import_keras().__name__ == "keras"  # imported on TensorFlow before, which stays
    with pytest.raises(UsageError, match="KERAS_BACKEND is 'jax'"):
        import_keras()


def test_only_jax_is_allowed(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with allow_jax(), pytest.raises(UsageError, match="KERAS_BACKEND is 'torch'"):
        import_keras()
