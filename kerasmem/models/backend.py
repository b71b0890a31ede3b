"""Keras, imported late, quietly and with a clear message where it cannot serve."""

from __future__ import annotations

import os
from types import ModuleType

from kerasmem.errors import KerasmemError, UsageError

_REMEDY = "set KERAS_BACKEND=tensorflow (an architecture file opens the same on every backend)"


def import_keras() -> ModuleType:
    """Return the `keras` module, running on TensorFlow.

    Raises:
        UsageError: Keras is set to another backend, by KERAS_BACKEND or by its configuration file.
        KerasmemError: Keras or TensorFlow cannot be imported.
    """
    wanted = os.environ.get("KERAS_BACKEND", "tensorflow")
    if wanted != "tensorflow":
        raise UsageError(f"KERAS_BACKEND is {wanted!r}, and kerasmem works on the TensorFlow backend: {_REMEDY}")
    try:
        import keras
    except ImportError as error:
        raise KerasmemError(f"Keras cannot be imported ({error}): pip install tensorflow keras") from error
    chosen = keras.backend.backend()
    if chosen != "tensorflow":
        raise UsageError(
            f"Keras is set to the {chosen!r} backend by its configuration file, and kerasmem works on the "
            f"TensorFlow backend: {_REMEDY}"
        )
    module: ModuleType = keras
    return module
