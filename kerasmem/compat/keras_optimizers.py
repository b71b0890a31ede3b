"""How Keras's optimizers go through gradients: their sum over replicas, and one variable updated after another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

Pairs = list[tuple[Any, Any]]  # of a gradient and its variable

_FEATURE = "estimates for replicas"
OPTIMIZER = Borrowed("keras.src.backend.tensorflow.optimizer", "TFOptimizer", feature=_FEATURE)
_IN_TURN = "an update after micro-batches that takes no more than its largest variable"
UPDATE = Borrowed(
    "keras.src.backend.tensorflow.optimizer", "TFOptimizer._distributed_tf_update_step", feature=_IN_TURN,
    parameters=("distribution", "grads_and_vars", "learning_rate"),
)  # fmt: skip
DECAY = Borrowed(
    "keras.src.backend.tensorflow.optimizer", "TFOptimizer._apply_weight_decay", feature=_IN_TURN,
    parameters=("variables",),
)  # fmt: skip
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


@contextlib.contextmanager
def updated_in_turn() -> Iterator[None]:
    """Have optimizers update one variable after another in the graphs that this thread traces meanwhile.

    TensorFlow runs what does not depend on one another at once, so that all variables' intermediate results are there
    together. The arithmetic stays the same. Where Keras does not have what this takes, nothing changes.
    """
    try:
        update, decay = UPDATE.get(), DECAY.get()
    except NotAvailableError:
        yield
        return
    owner, turns = threading.get_ident(), _Turns()

    def update_all(optimizer: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        if threading.get_ident() != owner:
            return update(optimizer, distribution, grads_and_vars, learning_rate)
        for pair in grads_and_vars:
            with turns.next():
                update(optimizer, distribution, [pair], learning_rate)
        return None

    def decay_all(optimizer: Any, variables: Any) -> None:
        if threading.get_ident() != owner:
            return decay(optimizer, variables)
        for each in variables:
            with turns.next():
                decay(optimizer, [each])
        return None

    cls = OPTIMIZER.get()
    with (
        mock.patch.object(cls, "_distributed_tf_update_step", update_all),
        mock.patch.object(cls, "_apply_weight_decay", decay_all),
    ):
        yield


class _Turns:
    """What the variable before has put into a graph; the next one's operations wait for its assignments."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._done: list[Any] = []

    @contextlib.contextmanager
    def next(self) -> Iterator[None]:
        """Have the operations that are made meanwhile wait for the turn before."""
        import tensorflow as tf

        if tf.executing_eagerly():
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        waits_for = self._done if graph is self._graph else []
        before = len(graph.get_operations())
        with graph.control_dependencies(waits_for):
            yield
        self._graph = graph
        made = [each for each in graph.get_operations()[before:] if not each.outputs]  # assignments
        self._done = made or waits_for
