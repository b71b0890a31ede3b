"""Run a segment of a model, and run it again when its gradient is asked for, so that its inside need not be kept.

Between the two runs nothing may differ, and nothing may happen twice. Every variable that the segment reads is read
once, outside it. Both runs are given those values inside a `keras.StatelessScope`: the second run draws the seeds
that the first one drew, and what it would assign (statistics, states of seed generators) is dropped. What the first
run assigns is assigned once, when it has ended.

The second run must wait until the gradient of the segment's outputs exists. Otherwise the executor runs it at once, or
the compiler sees that it computes what the first run has computed, and keeps that. In a TensorFlow graph control
edges delay it, which cost nothing; XLA has none and is given a condition that it cannot see through.

In a graph a segment that is kept has its gradients one layer after another too: else those of its weights, and what
they are made of, would still be there while the segment before it runs again.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from kerasmem.compat.keras_layers import flatten_layers, loss_owner, replace_losses
from kerasmem.compat.keras_state import (
    CALL_CONTEXT,
    STATELESS_SCOPE,
    attribute,
    attributes_set,
    autocast,
    autocast_dtype,
    in_symbolic_scope,
    in_training_call,
    mask_of,
    set_mask,
)
from kerasmem.compat.tensorflow_runtime import any_is_recorded, could_record, in_xla, stop_recording
from kerasmem.training.recompute.call_gradients import (
    CallGradients,
    differentiable,
    gradient_values,
    is_differentiable,
    runs_after,
)
from kerasmem.training.recompute.segments import SegmentFunction, SegmentScope, variables_now


def gradients_wanted() -> bool:
    """Return whether a gradient may follow: if a tape records, or a training step is traced."""
    return not in_symbolic_scope() and (in_training_call() or could_record())


def run_segment(run: SegmentFunction, inputs: Sequence[Any], layers: Sequence[Any], again: bool) -> list[Any]:
    """Return `run(inputs)`, with gradients computed one layer after another.

    Args:
        run: from the tensors that enter to the tensors that leave; it may be called more than once.
        inputs: tensors (with Keras's masks on them), or None for an optional input that is not there.
        layers: the Keras layers that it calls; losses and variables are looked for in them.
        again: whether only the inputs are kept for the gradient, and the segment runs again then.

    Returns:
        The tensors that leave, with their masks.
    """
    inputs = list(inputs)
    if not again and (tf.executing_eagerly() or in_xla()):  # the one is in turn, the other has an order of its own
        return run(inputs)
    parted = (tf.SparseTensor, tf.RaggedTensor)
    if any(each is not None and (not tf.is_tensor(each) or isinstance(each, parted)) for each in inputs):
        return run(inputs)  # of several parts: kept as they are, not recomputed
    segment = (_Recomputed if again else _Kept)(run, inputs, layers)
    if not segment.sources:
        return run(inputs)
    first = _FirstRun()

    @tf.custom_gradient
    def differentiable(*_sources: Any) -> Any:
        def backward(*upstream: Any, variables: Any = None) -> Any:
            return segment.gradients(upstream, list(variables or ()))

        return tuple(segment.run_first(first)), backward

    return first.finish(list(differentiable(*segment.sources)))


@dataclass
class _FirstRun:
    """What the first run of a segment leaves behind besides the tensors that carry gradients."""

    outputs: list[Any] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)
    updates: list[tuple[Any, Any]] = field(default_factory=list)  # (variable, value)
    losses: list[tuple[Any, Any]] = field(default_factory=list)  # (layer, loss)

    def finish(self, results: Sequence[Any]) -> list[Any]:
        """Assign the updates of the run and return its outputs, with the tensors that carry gradients.

        Args:
            results: those tensors: the outputs, and after them the losses.
        """
        for variable, value in self.updates:
            variable.assign(value)
        count = len(differentiable(self.outputs))
        for (layer, _), loss in zip(self.losses, results[count:], strict=True):
            replace_losses(layer, loss)
        leaving = iter(results)
        outputs = [next(leaving) if is_differentiable(each) else each for each in self.outputs]
        for tensor, mask in zip(outputs, self.masks, strict=True):
            set_mask(tensor, mask)
        return outputs


class _Segment(abc.ABC):
    """A segment with all that its runs and its gradient must have in common."""

    def __init__(self, run: SegmentFunction, inputs: list[Any], layers: Sequence[Any]) -> None:
        self._run, self._inputs, self._layers = run, inputs, layers
        self._masks = [mask_of(each) for each in inputs]
        self._variables, self._values = _variables_now(layers)
        self._entering = [number for number, each in enumerate(inputs) if each is not None and each.dtype.is_floating]
        self._asked = [number for number in self._entering if any_is_recorded([inputs[number]])]
        self._trained = [
            number
            for number, (variable, value) in enumerate(zip(self._variables, self._values, strict=True))
            if variable.trainable and value.dtype.is_floating
        ]
        self._scopes = _Scopes()
        self.sources = self._sources(inputs, self._values)

    def _sources(self, inputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Return the tensors that get gradients: inputs, then weights."""
        return [*(inputs[number] for number in self._entering), *(values[number] for number in self._trained)]

    def _run_with(
        self, run: Callable[[list[Any]], list[Any]], inputs: list[Any], masks: Sequence[Any], values: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Run with these values of the variables; return the scope with its updates, and the outputs."""
        for tensor, mask in zip(inputs, masks, strict=True):
            set_mask(tensor, mask)
        scope = SegmentScope(zip(self._variables, values, strict=True))
        with scope:
            return scope, run(inputs)

    def _calls(self, values: Sequence[Any], entering: Sequence[Any]) -> CallGradients:
        value_of = {id(self._variables[number]): values[number] for number in self._trained}

        def weights_of(layer: Any) -> list[Any]:
            weights = (value_of.get(id(each)) for each in getattr(layer, "trainable_variables", ()))
            return [each for each in weights if each is not None]

        asked = [entering[number] for number in self._asked]
        return CallGradients(weights_of, of_others=list(value_of.values()), entering=asked)

    def run_first(self, first: _FirstRun) -> list[Any]:
        """Run forward; return outputs and losses with gradients, and put the rest into `first`."""
        scope, outputs = self._forward()
        first.outputs = outputs
        first.masks = [mask_of(each) for each in outputs]
        first.updates = scope.updates()
        inner = [each for layer in self._layers for each in flatten_layers(layer)]
        first.losses = [(loss_owner(loss, inner) or self._layers[0], loss) for loss in scope.losses]
        result = [*differentiable(outputs), *(loss for _, loss in first.losses)]
        if in_xla():  # else it may compute the statistics last of all, and keep for them what they are taken of
            statistics = [value for _, value in first.updates if value.dtype.is_floating]
            result = _delayed(result, [*result, *statistics])
        return result

    def gradients(self, upstream: Sequence[Any], unowned: list[Any]) -> Any:
        """Return the gradients of the sources.

        Args:
            upstream: the gradients of what `run_first` returned.
            unowned: variables that the segment reads and no layer of it owns; their gradients are returned too.
        """
        above = [None if each is None else tf.convert_to_tensor(each) for each in upstream]
        calls, sources, results = self._differentiated(above)
        of_tensor = calls.gradients(results, above)
        found = _inputs_after_weights([of_tensor.get(id(each)) for each in (*sources, *unowned)], len(self._entering))
        count = len(self.sources)
        return (found[:count], found[count:]) if unowned else found

    @abc.abstractmethod
    def _forward(self) -> tuple[Any, list[Any]]:
        """Run forward; return the scope with its updates, and the outputs."""

    @abc.abstractmethod
    def _differentiated(self, above: list[Any]) -> tuple[CallGradients, list[Any], list[Any]]:
        """Return the calls to differentiate, their sources, and their results."""


class _Kept(_Segment):
    """A segment that is kept for the gradient."""

    def _forward(self) -> tuple[Any, list[Any]]:
        fresh = _fresh(self._inputs)
        calls = self._calls(self._values, fresh)
        scope, outputs = self._run_with(lambda inputs: self._run(inputs, calls.make), fresh, self._masks, self._values)
        self._made = calls, self._sources(fresh, self._values), [*differentiable(outputs), *scope.losses]
        return scope, outputs

    def _differentiated(self, above: list[Any]) -> tuple[CallGradients, list[Any], list[Any]]:
        return self._made


class _Recomputed(_Segment):
    """A segment that runs again when its gradient is asked for."""

    def _forward(self) -> tuple[Any, list[Any]]:
        with stop_recording():
            return self._run_with(self._run, _fresh(self._inputs), self._masks, self._values)

    def _differentiated(self, above: list[Any]) -> tuple[CallGradients, list[Any], list[Any]]:
        inputs, masks = _delayed(self._inputs, above), _delayed(self._masks, above)
        values = _delayed(self._values, above)
        with self._scopes.restored(), runs_after(above):
            fresh = _fresh(inputs)
            calls = self._calls(values, fresh)
            scope, outputs = self._run_with(functools.partial(self._run_again, calls), fresh, masks, values)
        return calls, self._sources(fresh, values), [*differentiable(outputs), *scope.losses]

    def _run_again(self, calls: CallGradients, inputs: list[Any]) -> list[Any]:
        if tf.executing_eagerly():  # all is in turn; and sums have their terms in the order of the plain model
            return calls.make(lambda: self._run(inputs), inputs, None)
        return self._run(inputs, calls.make)


def _fresh(tensors: Iterable[Any]) -> list[Any]:
    return [None if each is None else tf.identity(each) for each in tensors]


def _variables_now(layers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return all variables of the layers, the states of seed generators among them, and their values now."""
    found, values = variables_now(layers)
    return found, [tf.convert_to_tensor(each) for each in values]


class _Scopes:
    """The scopes of Keras and TensorFlow that were open around the first run, to be opened around the second."""

    def __init__(self) -> None:
        self._autocast = autocast_dtype()
        self._state = {name: attribute(name) for name in (CALL_CONTEXT, STATELESS_SCOPE)}
        self._names = "" if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_name_scope()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        names = f"recompute/{self._names}" if self._names else "recompute"
        with attributes_set(**self._state), tf.name_scope(names), autocast(self._autocast):
            yield


def _delayed(tensors: Sequence[Any], until: Sequence[Any]) -> list[Any]:
    """Return the same tensors, delayed until the others exist."""
    others = [each for each in until if each is not None]
    if tf.executing_eagerly() or not others:
        return list(tensors)
    if in_xla():
        present = [each for each in tensors if each is not None]
        passed = iter(_through_condition(present, _opaque_condition(others)))
        return [None if each is None else next(passed) for each in tensors]
    with tf.control_dependencies(others):
        return [None if each is None else tf.identity(each) for each in tensors]


def _opaque_condition(tensors: Sequence[Any]) -> Any:
    """Return a true condition that a compiler cannot see through."""
    total = tf.add_n([tf.reduce_sum(tf.cast(tf.reshape(each, [-1])[:1], "float32")) for each in tensors])
    return tf.equal(total, total)


def _through_condition(tensors: Sequence[Any], holds: Any) -> list[Any]:
    """Return the same tensors out of a condition, across which XLA neither fuses nor compares."""

    def never() -> list[Any]:
        return [tf.zeros(each.shape, each.dtype) for each in tensors]

    return list(tf.cond(holds, lambda: [tf.identity(each) for each in tensors], never)) if tensors else []


def _inputs_after_weights(gradients: Sequence[Any], entering: int) -> list[Any]:
    """Let the gradients of the inputs wait for those of the weights: the segment before starts when all is done."""
    return [*_delayed(gradients[:entering], list(map(gradient_values, gradients[entering:]))), *gradients[entering:]]
