"""Keras's reduction of losses to one number, and the trackers that show losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError
from kerasmem.compat.patching import patched

_FEATURE = "training in micro-batches"
_MODULE = "keras.src.losses.loss"
REDUCE = Borrowed(f"{_MODULE}:reduce_weighted_values(values, sample_weight, mask, reduction, dtype)", feature=_FEATURE)
APPLY_MASK = Borrowed(f"{_MODULE}:apply_mask(sample_weight, mask, dtype, reduction)", feature=_FEATURE)


def reduction_replaced(function: Callable[..., Any]) -> AbstractContextManager[None]:
    """Have Keras's losses reduce their values by another function in this thread.

    Args:
        function: called with Keras's own function, the values, and by name `sample_weight`, `mask`, `reduction` and
            `dtype`.
    """

    def reduce_weighted_values(
        original: Callable[..., Any], values: Any, sample_weight: Any = None, mask: Any = None,
        reduction: Any = "sum_over_batch_size", dtype: Any = None,
    ) -> Any:  # fmt: skip
        return function(original, values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)

    return patched(*REDUCE.owner(), reduce_weighted_values)


def masked_weights(sample_weight: Any, mask: Any, dtype: Any, reduction: str) -> Any:
    """Return the weights that Keras divides a mean by, after a mask."""
    return APPLY_MASK.get()(sample_weight, mask, dtype=dtype, reduction=reduction)


def compiled_loss(model: Any) -> Any:
    """Return the compiled loss with the trackers of single outputs, or None.

    Raises:
        NotAvailableError: If Keras has it elsewhere.
    """
    return _own(model, "_compile_loss")


def loss_tracker(model: Any) -> Any:
    """Return the metric that shows the loss.

    Raises:
        NotAvailableError: If Keras has it elsewhere.
    """
    return _own(model, "_loss_tracker")


def _own(model: Any, name: str) -> Any:
    if not hasattr(model, name):
        raise NotAvailableError(f"{_FEATURE} does not work with this Keras: a model has no {name}")
    return getattr(model, name)


def has_added_losses(layer: Any) -> bool:
    """Return whether `add_loss` of the layer itself was called."""
    return bool(getattr(layer, "_losses", None))
