"""Freeing models that were trained: TensorFlow keeps their graphs, weights and optimizers, whatever is deleted."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from kerasmem.compat.borrowing import NotAvailableError
from kerasmem.compat.gradients import custom_gradients, free_unneeded_gradients, kept_variables
from kerasmem.errors import UsageError, warn_user
from kerasmem.records import Record
from kerasmem.units import format_size

FREEING = "kerasmem.clear_session()"  # the line that frees, as messages name it
_FUNCTIONS = ("train_function", "test_function", "predict_function")


@dataclass(frozen=True)
class Freed(Record, what="freed memory"):
    """Memory that was freed of models that are gone.

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


def clear_session(*models: Any) -> Freed:
    """Free trained models that are gone, and clear Keras's state.

    TensorFlow keeps the weights, the optimizer and the traced graphs of a trained model after its last name is deleted,
    on the device and on the host. This frees them. Models that are still referred to keep everything. On other backends
    this is `keras.utils.clear_session` alone.

    Args:
        *models: Keras models to drop the traced functions of (`train_function`, `test_function`, `predict_function`).
            The next `fit` traces them again; weights and optimizer go with the model itself. If models are given,
            Keras's state stays as it is.

    Returns:
        A `Freed`. If this version of TensorFlow does not allow it, a warning says so and nothing is freed.

    Raises:
        UsageError: If one of `models` is not a Keras model.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> _ = model.fit(keras.ops.ones((8, 4)), keras.ops.ones((8, 2)), verbose=0)
        >>> clear_session(model).gradients > 0
        True
        >>> del model
        >>> _ = clear_session()
    """
    import keras

    for model in models:
        if not isinstance(model, keras.Model):
            raise UsageError(f"models must be Keras models; got {type(model).__name__}")
    for model in models:
        for name in _FUNCTIONS:
            setattr(model, name, None)
    if not models:
        keras.utils.clear_session(free_memory=False)
    if keras.backend.backend() == "tensorflow":
        try:
            custom_gradients()
        except NotAvailableError as error:
            warn_user(str(error), RuntimeWarning)
    return collect()


def drop_frames(error: BaseException) -> None:
    """Let go of all that the calls behind an exception and its causes hold, such as tensors of a failed step."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
        current = current.__cause__ or current.__context__


def kept_bytes() -> int | None:
    """Return the bytes of variables that TensorFlow keeps of models that are gone, or None if unknown.

    Garbage that was not collected does not count. Takes some tenths of a second where models were trained.
    """
    if "tensorflow" not in sys.modules:
        return 0
    try:
        return sum(kept_variables())
    except NotAvailableError:
        return None


def collect() -> Freed:
    """Collect garbage, and with it the models that are gone, if this TensorFlow allows it."""
    if "tensorflow" in sys.modules:
        with contextlib.suppress(NotAvailableError):
            return Freed(*free_unneeded_gradients())
    gc.collect()
    return Freed()
