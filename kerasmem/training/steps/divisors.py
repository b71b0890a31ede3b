"""Factors by which the losses of pieces add up to the loss of their batch.

Keras 3 reduces a loss to one number: a sum, or a mean over all elements, over unmasked elements, or over the sum of
the sample weights. The mean of the pieces' means is not the batch's mean if the pieces differ. So each piece is
weighted by its divisor over that of the whole batch. With d the divisor of a piece of n rows and D that of the batch of
N rows, the piece's mean m counts as m·d/D. It is returned as m·(d/D)·(N/n), because all other terms (penalties on
weights, `add_loss`, the shown loss) are weighted by n/N. Then a penalty that is the same in every piece counts once,
and a piece's activity penalty, which is a mean over its rows, counts by its rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from keras import ops

from kerasmem.compat.keras_training import masked_weights, reduction_replaced

SUM = "sum"
PLAIN = "rows"  # a mean over rows; pieces are weighted by their rows anyway
COUNTED = "counted"  # the divisor depends on the mask or the sample weights of the piece


class Divisors:
    """Intercepts the reductions of Keras's losses while a step is traced.

    Attributes:
        kinds: kind of each reduction, from the last time that divisors were read.
    """

    def __init__(self) -> None:
        self.kinds: list[str] = []

    @contextlib.contextmanager
    def collect_divisors(self) -> Iterator[list[Any]]:
        """Collect the divisor of each reduction within the context."""
        divisors: list[Any] = []
        self.kinds = []

        def note(reduce: Callable[..., Any], values: Any, **how: Any) -> Any:
            kind, divisor = _divisor(values, **how)
            self.kinds.append(kind)
            divisors.append(divisor)
            return reduce(values, **how)

        with reduction_replaced(note):
            yield divisors

    @contextlib.contextmanager
    def multiply_results(self, factors: Any) -> Iterator[None]:
        """Multiply the result of each reduction by its factor, if there are factors."""
        number = 0

        def weigh(reduce: Callable[..., Any], values: Any, **how: Any) -> Any:
            nonlocal number
            value = reduce(values, **how)
            if factors is not None:
                value = value * ops.cast(factors[number], value.dtype)
            number += 1
            return value

        with reduction_replaced(weigh):
            yield


def factor(kind: str, own: float, whole: float, share: float) -> float:
    """Return the factor of a reduction, from its divisors in the piece and in the batch."""
    if kind == PLAIN:
        return 1.0
    if kind == SUM:
        return share
    return own / whole * share if whole else 0.0


def _divisor(values: Any, *, sample_weight: Any, mask: Any, reduction: Any, dtype: Any) -> tuple[str, Any]:
    """Return the kind and the divisor of a reduction."""
    values = ops.convert_to_tensor(values, dtype=dtype)
    one = ops.ones((), "float32")
    if tuple(values.shape) in ((), (0,)):
        return PLAIN, one
    if reduction == "sum":
        return SUM, one
    weighted = reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None)
    if mask is None and not weighted:
        return PLAIN, one
    if weighted:
        if sample_weight is not None:
            sample_weight = ops.convert_to_tensor(sample_weight, dtype=dtype)
        weight = masked_weights(sample_weight, mask, dtype=values.dtype, reduction=reduction)
        return COUNTED, ops.cast(ops.sum(weight), "float32")
    mask = ops.convert_to_tensor(mask)
    valid = ops.sum(ops.cast(mask, "float32"))
    return COUNTED, valid * (_size(values) / _size(mask))


def _size(tensor: Any) -> Any:
    return ops.cast(ops.prod(ops.convert_to_tensor(ops.shape(tensor), dtype="int32")), "float32")
