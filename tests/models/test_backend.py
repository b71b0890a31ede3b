"""kerasmem works on TensorFlow and on JAX, says so of other backends, and of what one of them does not have."""

from __future__ import annotations

import builtins
import sys

import keras
import numpy as np
import pytest

from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras, keras_reason, require_tensorflow, runs_on_jax


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(UsageError, match=r"must be tensorflow or jax; got 'torch', set by its configuration file"):
        import_keras()
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with pytest.raises(UsageError, match="got 'torch', set by KERAS_BACKEND"):
        import_keras()


@pytest.mark.parametrize("chosen", ["by KERAS_BACKEND", "by its configuration file"])
def test_jax_that_is_not_installed_is_named_with_the_way_out(monkeypatch, chosen):
    if "KERAS_BACKEND" in chosen:
        monkeypatch.setenv("KERAS_BACKEND", "jax")
    real = builtins.__import__

    def without_jax(name, *arguments, **options):
        if name == "keras":
            raise ModuleNotFoundError("No module named 'jax'", name="jax")
        return real(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.setattr(builtins, "__import__", without_jax)
    with pytest.raises(UsageError, match=rf"No module named 'jax'.*'kerasmem\[jax\]'.*{chosen}"):
        import_keras()


def test_what_only_tensorflow_has_is_refused_elsewhere(monkeypatch):
    require_tensorflow("profile")
    assert not runs_on_jax()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    assert runs_on_jax()
    with pytest.raises(UsageError, match="profile needs the TensorFlow backend of Keras, not JAX; KERAS_BACKEND="):
        require_tensorflow("profile")


def test_the_reason_of_a_step_that_failed_is_what_its_operation_said():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(10, 4), keras.layers.Flatten()])
    model.compile("sgd", "mse")
    with pytest.raises(Exception, match="Graph execution error") as caught:
        model.train_on_batch(np.array([[1, 2, 30]]), np.zeros((1, 12)))
    assert keras_reason(caught.value) == "indices[0,2] = 30 is not in [0, 10)"


def test_the_reason_of_an_error_in_user_code_is_the_error_itself():
    text = (
        'in user code:\n\n    File "step.py", line 3, in train_step  *\n        self.apply(x)\n'
        '    File "step.py", line 9, in apply  *\n        raise ValueError("sizes differ")\n\n'
        "    ValueError: sizes differ:\n  4 and 5\n"
    )
    assert keras_reason(ValueError(text)) == "sizes differ:"
    assert keras_reason(RuntimeError(text)) == "ValueError: sizes differ:"
