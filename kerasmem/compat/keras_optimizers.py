"""How Keras's optimizers go through gradients: one variable updated after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kerasmem.compat.borrowing import Borrowed
from kerasmem.compat.patching import patched

_Own = Callable[..., Any]

_BY_ONE_NUMBER = ("Maximum", "Minimum", "Mul", "RealDiv")
_KERAS = "keras.src.backend.tensorflow.optimizer:TFOptimizer"
_SCALER = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"
_IN_TURN = "an update after micro-batches that takes no more than its largest variable"
UPDATE = Borrowed(f"{_KERAS}._distributed_tf_update_step", feature=_IN_TURN)
DECAY = Borrowed(f"{_KERAS}._apply_weight_decay", feature=_IN_TURN)
FINITE = Borrowed(f"{_SCALER}.check_finite", feature=_IN_TURN)


@contextlib.contextmanager
def updated_in_turn() -> Iterator[None]:
    """Have optimizers update one variable after another in the graphs that this thread traces meanwhile.

    TensorFlow runs what does not depend on one another at once, so that all variables' intermediate results are there
    together. The arithmetic stays the same, that of a scaled loss's and of clipped gradients too. Moving averages
    and Keras's own accumulation of gradients go through all variables at once. If Keras does not have what this takes,
    nothing changes.
    """
    turns = _InTurn()
    replacements: dict[Borrowed, _Own] = {UPDATE: turns.update, DECAY: turns.decay, FINITE: turns.check}
    with contextlib.ExitStack() as stack:
        if all(borrowed.exists() for borrowed in replacements):
            for borrowed, function in replacements.items():
                stack.enter_context(patched(*borrowed.owner(), function))
        yield


def set_to_zero(variable: Any) -> Any:
    """Set a variable to zero without a constant in the graph, and return the assignment."""
    import tensorflow as tf

    zeros = tf.raw_ops.Empty(shape=variable.shape, dtype=variable.dtype, init=True)
    return variable.assign(zeros, read_value=False)


def _remade(gradient: Any) -> Any:
    """Return a gradient computed again, after Keras has scaled or clipped all of them."""
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return _made_again(gradient)
    return tf.IndexedSlices(_made_again(gradient.values), gradient.indices, gradient.dense_shape)


def _made_again(gradient: Any) -> Any:
    """Return a gradient with what it was multiplied or divided by or limited to done again if it is asked for.

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
    return gradient


class _InTurn:
    """Replacements of Keras's functions. Each takes the function that it replaces first."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._done: list[Any] = []  # assignments of the turn before

    def update(self, own: _Own, optimizer: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        for gradient, variable in grads_and_vars:
            with self._turn():
                own(optimizer, distribution, [(_remade(gradient), variable)], learning_rate)

    def decay(self, own: _Own, optimizer: Any, variables: Any) -> None:
        for variable in variables:
            with self._turn():
                own(optimizer, [variable])

    def check(self, own: _Own, optimizer: Any, grads: Any) -> Any:
        import tensorflow as tf

        checks: list[Any] = []
        for gradient in grads:
            if gradient is not None:
                with tf.control_dependencies(checks[-1:]):
                    checks.append(own(optimizer, [gradient]))
        return tf.reduce_all(tf.stack(checks))

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Make the operations of one variable wait for the assignments of the one before."""
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
