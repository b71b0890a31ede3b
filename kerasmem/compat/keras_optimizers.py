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
_KERAS = "keras.src.backend.tensorflow.optimizer:TFOptimizer"
_SCALER = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"
_FEATURE = "estimates for replicas"
OPTIMIZER = Borrowed(_KERAS, feature=_FEATURE)
_IN_TURN = "an update after micro-batches that takes no more than its largest variable"
UPDATE = Borrowed(
    f"{_KERAS}._distributed_tf_update_step(distribution, grads_and_vars, learning_rate)", feature=_IN_TURN
)
DECAY = Borrowed(f"{_KERAS}._apply_weight_decay(variables)", feature=_IN_TURN)
AVERAGE = Borrowed(f"{_KERAS}._update_model_variables_moving_average(trainable_variables)", feature=_IN_TURN)
INCREMENT = Borrowed(f"{_KERAS}._backend_increment_gradient_accumulators(grads, acc_grads)", feature=_IN_TURN)
RESET = Borrowed(f"{_KERAS}._backend_reset_gradient_accumulators", feature=_IN_TURN)
FINITE = Borrowed(f"{_SCALER}.check_finite(grads)", feature=_IN_TURN)
SCALER = Borrowed(_SCALER, feature=_IN_TURN)
SUM = Borrowed(f"{_KERAS}._all_reduce_sum_gradients(grads_and_vars)", feature=_FEATURE)


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
    together. The arithmetic stays the same, that of a scaled loss's and of clipped gradients too. If Keras does not
    have what this takes, nothing changes.
    """
    try:
        turns = _InTurn()
    except NotAvailableError:
        yield
        return
    with contextlib.ExitStack() as stack:
        for borrowed, function in turns.functions.items():
            cls, name = (SCALER if borrowed is FINITE else OPTIMIZER).get(), borrowed.name.split(".")[1]
            stack.enter_context(mock.patch.object(cls, name, _in_this_thread(function, borrowed.get())))
        yield


def set_to_zero(variable: Any) -> Any:
    """Set a variable to zero without a constant in the graph, and return the assignment."""
    import tensorflow as tf

    zeros = tf.raw_ops.Empty(shape=variable.shape, dtype=variable.dtype, init=True)
    return variable.assign(zeros, read_value=False)


def _in_this_thread(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` in this thread and `elsewhere` in others."""
    owner = threading.get_ident()

    def chosen(*arguments: Any) -> Any:
        return (function if threading.get_ident() == owner else elsewhere)(*arguments)

    return chosen


def _remade(gradient: Any) -> Any:
    """Return a gradient computed again, after Keras has scaled, clipped or added to all of them."""
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return _made_again(gradient)
    return tf.IndexedSlices(_made_again(gradient.values), gradient.indices, gradient.dense_shape)


def _made_again(gradient: Any) -> Any:
    """Return a gradient with what it was multiplied or divided by, limited or added to, done again if it is asked
    for.

    Keras does that to all gradients before the first update. Of what it made nothing is left in the graph then, but
    for what a norm is taken of.
    """
    import tensorflow as tf

    operation: Any = gradient.op if tf.is_symbolic_tensor(gradient) else None
    kind = getattr(operation, "type", None)
    if kind == "Placeholder":  # of a branch, for a tensor from outside
        outside = next((one for one, other in getattr(operation.graph, "captures", ()) if other is gradient), None)
        if tf.is_symbolic_tensor(outside):
            return _made_again(outside)
    if kind in ("Identity", "IdentityN"):  # a sum over the one replica there is
        return _made_again(operation.inputs[gradient.value_index])
    if kind in _BY_ONE_NUMBER and operation.inputs[1].shape.num_elements() == 1:
        x, y = operation.inputs
        return getattr(tf.raw_ops, kind)(x=_made_again(x), y=y)
    if kind == "AddV2" and operation.inputs[0].shape == operation.inputs[1].shape:  # to what accumulates in Keras
        x, y = operation.inputs
        return tf.raw_ops.AddV2(x=_made_again(x), y=_made_again(y))
    return gradient


class _InTurn:
    """Replacements of Keras's functions.

    Attributes:
        functions: replacements by the borrowed function.

    Raises:
        NotAvailableError: If Keras does not have what this takes.
    """

    def __init__(self) -> None:
        self._turns = _Turns()
        self.functions: dict[Borrowed, Callable[..., Any]] = {
            UPDATE: self._update, DECAY: self._decay, AVERAGE: self._average, INCREMENT: self._increment,
            RESET: self._reset, FINITE: self._check,
        }  # fmt: skip
        self._own = {function: borrowed.get() for borrowed, function in self.functions.items()}

    def _update(self, optimizer: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        update = self._own[self._update]
        for gradient, variable in grads_and_vars:
            with self._turns.next():
                update(optimizer, distribution, [(_remade(gradient), variable)], learning_rate)

    def _decay(self, optimizer: Any, variables: Any) -> None:
        for each in variables:
            with self._turns.next():
                self._own[self._decay](optimizer, [each])

    def _average(self, optimizer: Any, variables: Any) -> None:
        for variable, one in zip(variables, getattr(optimizer, _AVERAGES, []), strict=False):
            with mock.patch.dict(vars(optimizer), {_AVERAGES: [one]}), self._turns.next():
                self._own[self._average](optimizer, [variable])

    def _increment(self, optimizer: Any, grads: Any, acc_grads: Any) -> None:
        for gradient, each in zip(grads, acc_grads, strict=True):
            with self._turns.next():
                self._own[self._increment](optimizer, [_remade(gradient)], [each])

    def _reset(self, optimizer: Any) -> None:
        for each in optimizer._accumulated_gradients:
            if each is not None:
                with self._turns.next():
                    set_to_zero(each.value)

    def _check(self, optimizer: Any, grads: Any) -> Any:
        import tensorflow as tf

        found: list[Any] = []
        for each in grads:
            if each is not None:
                with tf.control_dependencies(found[-1:]):
                    found.append(self._own[self._check](optimizer, [each]))
        return tf.reduce_all(tf.stack(found))


class _Turns:
    """Makes the operations of one variable wait for the assignments of the one before."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._done: list[Any] = []

    @contextlib.contextmanager
    def next(self) -> Iterator[None]:
        """Make new operations wait for the turn before."""
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
