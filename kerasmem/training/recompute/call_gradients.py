"""The gradients of a run of layers, computed call by call from the last to the first.

On one tape the executor computes the gradients of parallel branches at once, and those of weights at some later time,
and holds all that they are made of until then. Here each call has a tape of its own, and its gradients wait for those
of the call before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kerasmem.compat.keras_state import STATELESS_SCOPE, attribute
from kerasmem.compat.tensorflow_runtime import add_control_inputs, in_xla
from kerasmem.training.recompute.segments import call_at_once


class _Made(NamedTuple):
    """A call with its tape, inputs, possible weights, and differentiable results."""

    tape: Any
    taken: list[Any]
    weights: list[Any]
    made: list[Any]


class CallGradients:
    """Makes calls, inside a scope of Keras that collects losses, and computes their gradients one after another.

    Args:
        weights_of: layer or operation → what stands for the weights that its calls are trained by.
        told: called before the gradients of each call, with the number of calls before it.
        of_others: weights that any call may read too, as a `Lambda` reads the embedding of another layer.
        entering: tensors from before the calls whose gradients are asked for.
    """

    def __init__(
        self,
        weights_of: Callable[[Any], list[Any]],
        told: Callable[[int], None] = lambda _: None,
        of_others: Sequence[Any] = (),
        entering: Sequence[Any] = (),
    ) -> None:
        self._weights_of, self._told, self._of_others = weights_of, told, of_others
        self._calls: list[_Made] = []
        # What weights have helped to make, by identity; what entered is held, so that nothing else has its identity.
        self._entering = list(entering)
        self._moved = set(map(id, self._entering))

    def make(self, call: Callable[[], Any], taken: list[Any], layer: Any) -> list[Any]:
        """Call a layer and return its outputs, flat."""
        entering = list({id(each): each for each in _parts(taken)}.values())
        weights = self._weights_of(layer)
        losses = attribute(STATELESS_SCOPE).losses
        before = len(losses)
        may_be_read = {id(each): each for each in (*weights, *self._of_others)}
        with tf.GradientTape() as tape:  # which finds by itself what layers outside of these own
            for each in (*entering, *may_be_read.values()):
                tape.watch(each)
            outputs = call_at_once(call, taken, layer)
        may_be_read.update((id(each), each) for each in tape.watched_variables())
        made = [*_parts(outputs), *losses[before:]]
        self._calls.append(_Made(tape, entering, list(may_be_read.values()), made))
        if weights or any(id(each) in self._moved for each in entering):
            self._moved.update(map(id, made))
        return outputs

    def gradients(self, results: Sequence[Any], upstream: Sequence[Any]) -> dict[int, Any]:
        """Return the gradients of tensors and weights, by identity, given those of the results (None for none)."""
        found: dict[int, Any] = {}
        done: list[Any] = []
        for result, gradient in zip(results, upstream, strict=True):
            _add(found, result, gradient)
        for number in range(len(self._calls) - 1, -1, -1):
            call = self._calls[number]
            above = {id(each): (each, found.pop(id(each))) for each in call.made if id(each) in found}
            self._told(number)
            if not above:
                continue
            sources = [*call.taken, *call.weights]
            targets, given = zip(*above.values(), strict=True)
            before = len(_operations())
            with runs_after(done):
                gradients = call.tape.gradient(list(targets), sources, output_gradients=list(given))
            count = len(call.taken)
            _in_turn(_operations()[before:], gradients[count:], gradients[:count])
            for source, gradient in zip(sources, gradients, strict=True):
                _add(found, source, gradient)
            # What comes from frozen layers alone has a gradient that nobody may ask for, so nothing waits for it.
            pairs = zip(call.taken, gradients[:count], strict=True)
            waited = [*(each for of, each in pairs if id(of) in self._moved), *gradients[count:]]
            done = [gradient_values(each) for each in waited if each is not None] or done
        return found


def _operations() -> list[Any]:
    """Return the operations of the current graph in order, or none if there is no order to set."""
    if _is_in_order():
        return []
    made: list[Any] = tf.compat.v1.get_default_graph().get_operations()
    return made


def _in_turn(made: Iterable[Any], first: Sequence[Any], then: Sequence[Any]) -> None:
    """Let operations of the gradients of inputs alone wait for the gradients of weights.

    At once they would work in twice the scratch, and what the layer took would be kept beside the gradient of it.

    Args:
        made: the operations of both.
        first: the gradients of the weights (None for none).
        then: those of the inputs.
    """
    by_name = {each.name: each for each in made}
    if not by_name:
        return
    ends, others = ([gradient_values(each).op for each in some if each is not None] for some in (first, then))
    if ends:
        for name in _needed(others, by_name) - _needed(ends, by_name):
            add_control_inputs(by_name[name], ends)


def _needed(operations: Iterable[Any], among: Mapping[str, Any]) -> set[str]:
    """Return the names of the operations, and of those that they wait for, among others."""
    found: set[str] = set()
    pending = list(operations)
    while pending:
        one = pending.pop()
        if one.name in among and one.name not in found:
            found.add(one.name)
            pending += [*(each.op for each in one.inputs), *one.control_inputs]
    return found


def _parts(tensors: Any) -> list[Any]:
    """Return the tensors that may have gradients, those that sparse and ragged ones are made of too."""
    return differentiable(tf.nest.flatten(tensors, expand_composites=True))


def _add(found: dict[int, Any], tensor: Any, gradient: Any) -> None:
    if gradient is not None:
        found[id(tensor)] = _sum(found[id(tensor)], gradient) if id(tensor) in found else gradient


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two gradients: of rows alone if both are of rows alone."""
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        parts = [tf.concat(pair, axis=0) for pair in ((one.values, other.values), (one.indices, other.indices))]
        return tf.IndexedSlices(*parts, one.dense_shape)
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def gradient_values(gradient: Any) -> Any:
    """Return the values of a gradient; for slices their rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def is_differentiable(tensor: Any) -> bool:
    """Return whether it is a tensor that may have a gradient."""
    return isinstance(tensor, tf.Tensor) and bool(tensor.dtype.is_floating)


def differentiable(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors that may have gradients."""
    return [each for each in tensors if is_differentiable(each)]


def runs_after(tensors: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Let all operations made inside run after these tensors, also those without inputs."""
    if _is_in_order():
        return contextlib.nullcontext()
    manager: contextlib.AbstractContextManager[Any] = tf.control_dependencies(
        [each for each in tensors if each is not None]
    )
    return manager


def _is_in_order() -> bool:
    """Return whether operations run one by one anyway, or in an order that the compiler sets."""
    return tf.executing_eagerly() or in_xla()
