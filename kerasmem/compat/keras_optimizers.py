"""The sum of gradients over replicas, which Keras's optimizers do before they apply the first of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from kerasmem.compat.borrowing import Borrowed

Pairs = list[tuple[Any, Any]]  # of a gradient and its variable

_FEATURE = "estimates for replicas"
OPTIMIZER = Borrowed("keras.src.backend.tensorflow.optimizer", "TFOptimizer", feature=_FEATURE)
SUM = Borrowed(
    "keras.src.backend.tensorflow.optimizer", "TFOptimizer._all_reduce_sum_gradients", feature=_FEATURE,
    parameters=("grads_and_vars",),
)  # fmt: skip


@contextlib.contextmanager
def gradients_summed_by(function: Callable[[Pairs], Pairs]) -> Iterator[None]:
    """Have optimizers sum their gradients by a function in this thread, while the context lasts."""
    keras_sum, owner = SUM.get(), threading.get_ident()

    def summed(optimizer: Any, grads_and_vars: Any) -> Pairs:
        is_asked = threading.get_ident() == owner
        return function(list(grads_and_vars)) if is_asked else keras_sum(optimizer, grads_and_vars)

    with mock.patch.object(OPTIMIZER.get(), "_all_reduce_sum_gradients", summed):
        yield
