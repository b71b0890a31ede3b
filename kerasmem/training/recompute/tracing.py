"""What each layer of a live model keeps for its gradient, read off the graph of a forward and a backward pass.

The model is traced on the shapes of a batch; nothing is computed. A tensor that an operation of the forward pass
makes and one of the backward pass takes is kept in between; which layer made it is known, since the layers are called
one by one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kerasmem.compat.keras_state import handle_only, mask_of, raw_value
from kerasmem.devices.kernels import ONEDNN
from kerasmem.errors import KerasmemError, ModelError, UsageError
from kerasmem.estimation.graph.build import node_of, with_compiled_scratch
from kerasmem.estimation.graph.program import Node, Tensor, tensor_of
from kerasmem.estimation.graph.rules import ALIASES, TABLES, needs, seconds
from kerasmem.estimation.graph.scratch import Kernels
from kerasmem.models.backend import import_keras, keras_reason, symbolic_outputs
from kerasmem.models.inputs import model_inputs, normalise_input_shapes
from kerasmem.models.sizes import element_bytes, variable_bytes
from kerasmem.models.weightless import with_stand_ins
from kerasmem.training.recompute.cuts import chain_of
from kerasmem.training.recompute.lifetimes import (
    MAKE_NOTHING,
    SHAPE_ONLY,
    bytes_of,
    in_order,
    lifetimes,
    list_bytes,
    loss_bytes,
    needed_for,
    root_of,
)
from kerasmem.training.recompute.planning import Kept, LayerCall

_BYTES_A_SECOND = 1e10  # only ratios count


def trace_chain(
    model: Any, batch_size: int, input_shape: Any = None, loss: Any = None, kernels: Kernels | None = None
) -> tuple[LayerCall, ...]:
    """Return the chain of a Functional model's calls.

    Args:
        model: a Functional model, built; its weights are not read.
        batch_size: samples in a batch.
        input_shape: open dimensions of the inputs, as for `kerasmem.estimate`.
        loss: that the model is compiled with; it counts if there is one output and the targets are the usual ones.
        kernels: that run it, whose scratch counts; None: none counts, as if XLA compiles the step.

    Raises:
        UsageError: an input has open dimensions that `input_shape` does not give.
        ModelError: the model cannot be traced.
    """
    inputs, calls = inputs_and_calls(model, batch_size, input_shape)
    try:
        with with_stand_ins(handle_only):
            traced = _traced(model, inputs)
    except KerasmemError:
        raise
    except Exception as error:
        raise ModelError(f"model {model.name!r} cannot be traced for training: {keras_reason(error)}") from error
    steps = _Reader(traced, model, calls, kernels).steps()
    # The loss is computed while all that the last call has made is there, the outputs too, which are gone after it.
    outputs = [traced.tensors[id(each)] for each in model.outputs]
    kept = sum(each.bytes for step in steps for each in step.kept if each.for_gradient and each.last_use == len(steps))
    working = max(steps[-1].working_bytes, loss_bytes(loss, outputs) - kept)
    return (*steps[:-1], replace(steps[-1], working_bytes=working))


def inputs_and_calls(
    model: Any, batch_size: int, input_shape: Any
) -> tuple[list[tuple[tuple[int | None, ...], str]], list[tuple[str, Any]]]:
    """Return the shape, with a batch, and the type of each input of a Functional model, and its calls by name.

    Raises:
        UsageError: an input has open dimensions that `input_shape` does not give.
    """
    _, inputs = model_inputs(model, normalise_input_shapes(input_shape))
    batch = [((each.shape[0] or batch_size, *each.shape[1:]), each.dtype) for each in inputs]
    return batch, [pair for each in chain_of(model) for pair in each.inner]


def last_calls(calls: Iterable[Any]) -> dict[int, int]:
    """Return the number of the last call of each operation, by the operation's identity."""
    return {id(each.operation): number for number, each in enumerate(calls)}


def update_bytes(operation: Any) -> int:
    """Return the bytes of the optimizer's update of a layer."""
    return sum(variable_bytes(each) for each in getattr(operation, "trainable_variables", ()))


@dataclass(frozen=True)
class _Traced:
    """A forward and a backward pass, call by call. Places are numbers of operations in the graph.

    Attributes:
        graph: puts out the weights' gradients.
        begins: the place where each call's forward pass begins, and where the last one ends.
        turns: for each call where its backward pass begins and ends.
        tensors: by the ids of the symbolic ones.
    """

    graph: Any
    begins: list[int]
    turns: list[tuple[int, int]]
    tensors: dict[int, Any]


