"""Run a segment of a model, and run it again for its gradient instead of keeping its inside.

The two runs must be identical, and side effects must happen once. Every variable of the segment is read once, outside
of it. Both runs get those values inside a `keras.StatelessScope`: the second run draws the same seeds, and its
assignments (statistics, states of seed generators) are dropped. Those of the first run are made once, after it.

The second run must wait until the gradient of the segment's outputs exists. Otherwise the executor runs it at once, or
the compiler merges it with the first run and keeps the results. In a TensorFlow graph control edges delay it at no
cost. XLA has no control edges, so an opaque condition delays it.

In a graph the gradients of a kept segment are computed one layer after another too. Otherwise gradients of weights, and
their inputs, would still be in memory while the segment before runs again.
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
    """Run a segment, with gradients computed one layer after another.

    Args:
        run: function from the entering to the leaving tensors; may be called more than once.
        inputs: tensors with Keras's masks, or None for a missing optional input.
        layers: Keras layers of the segment, with its variables and losses.
        again: whether the gradient keeps only the inputs and runs the segment again.

    Returns:
        The leaving tensors, with their masks.
    """
    inputs = list(inputs)
    if not again and (tf.executing_eagerly() or in_xla()):  # the order is set by Python or by the compiler
        return run(inputs)
    composite = (tf.SparseTensor, tf.RaggedTensor)
    if any(tensor is not None and (not tf.is_tensor(tensor) or isinstance(tensor, composite)) for tensor in inputs):
        return run(inputs)  # composite tensors are kept, not recomputed
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
    """Results of the first run of a segment besides the tensors with gradients."""

    outputs: list[Any] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)
    updates: list[tuple[Any, Any]] = field(default_factory=list)  # (variable, value)
    losses: list[tuple[Any, Any]] = field(default_factory=list)  # (layer, loss)

    def finish(self, results: Sequence[Any]) -> list[Any]:
        """Assign the updates of the run and return its outputs.

        Args:
            results: tensors with gradients: outputs, followed by losses.
        """
        for variable, value in self.updates:
            variable.assign(value)
        count = len(differentiable(self.outputs))
        for (layer, _), loss in zip(self.losses, results[count:], strict=True):
            replace_losses(layer, loss)
        leaving = iter(results)
        outputs = [next(leaving) if is_differentiable(output) else output for output in self.outputs]
        for tensor, mask in zip(outputs, self.masks, strict=True):
            set_mask(tensor, mask)
        return outputs


class _Segment(abc.ABC):
    """A segment with the state that its runs and its gradient share."""

    def __init__(self, run: SegmentFunction, inputs: list[Any], layers: Sequence[Any]) -> None:
        self._run, self._inputs, self._layers = run, inputs, layers
        self._masks = [mask_of(tensor) for tensor in inputs]
        self._variables, self._values = _variables_now(layers)
        tensors = enumerate(inputs)
        self._entering = [number for number, tensor in tensors if tensor is not None and tensor.dtype.is_floating]
        self._recorded = [number for number in self._entering if any_is_recorded([inputs[number]])]
        self._trained = [
            number
            for number, (variable, value) in enumerate(zip(self._variables, self._values, strict=True))
            if variable.trainable and value.dtype.is_floating
        ]
        self._scopes = _Scopes()
        self.sources = self._sources(inputs, self._values)

    def _sources(self, inputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Return the tensors with gradients: inputs, then weights."""
        return [*(inputs[number] for number in self._entering), *(values[number] for number in self._trained)]

    def _run_with(
        self, run: Callable[[list[Any]], list[Any]], inputs: list[Any], masks: Sequence[Any], values: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Run with these values of the variables, and return the scope with its updates, and the outputs."""
        for tensor, mask in zip(inputs, masks, strict=True):
            set_mask(tensor, mask)
        scope = SegmentScope(zip(self._variables, values, strict=True))
        with scope:
            return scope, run(inputs)

    def _calls(self, values: Sequence[Any], entering: Sequence[Any]) -> CallGradients:
        value_of = {id(self._variables[number]): values[number] for number in self._trained}

        def weights_of(layer: Any) -> list[Any]:
            weights = (value_of.get(id(variable)) for variable in getattr(layer, "trainable_variables", ()))
            return [weight for weight in weights if weight is not None]

        recorded = [entering[number] for number in self._recorded]
        return CallGradients(weights_of, of_others=list(value_of.values()), entering=recorded)

    def run_first(self, first: _FirstRun) -> list[Any]:
        """Run forward, write the results to `first`, and return outputs and losses with gradients."""
        scope, outputs = self._forward()
        first.outputs = outputs
        first.masks = [mask_of(output) for output in outputs]
        first.updates = scope.updates()
        inner = [sublayer for layer in self._layers for sublayer in flatten_layers(layer)]
        first.losses = [(loss_owner(loss, inner) or self._layers[0], loss) for loss in scope.losses]
        result = [*differentiable(outputs), *(loss for _, loss in first.losses)]
        if in_xla():  # otherwise it may compute the statistics last and keep their inputs until then
            statistics = [value for _, value in first.updates if value.dtype.is_floating]
            result = _delay(result, [*result, *statistics])
        return result

    def gradients(self, upstream: Sequence[Any], unowned: list[Any]) -> Any:
        """Return the gradients of the sources.

        Args:
            upstream: gradients of the results of `run_first`.
            unowned: other variables that the segment reads; their gradients are returned too.
        """
        above = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in upstream]
        calls, sources, results = self._calls_with_tapes(above)
        by_id = calls.gradients(results, above)
        own = [by_id.get(id(source)) for source in (*sources, *unowned)]
        gradients = _inputs_after_weights(own, len(self._entering))
        count = len(self.sources)
        return (gradients[:count], gradients[count:]) if unowned else gradients

    @abc.abstractmethod
    def _forward(self) -> tuple[Any, list[Any]]:
        """Run forward, and return the scope with its updates, and the outputs."""

    @abc.abstractmethod
    def _calls_with_tapes(self, above: list[Any]) -> tuple[CallGradients, list[Any], list[Any]]:
        """Return the calls to differentiate, their sources, and their results."""


class _Kept(_Segment):
    """A segment that keeps its inside for the gradient."""

    def _forward(self) -> tuple[Any, list[Any]]:
        fresh = _fresh(self._inputs)
        calls = self._calls(self._values, fresh)
        scope, outputs = self._run_with(lambda inputs: self._run(inputs, calls.make), fresh, self._masks, self._values)
        self._kept = calls, self._sources(fresh, self._values), [*differentiable(outputs), *scope.losses]
        return scope, outputs

    def _calls_with_tapes(self, above: list[Any]) -> tuple[CallGradients, list[Any], list[Any]]:
        return self._kept


class _Recomputed(_Segment):
    """A segment that runs again for its gradient."""

    def _forward(self) -> tuple[Any, list[Any]]:
        with stop_recording():
            return self._run_with(self._run, _fresh(self._inputs), self._masks, self._values)

    def _calls_with_tapes(self, above: list[Any]) -> tuple[CallGradients, list[Any], list[Any]]:
        inputs, masks = _delay(self._inputs, above), _delay(self._masks, above)
        values = _delay(self._values, above)
        with self._scopes.restore(), runs_after(above):
            fresh = _fresh(inputs)
            calls = self._calls(values, fresh)
            scope, outputs = self._run_with(functools.partial(self._run_again, calls), fresh, masks, values)
        return calls, self._sources(fresh, values), [*differentiable(outputs), *scope.losses]

    def _run_again(self, calls: CallGradients, inputs: list[Any]) -> list[Any]:
        if tf.executing_eagerly():  # one call, so that sums have the order of the plain model
            return calls.make(lambda: self._run(inputs), inputs, None)
        return self._run(inputs, calls.make)


def _fresh(tensors: Iterable[Any]) -> list[Any]:
    return [None if tensor is None else tf.identity(tensor) for tensor in tensors]


def _variables_now(layers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    variables, values = variables_now(layers)
    return variables, [tf.convert_to_tensor(value) for value in values]


class _Scopes:
    """Scopes of Keras and TensorFlow around the first run, to open around the second."""

    def __init__(self) -> None:
        self._autocast = autocast_dtype()
        self._state = {name: attribute(name) for name in (CALL_CONTEXT, STATELESS_SCOPE)}
        self._names = "" if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_name_scope()

    @contextlib.contextmanager
    def restore(self) -> Iterator[None]:
        names = f"recompute/{self._names}" if self._names else "recompute"
        with attributes_set(**self._state), tf.name_scope(names), autocast(self._autocast):
            yield


def _delay(tensors: Sequence[Any], until: Sequence[Any]) -> list[Any]:
    """Return the same tensors, delayed until the others exist."""
    others = [tensor for tensor in until if tensor is not None]
    if tf.executing_eagerly() or not others:
        return list(tensors)
    if in_xla():
        present = [tensor for tensor in tensors if tensor is not None]
        passed = iter(_through_condition(present, _opaque_condition(others)))
        return [None if tensor is None else next(passed) for tensor in tensors]
    with tf.control_dependencies(others):
        return _fresh(tensors)


def _opaque_condition(tensors: Sequence[Any]) -> Any:
    """Return a condition that is true without a compiler being able to prove it."""
    total = tf.add_n([tf.reduce_sum(tf.cast(tf.reshape(tensor, [-1])[:1], "float32")) for tensor in tensors])
    return tf.equal(total, total)


def _through_condition(tensors: Sequence[Any], holds: Any) -> list[Any]:
    """Pass tensors through a condition, which prevents XLA from fusing or merging operations across it."""

    def never() -> list[Any]:
        return [tf.zeros(tensor.shape, tensor.dtype) for tensor in tensors]

    return list(tf.cond(holds, lambda: _fresh(tensors), never)) if tensors else []


def _inputs_after_weights(gradients: Sequence[Any], entering: int) -> list[Any]:
    """Let the gradients of the inputs, which start the segment before, wait for those of the weights."""
    return [*_delay(gradients[:entering], list(map(gradient_values, gradients[entering:]))), *gradients[entering:]]
