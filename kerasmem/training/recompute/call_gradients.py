"""Gradients of a sequence of layers, computed call by call from the last to the first.

With one tape the executor computes the gradients of parallel branches at once, and those of weights later, and holds
their inputs until then. Here each call has a separate tape, and its gradients wait for those of the call before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kerasmem.compat.keras_state import STATELESS_SCOPE, attribute
from kerasmem.compat.tensorflow_runtime import add_control_inputs, in_xla
from kerasmem.training.recompute.segments import call_at_once


class _Call(NamedTuple):
    """A call with its tape, inputs, possible weights, and differentiable results."""

    tape: Any
    inputs: list[Any]
    weights: list[Any]
    results: list[Any]


class CallGradients:
    """Makes calls inside a Keras scope that collects losses, and computes their gradients one after another.

    Args:
        weights_of: function from a layer or operation to the values of its trainable weights.
        on_call: called before the gradients of each call, with the number of calls before it.
        of_others: weights that any call may read too, as a `Lambda` reads the embedding of another layer.
        entering: tensors from before the calls that need gradients.
    """

    def __init__(
        self,
        weights_of: Callable[[Any], list[Any]],
        on_call: Callable[[int], None] = lambda _: None,
        of_others: Sequence[Any] = (),
        entering: Sequence[Any] = (),
    ) -> None:
        self._weights_of, self._on_call, self._of_others = weights_of, on_call, of_others
        self._calls: list[_Call] = []
        self._entering = list(entering)  # held, so that no other tensor gets the same id
        self._trained = set(map(id, self._entering))  # ids of tensors that depend on `entering` or weights

    def make(self, call: Callable[[], Any], tensors: list[Any], layer: Any) -> list[Any]:
        """Call a layer and return its outputs, flat."""
        inputs = list({id(tensor): tensor for tensor in _parts(tensors)}.values())
        weights = self._weights_of(layer)
        losses = attribute(STATELESS_SCOPE).losses
        before = len(losses)
        readable = {id(weight): weight for weight in (*weights, *self._of_others)}
        with tf.GradientTape() as tape:  # watches variables of other layers by itself
            for tensor in (*inputs, *readable.values()):
                tape.watch(tensor)
            outputs = call_at_once(call, tensors, layer)
        readable.update((id(variable), variable) for variable in tape.watched_variables())
        results = [*_parts(outputs), *losses[before:]]
        self._calls.append(_Call(tape, inputs, list(readable.values()), results))
        if weights or any(id(tensor) in self._trained for tensor in inputs):
            self._trained.update(map(id, results))
        return outputs

    def gradients(self, results: Sequence[Any], upstream: Sequence[Any]) -> dict[int, Any]:
        """Return the gradients of tensors and weights by identity, given those of the results (None for none)."""
        collected: dict[int, Any] = {}
        done: list[Any] = []
        for result, gradient in zip(results, upstream, strict=True):
            _add(collected, result, gradient)
        for number in range(len(self._calls) - 1, -1, -1):
            call = self._calls[number]
            above = {id(key): (key, collected.pop(id(key))) for key in call.results if id(key) in collected}
            self._on_call(number)
            if not above:
                continue
            sources = [*call.inputs, *call.weights]
            targets, above_gradients = zip(*above.values(), strict=True)
            before = len(_operations())
            with runs_after(done):
                gradients = call.tape.gradient(list(targets), sources, output_gradients=list(above_gradients))
            count = len(call.inputs)
            _run_in_turn(_operations()[before:], gradients[count:], gradients[:count])
            for source, gradient in zip(sources, gradients, strict=True):
                _add(collected, source, gradient)
            # Gradients of tensors that depend only on frozen layers may never run, so nothing waits for them.
            pairs = zip(call.inputs, gradients[:count], strict=True)
            awaited = [*(gradient for source, gradient in pairs if id(source) in self._trained), *gradients[count:]]
            done = [gradient_values(gradient) for gradient in awaited if gradient is not None] or done
        return collected


def _operations() -> list[Any]:
    """Return the operations of the current graph in order, or none if there is no order to set."""
    if _is_in_order():
        return []
    operations: list[Any] = tf.compat.v1.get_default_graph().get_operations()
    return operations


def _gradient_operations(gradients: Sequence[Any]) -> list[Any]:
    return [gradient_values(gradient).op for gradient in gradients if gradient is not None]


def _run_in_turn(operations: Iterable[Any], of_weights: Sequence[Any], of_inputs: Sequence[Any]) -> None:
    """Let operations that only the gradients of inputs need wait for the gradients of weights.

    Concurrently they would need scratch twice, and inputs would be in memory together with their gradients.

    Args:
        operations: operations of both.
        of_weights: gradients of the weights (None for none).
        of_inputs: gradients of the inputs (None for none).
    """
    by_name = {operation.name: operation for operation in operations}
    if not by_name:
        return
    ends, others = _gradient_operations(of_weights), _gradient_operations(of_inputs)
    if ends:
        for name in _dependencies(others, by_name) - _dependencies(ends, by_name):
            add_control_inputs(by_name[name], ends)


def _dependencies(operations: Iterable[Any], among: Mapping[str, Any]) -> set[str]:
    """Return the names of the operations among `among` that these operations depend on, including themselves."""
    needed: set[str] = set()
    pending = list(operations)
    while pending:
        operation = pending.pop()
        if operation.name in among and operation.name not in needed:
            needed.add(operation.name)
            pending += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    return needed


def _parts(tensors: Any) -> list[Any]:
    """Return the tensors that may have gradients, including components of sparse and ragged ones."""
    return differentiable(tf.nest.flatten(tensors, expand_composites=True))


def _add(gradients: dict[int, Any], tensor: Any, gradient: Any) -> None:
    if gradient is not None:
        gradients[id(tensor)] = _sum(gradients[id(tensor)], gradient) if id(tensor) in gradients else gradient


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two gradients, as slices if both are slices."""
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        parts = [tf.concat(pair, axis=0) for pair in ((one.values, other.values), (one.indices, other.indices))]
        return tf.IndexedSlices(*parts, one.dense_shape)
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def gradient_values(gradient: Any) -> Any:
    """Return the tensor of a gradient, or the values of slices."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def is_differentiable(tensor: Any) -> bool:
    """Return whether it is a tensor that may have a gradient."""
    return isinstance(tensor, tf.Tensor) and bool(tensor.dtype.is_floating)


def differentiable(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors that may have gradients."""
    return [tensor for tensor in tensors if is_differentiable(tensor)]


def runs_after(tensors: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Let all operations created in the context run after these tensors, even without inputs."""
    if _is_in_order():
        return contextlib.nullcontext()
    manager: contextlib.AbstractContextManager[Any] = tf.control_dependencies(
        [tensor for tensor in tensors if tensor is not None]
    )
    return manager


def _is_in_order() -> bool:
    """Return whether eager execution or the compiler sets the order of operations."""
    return tf.executing_eagerly() or in_xla()