def _traced(model: Any, inputs: Sequence[tuple[Any, str]]) -> _Traced:
    import tensorflow as tf

    from kerasmem.training.recompute.call_gradients import CallGradients, differentiable
    from kerasmem.training.recompute.model import walked
    from kerasmem.training.recompute.segments import SegmentScope

    begins: list[int] = []
    turns: list[int] = []
    handed: list[tuple[Any, dict[int, Any]]] = []
    tensors: dict[int, Any] = {}

    def both_passes(*batch: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()

        def note(places: list[int]) -> None:
            places.append(len(graph.get_operations()))

        def make_call(call: Any, taken: list[Any], layer: Any) -> list[Any]:
            note(begins)
            given = [*tf.nest.flatten(taken, expand_composites=True), *scope.state_mapping.values()]
            handed.append((layer, {id(each): each for each in given}))
            return calls.make(call, taken, layer)

        weights = {id(each): raw_value(each) for each in model.trainable_variables}
        calls = CallGradients(
            lambda layer: [weights[id(each)] for each in getattr(layer, "trainable_variables", ())],
            told=lambda _: note(turns),
        )
        with SegmentScope(()) as scope:
            run = walked(model, make_call, tensors)
            run(import_keras().tree.pack_sequence_as(model.input, list(batch)), training=True)
        note(begins)
        _check_inputs(graph, begins, handed)
        ends = differentiable([*(tensors[id(each)] for each in model.outputs), *scope.losses])
        found = calls.gradients(ends, [tf.ones_like(each) for each in ends])
        note(turns)
        return [found.get(id(each)) for each in weights.values()]

    specs = [tf.TensorSpec(shape, dtype) for shape, dtype in inputs]
    function = tf.function(both_passes, autograph=False).get_concrete_function(*specs)
    return _Traced(function.graph, begins, list(itertools.pairwise(turns))[::-1], tensors)


def _check_inputs(graph: Any, begins: Sequence[int], handed: Sequence[tuple[Any, Mapping[int, Any]]]) -> None:
    """Refuse a call that takes numbers out of another call otherwise than as inputs: nothing would train through them.

    Args:
        begins: the places where the calls begin, and where the last one ends.
        handed: for each call its layer, and by identity what it may take: its inputs, and what variables were set to.
    """
    operations = graph.get_operations()
    caller = {
        each.name: n for n, (start, end) in enumerate(itertools.pairwise(begins)) for each in operations[start:end]
    }
    for operation in operations[begins[0] : begins[-1]]:
        number = caller[operation.name]
        layer, given = handed[number]
        for each in operation.inputs:
            if each.dtype.is_floating and caller.get(each.op.name, number) != number and id(each) not in given:
                raise UsageError(
                    f"recompute: layer {getattr(layer, 'name', layer)!r} reads a tensor that another layer made "
                    f"({each.name!r}), so its gradient would be lost; pass it as an input"
                )


class _Reader:
    """Reads steps off the graph."""

    def __init__(self, traced: _Traced, model: Any, calls: Sequence[tuple[str, Any]], kernels: Kernels | None) -> None:
        self._kernels, self._compiled = kernels, dict[Any, int]()
        self._traced, self._begins, self._tensors = traced, traced.begins, traced.tensors
        self._operations = in_order(traced.graph.get_operations(), traced.begins[-1])
        self._place = {each.name: number for number, each in enumerate(self._operations)}
        self._names, self._calls = zip(*calls, strict=True)
        self._ends = {id(each) for each in model.outputs}
        self._needed = needed_for(traced.graph.outputs)  # gradients of frozen layers are made too; nothing runs them

    def steps(self) -> tuple[LayerCall, ...]:
        last_call = last_calls(self._calls)
        uses = self._uses()
        working, forward = self._working(), self._forward()
        return tuple(
            LayerCall(
                name=self._names[number],
                seconds=sum(seconds(*_as_node(one), _RATES) for one in self._made_by(number)),
                working_bytes=max(forward[number], working[number] + update_bytes(each.operation)),
                kept=tuple(self._kept(number, uses)),
                may_end=last_call[id(each.operation)] == number,
            )
            for number, each in enumerate(self._calls)
        )

    def _made_by(self, number: int) -> list[Any]:
        made: list[Any] = self._operations[self._begins[number] : self._begins[number + 1]]
        return made

    def _uses(self) -> dict[Any, list[int]]:
        """Return the calls that take each tensor, by its buffer."""
        found: dict[Any, list[int]] = {}
        for number, call in enumerate(self._calls):
            for each in call.input_tensors:
                self._note(found, self._tensors.get(id(each)), number)
        for key in self._ends:
            self._note(found, self._tensors.get(key), len(self._calls))
        return found

    def _note(self, found: dict[Any, list[int]], tensor: Any, number: int) -> None:
        for one in (tensor, mask_of(tensor)):
            if one is not None and hasattr(one, "op"):
                found.setdefault(root_of(one).ref(), []).append(number)

    def _kept(self, number: int, uses: Mapping[Any, list[int]]) -> Iterable[Kept]:
        backward = self._begins[-1]
        for operation in self._made_by(number):
            if operation.type in MAKE_NOTHING:
                continue
            for tensor in operation.outputs:
                taken = uses.get(tensor.ref(), [])
                later = [each for each in taken if each > number]
                for_gradient = self._taken_after(tensor, backward)
                if not later and not for_gradient:
                    continue
                size = bytes_of(tensor) if tensor.dtype.name != "variant" else list_bytes(operation, tensor)
                yield Kept(size, max(later, default=None), for_gradient)

    def _taken_after(self, tensor: Any, place: int) -> bool:
        """Return whether an operation from that place on takes the tensor's values, by whatever name."""
        for each in tensor.consumers():
            if self._place[each.name] >= place:
                if each.type not in SHAPE_ONLY and each.name in self._needed:
                    return True
            elif each.type in ALIASES and any(self._taken_after(one, place) for one in each.outputs):
                return True
        return False

    def _working(self) -> list[int]:
        """Return for each call the most bytes that the backward pass has made and still needs in the call's turn."""
        begin, turns = self._begins[-1], self._traced.turns
        until = {}  # the update follows when a weight's gradient is there and the call's turn is over
        for each in self._traced.graph.outputs:
            place = self._place[root_of(each).op.name]
            until[root_of(each).ref()] = (
                max((after for before, after in turns if before <= place < after), default=0) - 1
            )
        lives = lifetimes(self._operations[begin:], self._needed, until, begin, self._scratch)
        return [max(lives[before - begin : after - begin], default=0) for before, after in turns]

    def _forward(self) -> list[int]:
        """Return the peak of each call's forward pass, without the tensors kept for the gradient."""
        begin, end = self._begins[0], self._begins[-1]
        made = self._operations[begin:end]
        kept = {each.ref() for one in made for each in one.outputs if self._taken_after(each, end)}
        lives = lifetimes(made, {each.name for each in made}, {}, begin, self._scratch, kept)
        return [
            max(lives[before - begin : after - begin], default=0) for before, after in itertools.pairwise(self._begins)
        ]

    def _scratch(self, operation: Any) -> int:
        """Return the bytes that an operation's kernel works in."""
        if self._kernels is None:
            return 0
        node, inputs = _as_node(operation)
        node = with_compiled_scratch(node, inputs, self._compiled)
        return sum(needs(node, inputs, self._kernels))


def _as_node(operation: Any) -> tuple[Node, tuple[Tensor, ...]]:
    return node_of(operation), tuple(map(tensor_of, operation.inputs))


_RATES = TABLES[ONEDNN].rates  # only ratios of times count, which differ little between kernels


def shaped_chain(model: Any, batch_size: int, input_shape: Any = None) -> tuple[LayerCall, ...]:
    """Return the chain of a Functional model's calls on Keras's JAX backend, from shapes: each call keeps its outputs.

    What XLA really keeps of a layer's inside is not known before it has compiled the step. So the cuts are balanced by
    the layers' outputs, and if a memory is given, the compiled step decides whether they are good enough.

    Args:
        model: a Functional model, built; its weights are not read.
        batch_size: samples in a batch.
        input_shape: open dimensions of the inputs, as for `kerasmem.estimate`.

    Raises:
        UsageError: an input has open dimensions that `input_shape` does not give.
        ModelError: the model cannot be called.
    """
    from kerasmem.training.recompute.model import walked
    from kerasmem.training.recompute.segments import call_at_once

    keras = import_keras()
    inputs, calls = inputs_and_calls(model, batch_size, input_shape)
    tensors: dict[int, Any] = {}

    def call(*batch: Any) -> Any:
        run = walked(model, call_at_once, tensors)
        return run(keras.tree.pack_sequence_as(model.input, list(batch)), training=True)

    try:
        symbolic_outputs(call, *(keras.KerasTensor(*each) for each in inputs))
    except KerasmemError:
        raise
    except Exception as error:
        raise ModelError(f"model {model.name!r} cannot be called on a batch: {keras_reason(error)}") from error
    sizes = {key: math.prod(each.shape) * element_bytes(str(each.dtype)) for key, each in tensors.items()}
    uses: dict[int, list[int]] = {}
    for number, (_, made) in enumerate(calls):
        for each in made.input_tensors:
            uses.setdefault(id(each), []).append(number)
    for each in model.outputs:
        uses.setdefault(id(each), []).append(len(calls))
    last_call = last_calls(made for _, made in calls)
    return tuple(
        _step(name, made, sizes, uses, last_call[id(made.operation)] == number)
        for number, (name, made) in enumerate(calls)
    )


def _step(name: str, call: Any, sizes: dict[int, int], uses: dict[int, list[int]], may_end: bool) -> LayerCall:
    taken = sum(sizes.get(id(each), 0) for each in call.input_tensors)
    made = {id(each): sizes.get(id(each), 0) for each in call.outputs}
    kept = tuple(
        Kept(size, max(uses[key], default=None), for_gradient=True) for key, size in made.items() if key in uses
    )
    working = taken + sum(made.values()) + 2 * update_bytes(call.operation)
    return LayerCall(name, working / _BYTES_A_SECOND, working, kept, may_end)
