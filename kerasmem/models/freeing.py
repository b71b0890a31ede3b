"""Freeing models that were trained: TensorFlow keeps their graphs, weights and optimizers, whatever is deleted."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

from kerasmem.compat.borrowing import NotAvailableError
from kerasmem.compat.gradients import custom_gradients, free_unneeded_gradients, kept_variables
from kerasmem.errors import UsageError
from kerasmem.records import Record
from kerasmem.units import format_size

FREEING = "kerasmem.clear_session()"  # the line that frees, as messages name it
_FUNCTIONS = ("train_function", "test_function", "predict_function")


@dataclass(frozen=True)
class Freed(Record, what="freed memory"):
    """What was freed of models that are gone.

    Attributes:
        gradients: entries of TensorFlow's gradient registry that no living function needs.
        variables: weights, slots of optimizers and metrics that lived on in traced functions.
        variable_bytes: their size together; an allocator that rounds up gets a little more back.
    """

    gradients: int = 0
    variables: int = 0
    variable_bytes: int = 0

    def __str__(self) -> str:
        """Say it to people."""
        return f"{self.variables} variables freed, {format_size(self.variable_bytes)}"


def clear_session(free_memory: bool = True) -> Freed:
    """Clear Keras's state, as `keras.utils.clear_session` does, and really free the models that are gone.

    A compiled model that was trained lives on in TensorFlow when its last name is deleted: weights, optimizer and
    traced graphs, on the device and on the host. This frees them. Models that something still refers to are left as
    they are: their weights, their gradients, their functions. On other backends it is Keras's function alone.

    Args:
        free_memory: whether garbage is collected, which takes some tenths of a second; without that only Keras's
            state is cleared.

    Returns:
        What was freed. Where TensorFlow's version does not let it be freed, a warning says so, and nothing was.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> _ = model.fit(keras.ops.ones((8, 4)), keras.ops.ones((8, 2)), verbose=0)
        >>> del model
        >>> clear_session().variable_bytes > 0
        True
    """
    import keras

    keras.utils.clear_session(free_memory=False)
    if not free_memory:
        return Freed()
    return _free()


def release(*models: Any) -> Freed:
    """Free what training left of some models while others, and Keras's state, stay as they are.

    The traced functions of the models go (`train_function`, `test_function`, `predict_function`); the next `fit` traces
    them again. Weights and optimizer go with the model itself: at once where nothing refers to it any more, else with
    the next `release()` or `clear_session()` after its last name is deleted.

    Args:
        *models: Keras models whose functions are no longer needed; none: only what is gone already is freed.

    Returns:
        What was freed. Where TensorFlow's version does not let it be freed, a warning says so.

    Raises:
        UsageError: one of them is no Keras model.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> _ = model.fit(keras.ops.ones((8, 4)), keras.ops.ones((8, 2)), verbose=0)
        >>> release(model).gradients > 0
        True
    """
    for model in models:
        if not all(hasattr(model, name) for name in _FUNCTIONS):
            raise UsageError(f"release: {type(model).__name__} is no Keras model; give models, or nothing")
    for model in models:
        for name in _FUNCTIONS:
            setattr(model, name, None)
    del models
    return _free()


def drop_frames(error: BaseException) -> None:
    """Let go of all that the calls behind an exception and its causes hold, such as tensors of a failed step."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
        current = current.__cause__ or current.__context__


def kept_bytes() -> int | None:
    """Return the bytes of the variables that TensorFlow keeps of models that are gone; None where it cannot be known.

    Garbage that was not collected does not count. Takes some tenths of a second where models were trained.
    """
    if "tensorflow" not in sys.modules:
        return 0
    try:
        return sum(kept_variables())
    except NotAvailableError:
        return None


def collect() -> Freed:
    """Collect garbage, and with it the models that are gone, where TensorFlow's version lets that be; says nothing."""
    if "tensorflow" in sys.modules:
        with contextlib.suppress(NotAvailableError):
            return Freed(*free_unneeded_gradients())
    gc.collect()
    return Freed()


def _free() -> Freed:
    import keras

    if keras.backend.backend() == "tensorflow":
        try:
            custom_gradients()
        except NotAvailableError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)
    return collect()
