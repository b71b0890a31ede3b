"""Free the graphs, weights and optimizers that TensorFlow keeps of deleted models."""

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

FREEING = "kerasmem.clear_session()"  # in messages
_FUNCTIONS = ("train_function", "test_function", "predict_function")


@dataclass(frozen=True)
class Freed(Record, what="freed memory"):
    """Memory of deleted models that was freed.

    Attributes:
        gradients: number of entries of TensorFlow's gradient registry without a function that uses them.
        variables: number of weights, optimizer slots and metrics that traced functions referenced.
        variable_bytes: size of the variables, before the allocator's rounding.
    """

    gradients: int = 0
    variables: int = 0
    variable_bytes: int = 0

    def __str__(self) -> str:
        """Summarize in one line."""
        return f"{self.variables} variables freed, {format_size(self.variable_bytes)}"


def clear_session(*models: Any) -> Freed:
    """Free deleted trained models, and clear Keras's state.

    TensorFlow keeps the weights, the optimizer and the traced graphs of a trained model after its last reference is
    deleted, on the device and on the host. This function frees them. It does not change models that are still
    referenced. On other backends, it only calls `keras.utils.clear_session`.

    Args:
        *models: Keras models. Their traced functions (`train_function`, `test_function`, `predict_function`) are
            dropped, and their next `fit` traces again. If there are any, Keras's state is not cleared.

    Returns:
        A `Freed`. If this version of TensorFlow is not supported, nothing is freed and a warning is issued.

    Raises:
        UsageError: If one of `models` is not a Keras model.

    Examples:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> _ = model.fit(keras.ops.ones((8, 4)), keras.ops.ones((8, 2)), verbose=0)
        >>> kerasmem.clear_session(model).gradients > 0
        True
        >>> del model
        >>> _ = kerasmem.clear_session()
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
    """Release the local variables of an exception's frames and of its causes, such as the tensors of a failed step."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
        current = current.__cause__ or current.__context__


def kept_bytes() -> int | None:
    """Return the bytes of variables of deleted models, or None if unknown.

    Uncollected garbage does not count. It takes some tenths of a second if models were trained.
    """
    if "tensorflow" not in sys.modules:
        return 0
    try:
        return sum(kept_variables())
    except NotAvailableError:
        return None


def collect() -> Freed:
    """Collect garbage, including deleted models if this TensorFlow is supported."""
    if "tensorflow" in sys.modules:
        with contextlib.suppress(NotAvailableError):
            return Freed(*free_unneeded_gradients())
    gc.collect()
    return Freed()
