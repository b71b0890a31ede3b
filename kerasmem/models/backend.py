"""Keras, imported late, quietly and with a clear message if it cannot serve."""

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
    wanted = os.environ.get("KERAS_BACKEND")
    origin = "by its configuration file" if wanted is None else "by KERAS_BACKEND"
    _check_backend(wanted or TENSORFLOW, origin)
    try:
        import keras
    except ImportError as error:
        raise UsageError(
            f"Keras cannot be imported ({error}): pip install tensorflow keras or, for JAX, 'kerasmem[jax]'; "
            f"its backend is chosen {origin}: {_REMEDY}"
        ) from error
    _check_backend(keras.backend.backend(), origin)
    module: ModuleType = keras
    return module


def _check_backend(backend: str, origin: str) -> None:
    if backend not in (TENSORFLOW, JAX):
        raise UsageError(
            f"Keras is set to the {backend!r} backend {origin}, and kerasmem works on TensorFlow and on JAX: {_REMEDY}"
        )


def runs_on_jax() -> bool:
    """Return whether Keras runs on JAX.

    Raises:
        UsageError: as `import_keras`.
    """
    return bool(import_keras().backend.backend() == JAX)


def require_tensorflow(what: str, instead: str = "KERAS_BACKEND=tensorflow") -> None:
    """Refuse a feature of the TensorFlow backend alone.

    Args:
        what: the requested feature.
        instead: the way out.

    Raises:
        UsageError: If Keras runs on another backend.
    """
    if runs_on_jax():
        raise UsageError(f"{what}: not on Keras's jax backend, only on TensorFlow; {instead}")


def symbolic_outputs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Infer a function's outputs for Keras tensors, in shapes and dtypes.

    Args:
        function: makes Keras operations and calls layers.
        *args: its arguments, with Keras tensors as tensors.
        **kwargs: likewise.
    """

    class Call(import_keras().Operation):  # type: ignore[misc]
        def call(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    with contextlib.nullcontext() if runs_on_jax() else stacks_left_out():
        return Call().compute_output_spec(*args, **kwargs)


_OF_ERROR = re.compile(r"\w+(Error|Exception|Warning): ")


def keras_reason(error: BaseException) -> str:
    """Extract the line with the reason from an error of Keras."""
    text = str(error)
    if text.startswith("in user code:"):  # AutoGraph's: a traceback, and the error below its last frame
        below = text.rpartition("  File ")[2].splitlines()
        lines = [line.strip() for line in below[1:] if line.strip()]
        reason = next(filter(_OF_ERROR.match, lines), lines[-1] if lines else text)
        return reason.removeprefix(f"{type(error).__name__}: ")[:300]
    emphasised = re.findall(r"\x1b\[1m(.*?)\x1b\[0m", text, re.DOTALL)
    text = (
        emphasised[-1]
        if emphasised
        else text.rpartition("xception encountered:")[2].rpartition("Error encountered:")[2]
    )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[0] == "Graph execution error:":  # where the operation was made, what went wrong, its name
        named = next((number for number, line in enumerate(lines) if line.startswith("[[")), len(lines))
        lines = lines[named - 1 :]
    return lines[0][:300] if lines else type(error).__name__
