"""How Keras's optimizers go through gradients: their sum over replicas, and one variable updated after another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

Pairs = list[tuple[Any, Any]]  # of a gradient and its variable

_BY_ONE_NUMBER = ("Maximum", "Minimum", "Mul", "RealDiv")
_AVERAGES = "_model_variables_moving_average"
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
AVERAGE = Borrowed(
    "keras.src.backend.tensorflow.optimizer", "TFOptimizer._update_model_variables_moving_average", feature=_IN_TURN,
    parameters=("trainable_variables",),
)  # fmt: skip
FINITE = Borrowed(
    "keras.src.optimizers.loss_scale_optimizer", "LossScaleOptimizer.check_finite", feature=_IN_TURN,
    parameters=("grads",),
)  # fmt: skip
SCALER = Borrowed("keras.src.optimizers.loss_scale_optimizer", "LossScaleOptimizer", feature=_IN_TURN)
SUM = Borrowed(
    "keras.src.backend.tensorflow.optimizer", "TFOptimizer._all_reduce_sum_gradients", feature=_FEATURE,
    parameters=("grads_and_vars",),
)  # fmt: skip


@contextlib.contextmanager
def gradients_summed_by(function: Callable[[Pairs], Pairs]) -> Iterator[None]:
    """Have optimizers sum their gradients by a function in this thread, while the context lasts."""

    def summed(optimizer: Any, grads_and_vars: Any) -> Pairs:
        return function(list(grads_and_vars))

    with mock.patch.object(OPTIMIZER.get(), "_all_reduce_sum_gradients", _in_this_thread(summed, SUM.get())):
        yield


@contextlib.contextmanager
def updated_in_turn() -> Iterator[None]:
    """Have optimizers update one variable after another in the graphs that this thread traces meanwhile.

    TensorFlow runs what does not depend on one another at once, so that all variables' intermediate results are there
    together. The arithmetic stays the same, that of a scaled loss's and of clipped gradients too. Where Keras does not
    have what this takes, nothing changes.
    """
    try:
        update, decay, average, check = UPDATE.get(), DECAY.get(), AVERAGE.get(), FINITE.get()
    except NotAvailableError:
        yield
        return
    turns = _Turns()

    def update_all(optimizer: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        for gradient, variable in grads_and_vars:
            with turns.next():
                update(optimizer, distribution, [(_made_again(gradient), variable)], learning_rate)

    def decay_all(optimizer: Any, variables: Any) -> None:
        for each in variables:
            with turns.next():
                decay(optimizer, [each])

    def check_all(optimizer: Any, grads: Any) -> Any:
        import tensorflow as tf

        found: list[Any] = []
        for each in grads:
            if each is not None:
                with tf.control_dependencies(found[-1:]):
                    found.append(check(optimizer, [each]))
        return tf.reduce_all(tf.stack(found))

    cls, scaler = OPTIMIZER.get(), SCALER.get()
    averaged = _in_this_thread(_averages_in(turns, average), average)
    with (
        mock.patch.object(cls, "_distributed_tf_update_step", _in_this_thread(update_all, update)),
        mock.patch.object(cls, "_apply_weight_decay", _in_this_thread(decay_all, decay)),
        mock.patch.object(cls, "_update_model_variables_moving_average", averaged),
        mock.patch.object(scaler, "check_finite", _in_this_thread(check_all, check)),
    ):
        yield


def _averages_in(turns: _Turns, average: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes an optimizer's averages of variables, where it has any, one after another."""

    def average_all(optimizer: Any, variables: Any) -> None:
        for variable, one in zip(variables, getattr(optimizer, _AVERAGES, []), strict=False):
            with mock.patch.dict(vars(optimizer), {_AVERAGES: [one]}), turns.next():
                average(optimizer, [variable])

    return average_all


def _in_this_thread(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a function in this thread, and another one in others."""
    owner = threading.get_ident()

    def chosen(*arguments: Any) -> Any:
        return (function if threading.get_ident() == owner else elsewhere)(*arguments)

    return chosen


def _made_again(gradient: Any) -> Any:
    """Return a gradient with what it was multiplied or divided by, or limited to, done once more where it is asked for.

    Keras does that to all gradients before the first update. Of what it made nothing is left in the graph then, but
    for what a norm is taken of.
    """
    import tensorflow as tf

    if tf.executing_eagerly() or not tf.is_tensor(gradient) or isinstance(gradient, tf.IndexedSlices):
        return gradient
    operation = gradient.op
    if operation.type in ("Identity", "IdentityN"):  # a sum over the one replica there is
        return _made_again(operation.inputs[gradient.value_index])
    if operation.type not in _BY_ONE_NUMBER or operation.inputs[1].shape.num_elements() != 1:
        return gradient
    x, y = operation.inputs
    return getattr(tf.raw_ops, operation.type)(x=_made_again(x), y=y)


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
