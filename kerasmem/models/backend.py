"""Keras, imported late, quietly and with a clear message where it cannot serve."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from kerasmem.errors import KerasmemError, UsageError

_SERVED = "tensorflow"
_allowed = {_SERVED}
_REMEDY = "set KERAS_BACKEND=tensorflow (an architecture file opens the same on every backend)"


@contextmanager
def allow_jax() -> Iterator[None]:
    """Let `import_keras` serve the JAX backend too, inside: for a process of its own that only compiles.

    A model that the user trains runs on TensorFlow. XLA's compiler for a GPU that is not there is reached through
    JAX, and the process that does so says it here.
    """
    _allowed.add("jax")
    try:
        yield
    finally:
        _allowed.discard("jax")


def import_keras() -> ModuleType:
    """Return the `keras` module, running on TensorFlow (or on JAX inside `allow_jax`).

    Raises:
        UsageError: Keras is set to another backend, by KERAS_BACKEND or by its configuration file.
        KerasmemError: Keras or TensorFlow cannot be imported.
    """
    wanted = os.environ.get("KERAS_BACKEND", _SERVED)
    if wanted not in _allowed:
        raise UsageError(f"KERAS_BACKEND is {wanted!r}, and kerasmem works on the TensorFlow backend: {_REMEDY}")
    try:
        import keras
    except ImportError as error:
        missing = error.name or "keras"
        raise KerasmemError(
            f"Keras cannot be imported ({error}). Install it: pip install tensorflow keras; or, if its configuration "
            f"file chooses the {missing!r} backend: {_REMEDY}"
        ) from error
    chosen = keras.backend.backend()
    if chosen not in _allowed:
        raise UsageError(
            f"Keras is set to the {chosen!r} backend by its configuration file, and kerasmem works on the "
            f"TensorFlow backend: {_REMEDY}"
        )
    module: ModuleType = keras
    return module


def symbolic_outputs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function puts out for Keras tensors, in shapes and dtypes, without computing it.

    Args:
        function: makes Keras operations and calls layers.
        *args: what it takes, Keras tensors in place of tensors.
        **kwargs: likewise.
    """

    class Call(import_keras().Operation):  # type: ignore[misc]
        def call(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return Call().compute_output_spec(*args, **kwargs)


def keras_reason(error: BaseException) -> str:
    """Return the line that says what went wrong, out of the pages that Keras wraps around it."""
    text = str(error)
    emphasised = re.findall(r"\x1b\[1m(.*?)\x1b\[0m", text, re.DOTALL)
    text = (
        emphasised[-1]
        if emphasised
        else text.rpartition("xception encountered:")[2].rpartition("Error encountered:")[2]
    )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
