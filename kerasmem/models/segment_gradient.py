"""Run a piece of a model now, and again when its gradient is asked for, so that its inside need not be kept.

Between the two runs nothing may differ, and nothing may happen twice. Every variable that the piece reads is read
once, outside it, and both runs are given those values inside a `keras.StatelessScope`: the second run draws the seeds
that the first one drew, and what it would assign (statistics, states of seed generators) is dropped. What the first
run assigns is assigned once, when it has ended.

The second run must wait until the gradient of the piece's outputs exists; otherwise the executor runs it at once, or
the compiler sees that it computes what the first run has computed, and keeps that. In a TensorFlow graph control
edges hold it back, which cost nothing; XLA has none and is given an optimisation barrier.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Run = Callable[[list[Any]], list[Any]]


@dataclass
class _FirstRun:
    """What the first run of a piece leaves behind besides the tensors that carry gradients."""

    outputs: list[Any] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)
    updates: list[tuple[Any, Any]] = field(default_factory=list)
    losses: list[tuple[Any, Any]] = field(default_factory=list)  # (layer, loss)


def gradients_wanted() -> bool:
    """Return whether what runs now may be differentiated: a tape records, or Keras trains in what is traced."""
    from keras.src.backend.common import global_state
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope
    from tensorflow.python.eager import record

    call = global_state.get_global_attribute("current_call_ctx")
    training = call is not None and call.get_value("training") is True
    return not in_symbolic_scope() and bool(training or record.could_possibly_record())


def run_again_for_gradients(run: Run, inputs: Sequence[Any], layers: Sequence[Any]) -> list[Any]:
    """Return `run(inputs)`, of which only the inputs are kept for the gradient: it runs again then.

    Args:
        run: from the tensors that enter to the tensors that leave; it may be called more than once.
        inputs: tensors (with Keras's masks on them), or None for an optional input that is not there.
        layers: the Keras layers that it calls; losses and variables are looked for in them.

    Returns:
        The tensors that leave, with their masks.
    """
    import tensorflow as tf
    from keras.src import backend
    from tensorflow.python.eager import record

    inputs = list(inputs)
    if any(each is not None and not tf.is_tensor(each) for each in inputs) or any(
        isinstance(each, (tf.SparseTensor, tf.RaggedTensor)) for each in inputs
    ):
        return run(inputs)  # of several parts: kept as they are, not recomputed
    variables, values = _read(layers)
    masks = [None if each is None else backend.get_keras_mask(each) for each in inputs]
    trained = [number for number, each in enumerate(variables) if each.trainable and values[number].dtype.is_floating]
    entering = [number for number, each in enumerate(inputs) if each is not None and each.dtype.is_floating]
    sources = [
        *(inputs[number] for number in entering),
        *(values[number] for number in trained),
    ]
    if not sources:
        return run(inputs)
    surroundings = _Surroundings()
    first = _FirstRun()

    def again(tensors: list[Any], given_masks: list[Any], held: list[Any], stop: bool) -> tuple[Any, list[Any]]:
        """Run with these values of the variables; return Keras's scope with what was assigned, and the outputs."""
        fresh = [None if each is None else tf.identity(each) for each in tensors]
        for tensor, mask in zip(fresh, given_masks, strict=True):
            if mask is not None:
                backend.set_keras_mask(tensor, mask)
        scope = _scope_class()(zip(variables, held, strict=True))
        with record.stop_recording() if stop else contextlib.nullcontext(), scope:
            return scope, run(fresh)

    @tf.custom_gradient
    def piece(*_sources: Any) -> Any:
        scope, outputs = again(inputs, masks, values, stop=True)
        first.outputs = outputs
        first.masks = [None if each is None else backend.get_keras_mask(each) for each in outputs]
        first.updates = scope.updates(variables, values)
        first.losses = list(_owned(scope.losses, layers))
        result = [*_carrying(outputs), *(loss for _, loss in first.losses)]
        if _in_xla():  # else it may compute the statistics last of all, and keep for them what they are taken of
            result = _hold_back(
                result,
                [
                    *result,
                    *(value for _, value in first.updates if value.dtype.is_floating),
                ],
            )

        def backward(*upstream: Any, variables: Any = None) -> Any:
            return _backward(upstream, list(variables or ()))

        return tuple(result), backward

    def _backward(upstream: Sequence[Any], foreign: list[Any]) -> Any:
        """Run again and return the gradients; `foreign` are variables that no layer of the piece owns."""
        above = [None if each is None else tf.convert_to_tensor(each) for each in upstream]

        def second() -> list[Any]:
            tensors, given_masks = _hold_back(inputs, above), _hold_back(masks, above)
            held = _hold_back(values, above)
            with (
                surroundings.restored(),
                _after(above),
                tf.GradientTape(watch_accessed_variables=False) as tape,
            ):
                wanted = [
                    *(tensors[number] for number in entering),
                    *(held[number] for number in trained),
                    *foreign,
                ]
                for each in wanted:
                    tape.watch(each)
                scope, outputs = again(tensors, given_masks, held, stop=False)
                result = [*_carrying(outputs), *scope.losses]
            pairs = [(out, over) for out, over in zip(result, above, strict=True) if over is not None]
            if not pairs:
                return [None] * len(wanted)
            return list(
                tape.gradient(
                    [out for out, _ in pairs],
                    wanted,
                    output_gradients=[over for _, over in pairs],
                )
            )

        gradients = _together(second(), len(entering))
        count = len(sources)
        return (gradients[:count], gradients[count:]) if foreign else gradients

    carried = list(piece(*sources))
    for variable, value in first.updates:
        variable.assign(value)
    count = len(_carrying(first.outputs))
    for (layer, _), loss in zip(first.losses, carried[count:], strict=True):
        _add_loss(layer, loss)
    leaving = iter(carried)
    outputs = [next(leaving) if _carries(each) else each for each in first.outputs]
    for tensor, mask in zip(outputs, first.masks, strict=True):
        if mask is not None:
            backend.set_keras_mask(tensor, mask)
    return outputs


def _carries(tensor: Any) -> bool:
    import tensorflow as tf

    return isinstance(tensor, tf.Tensor) and bool(tensor.dtype.is_floating)


def _carrying(tensors: Sequence[Any]) -> list[Any]:
    return [each for each in tensors if _carries(each)]


def _read(layers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return all variables of the layers, the states of seed generators among them, and their values now."""
    import tensorflow as tf
    from keras.src import backend
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

    found = {id(each): each for layer in layers for each in layer.variables}
    common = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if common is not None:
        found.setdefault(id(common.state), common.state)
    with backend.AutocastScope(None):
        values = {key: each.value for key, each in found.items() if each.dtype != "string"}
        return [found[key] for key in values], [tf.convert_to_tensor(each) for each in values.values()]


@cache
def _scope_class() -> Any:
    from keras import StatelessScope
    from keras.src.backend.common.stateless_scope import get_stateless_scope

    class SegmentScope(StatelessScope):
        """A stateless scope inside a run: it starts from given values and knows which variables were assigned."""

        def __init__(self, held: Iterator[tuple[Any, Any]]) -> None:
            super().__init__(collect_losses=True, initialize_variables=False)
            outer = get_stateless_scope()
            if outer is not None:
                self.state_mapping.update(outer.state_mapping)
            self.state_mapping.update((id(variable), value) for variable, value in held)
            self._assigned: dict[int, Any] = {}

        def add_update(self, update: tuple[Any, Any]) -> None:
            self._assigned[id(update[0])] = update[0]
            super().add_update(update)

        def updates(self, variables: list[Any], values: list[Any]) -> list[tuple[Any, Any]]:
            return [(each, self.state_mapping[key]) for key, each in self._assigned.items()]

    return SegmentScope


class _Surroundings:
    """What Keras and TensorFlow had set up around the first run, to be set up around the second."""

    def __init__(self) -> None:
        import tensorflow as tf
        from keras.src import backend
        from keras.src.backend.common import global_state

        autocast = backend.get_autocast_scope()
        self._autocast = None if autocast is None else autocast.dtype
        self._call = global_state.get_global_attribute("current_call_ctx")
        self._outer = global_state.get_global_attribute("stateless_scope")
        self._names = "" if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_name_scope()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        import tensorflow as tf
        from keras.src import backend
        from keras.src.backend.common import global_state

        before = {name: global_state.get_global_attribute(name) for name in ("current_call_ctx", "stateless_scope")}
        global_state.set_global_attribute("current_call_ctx", self._call)
        global_state.set_global_attribute("stateless_scope", self._outer)
        try:
            with (
                tf.name_scope(f"recompute/{self._names}" if self._names else "recompute"),
                backend.AutocastScope(self._autocast),
            ):
                yield
        finally:
            for name, value in before.items():
                global_state.set_global_attribute(name, value)


def _in_xla() -> bool:
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def _after(tensors: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Let what is made inside run after these tensors, those operations too that have no inputs of their own."""
    import tensorflow as tf

    if tf.executing_eagerly() or _in_xla():
        return contextlib.nullcontext()
    manager: contextlib.AbstractContextManager[Any] = tf.control_dependencies(
        [each for each in tensors if each is not None]
    )
    return manager


def _hold_back(tensors: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Return the same tensors, not to be had before the others exist; None stays None."""
    import tensorflow as tf

    others = [each for each in after if each is not None]
    if tf.executing_eagerly() or not others:
        return list(tensors)
    if _in_xla():
        present = [each for each in tensors if each is not None]
        passed = iter(_through_branch(present, _unforeseeable(others)))
        return [None if each is None else next(passed) for each in tensors]
    with tf.control_dependencies(others):
        return [None if each is None else tf.identity(each) for each in tensors]


def _unforeseeable(tensors: Sequence[Any]) -> Any:
    """Return whether one value of each tensor is a number, which a compiler cannot know."""
    import tensorflow as tf

    total = tf.add_n([tf.reduce_sum(tf.cast(tf.reshape(each, [-1])[:1], "float32")) for each in tensors])
    return tf.equal(total, total)


def _through_branch(tensors: Sequence[Any], holds: Any) -> list[Any]:
    """Return the same tensors out of a branch of a condition, across which XLA neither fuses nor compares."""
    import tensorflow as tf

    def never() -> list[Any]:
        return [tf.zeros(each.shape, each.dtype) for each in tensors]

    return list(tf.cond(holds, lambda: [tf.identity(each) for each in tensors], never)) if tensors else []


def _together(gradients: Sequence[Any], entering: int) -> list[Any]:
    """Let the gradients of what entered wait for those of the weights: the piece before starts when this is done."""
    import tensorflow as tf

    parts = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    return [*_hold_back(gradients[:entering], parts[entering:]), *gradients[entering:]]


def _owned(losses: Sequence[Any], layers: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Return each loss with the layer that added it."""
    flat = [inner for layer in layers for inner in layer._flatten_layers()]
    for loss in losses:
        yield (
            next((each for each in flat if id(loss) in each._loss_ids), layers[0]),
            loss,
        )


def _add_loss(layer: Any, loss: Any) -> None:
    from keras import Layer

    layer._loss_ids.clear()
    Layer.add_loss(layer, loss)  # a model's own refuses
