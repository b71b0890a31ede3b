"""Import of Keras, its backend, shape inference and reasons of errors."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kerasmem.compat.tensorflow_runtime import stacks_left_out
from kerasmem.errors import UsageError

TENSORFLOW, JAX = "tensorflow", "jax"
_REMEDY = "set KERAS_BACKEND=tensorflow (an architecture file opens the same on every backend)"


def import_keras() -> ModuleType:
    """Import Keras, running on TensorFlow or on JAX.

    Raises:
        UsageError: If KERAS_BACKEND or Keras's configuration file sets another backend, or Keras cannot be imported.
    """
    name = os.environ.get("KERAS_BACKEND")
    origin = "by its configuration file" if name is None else "by KERAS_BACKEND"
    _check_backend(name or TENSORFLOW, origin)
    try:
        import keras
    except ImportError as error:
        raise UsageError(
            f"Keras cannot be imported ({error}): pip install tensorflow keras or, for JAX, 'kerasmem[jax]'. "
            f"Its backend is set {origin}: {_REMEDY}"
        ) from error
    _check_backend(keras.backend.backend(), origin)
    module: ModuleType = keras
    return module


def _check_backend(backend: str, origin: str) -> None:
    if backend not in (TENSORFLOW, JAX):
        raise UsageError(f"the Keras backend must be tensorflow or jax; got {backend!r}, set {origin}: {_REMEDY}")


def runs_on_jax() -> bool:
    """Return whether Keras runs on JAX.

    Raises:
        UsageError: If Keras cannot be imported, or runs on another backend.
    """
    return bool(import_keras().backend.backend() == JAX)


def require_tensorflow(what: str, instead: str = "KERAS_BACKEND=tensorflow") -> None:
    """Refuse a feature that needs the TensorFlow backend.

    Args:
        what: the feature, for the message.
        instead: the fix, for the message. Defaults to another backend.

    Raises:
        UsageError: If Keras runs on another backend.
    """
    if runs_on_jax():
        raise UsageError(f"{what} needs the TensorFlow backend of Keras, not JAX; {instead}")


def symbolic_outputs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Infer the shapes and dtypes of a function's outputs.

    Args:
        function: a function of Keras operations and layers.
        *args: its arguments; tensors are Keras tensors.
        **kwargs: its keyword arguments.
    """

    class Call(import_keras().Operation):  # type: ignore[misc]
        def call(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    with contextlib.nullcontext() if runs_on_jax() else stacks_left_out():
        return Call().compute_output_spec(*args, **kwargs)


_ERROR = re.compile(r"\w+(Error|Exception|Warning): ")


def keras_reason(error: BaseException) -> str:
    """Extract the reason, one line, from an error of Keras."""
    text = str(error)
    if text.startswith("in user code:"):  # AutoGraph's traceback, with the error after its last frame
        last_frame = text.rpartition("  File ")[2].splitlines()
        lines = [line.strip() for line in last_frame[1:] if line.strip()]
        reason = next(filter(_ERROR.match, lines), lines[-1] if lines else text)
        return reason.removeprefix(f"{type(error).__name__}: ")[:300]
    emphasised = re.findall(r"\x1b\[1m(.*?)\x1b\[0m", text, re.DOTALL)
    original = text.rpartition("xception encountered:")[2].rpartition("Error encountered:")[2]
    text = emphasised[-1] if emphasised else original
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[0] == "Graph execution error:":  # stack of the operation, reason, name of the operation
        name_index = next((index for index, line in enumerate(lines) if line.startswith("[[")), len(lines))
        lines = lines[name_index - 1 :]
    return lines[0][:300] if lines else type(error).__name__
