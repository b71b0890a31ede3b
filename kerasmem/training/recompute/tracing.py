"""The tensors that each layer of a live model keeps for its gradient, from the graph of both passes.

The model is traced on the shapes of a batch; nothing is computed. If the backward pass reads a tensor of the forward
pass, the tensor is kept in between. Layers are called one by one, so the layer of each operation is known.
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
    dependencies_of,
    in_order,
    lifetimes,
    list_bytes,
    loss_bytes,
    root_of,
)
from kerasmem.training.recompute.planning import KeptTensor, LayerCall

_BYTES_A_SECOND = 1e10  # only ratios count


def trace_chain(
    model: Any, batch_size: int, input_shape: Any = None, loss: Any = None, kernels: Kernels | None = None
) -> tuple[LayerCall, ...]:
    """Return the chain of a Functional model's calls.

    Args:
        model: a built Functional model; its weights are not read.
        batch_size: samples per batch.
        input_shape: open dimensions of the inputs, as for `kerasmem.estimate`.
        loss: loss of `compile`; counted if there is one output with the usual targets.
        kernels: kernels that run the step, for their scratch. Defaults to none, as under XLA.

    Raises:
        UsageError: If an input has open dimensions that are not in `input_shape`.
        ModelError: If the model cannot be traced.
    """
    inputs, calls = inputs_and_calls(model, batch_size, input_shape)
    try:
        with with_stand_ins(handle_only):
            traced = _trace(model, inputs)
    except KerasmemError:
        raise
    except Exception as error:
        raise ModelError(f"model {model.name!r} cannot be traced for training: {keras_reason(error)}") from error
    steps = _Reader(traced, model, calls, kernels).steps()
    # The loss is computed while all tensors of the last call are in memory, and the outputs, which are freed after it.
    outputs = [traced.tensors[id(output)] for output in model.outputs]
    tensors = [tensor for step in steps for tensor in step.kept_tensors]
    kept_bytes = sum(tensor.bytes for tensor in tensors if tensor.for_gradient and tensor.last_use == len(steps))
    working = max(steps[-1].working_bytes, loss_bytes(loss, outputs) - kept_bytes)
    return (*steps[:-1], replace(steps[-1], working_bytes=working))


def inputs_and_calls(
    model: Any, batch_size: int, input_shape: Any
) -> tuple[list[tuple[tuple[int | None, ...], str]], list[tuple[str, Any]]]:
    """Return the shape and type of each input of a Functional model, with the batch, and the calls with their names.

    Raises:
        UsageError: If an input has open dimensions that are not in `input_shape`.
    """
    _, inputs = model_inputs(model, normalise_input_shapes(input_shape))
    batch = [((tensor.shape[0] or batch_size, *tensor.shape[1:]), tensor.dtype) for tensor in inputs]
    return batch, [pair for call in chain_of(model) for pair in call.inner]


def last_calls(calls: Iterable[Any]) -> dict[int, int]:
    """Return the number of the last call of each operation, by the operation's identity."""
    return {id(call.operation): number for number, call in enumerate(calls)}


def update_bytes(operation: Any) -> int:
    """Return the bytes of a layer's optimizer update."""
    return sum(variable_bytes(variable) for variable in getattr(operation, "trainable_variables", ()))


@dataclass(frozen=True)
class _Traced:
    """A forward and a backward pass, call by call. Places are numbers of operations in the graph.

    Attributes:
        graph: graph with the gradients of the weights as outputs.
        begins: positions of the beginning of each call's forward pass, and of the end of the last one.
        turns: positions of the beginning and the end of each call's backward pass.
        tensors: tensors by the ids of the symbolic ones.
    """

    graph: Any
    begins: list[int]
    turns: list[tuple[int, int]]
    tensors: dict[int, Any]


def _trace(model: Any, inputs: Sequence[tuple[Any, str]]) -> _Traced:
    import tensorflow as tf

    from kerasmem.training.recompute.call_gradients import CallGradients, differentiable
    from kerasmem.training.recompute.model import make_walked
    from kerasmem.training.recompute.segments import SegmentScope

    begins: list[int] = []
    turns: list[int] = []
    available: list[tuple[Any, dict[int, Any]]] = []
    tensors: dict[int, Any] = {}

    def both_passes(*batch: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()

        def note(positions: list[int]) -> None:
            positions.append(len(graph.get_operations()))

        def make_call(call: Any, inputs: list[Any], layer: Any) -> list[Any]:
            note(begins)
            leaves = [*tf.nest.flatten(inputs, expand_composites=True), *scope.state_mapping.values()]
            available.append((layer, {id(tensor): tensor for tensor in leaves}))
            return calls.make(call, inputs, layer)

        weights = {id(variable): raw_value(variable) for variable in model.trainable_variables}
        calls = CallGradients(
            lambda layer: [weights[id(variable)] for variable in getattr(layer, "trainable_variables", ())],
            on_call=lambda _: note(turns),
        )
        with SegmentScope(()) as scope:
            run = make_walked(model, make_call, tensors)
            run(import_keras().tree.pack_sequence_as(model.input, list(batch)), training=True)
        note(begins)
        _check_inputs(graph, begins, available)
        ends = differentiable([*(tensors[id(output)] for output in model.outputs), *scope.losses])
        gradients = calls.gradients(ends, [tf.ones_like(end) for end in ends])
        note(turns)
        return [gradients.get(id(weight)) for weight in weights.values()]

    specs = [tf.TensorSpec(shape, dtype) for shape, dtype in inputs]
    function = tf.function(both_passes, autograph=False).get_concrete_function(*specs)
    return _Traced(function.graph, begins, list(itertools.pairwise(turns))[::-1], tensors)


def _check_inputs(graph: Any, begins: Sequence[int], available: Sequence[tuple[Any, Mapping[int, Any]]]) -> None:
    """Refuse a call that reads tensors of another call other than its inputs, as their gradient would be lost.

    Args:
        graph: graph of the forward pass.
        begins: as in `_Traced`.
        available: layer of each call, with its inputs and the values of variables by identity.
    """
    operations = graph.get_operations()
    caller: dict[str, int] = {}  # number of the call of each operation
    for call, (start, end) in enumerate(itertools.pairwise(begins)):
        caller |= dict.fromkeys((operation.name for operation in operations[start:end]), call)
    for operation in operations[begins[0] : begins[-1]]:
        number = caller[operation.name]
        layer, inputs = available[number]
        for tensor in operation.inputs:
            if tensor.dtype.is_floating and caller.get(tensor.op.name, number) != number and id(tensor) not in inputs:
                raise UsageError(
                    f"recompute: layer {getattr(layer, 'name', layer)!r} reads a tensor of another layer "
                    f"({tensor.name!r}), so its gradient would be lost; pass it as an input"
                )


class _Reader:
    """Reads the chain from the graph."""

    def __init__(self, traced: _Traced, model: Any, calls: Sequence[tuple[str, Any]], kernels: Kernels | None) -> None:
        self._kernels, self._compiled = kernels, dict[Any, int]()
        self._traced, self._begins, self._tensors = traced, traced.begins, traced.tensors
        self._operations = in_order(traced.graph.get_operations(), traced.begins[-1])
        self._position = {operation.name: number for number, operation in enumerate(self._operations)}
        self._names, self._calls = zip(*calls, strict=True)
        self._ends = {id(output) for output in model.outputs}
        self._needed = dependencies_of(traced.graph.outputs)  # without gradients of frozen layers, which never run

    def steps(self) -> tuple[LayerCall, ...]:
        last_call = last_calls(self._calls)
        uses = self._uses()
        working, forward = self._working_bytes(), self._forward()
        return tuple(
            LayerCall(
                name=self._names[number],
                seconds=sum(seconds(*_as_node(operation), _RATES) for operation in self._operations_of(number)),
                working_bytes=max(forward[number], working[number] + update_bytes(call.operation)),
                kept_tensors=tuple(self._kept_tensors(number, uses)),
                may_end=last_call[id(call.operation)] == number,
            )
            for number, call in enumerate(self._calls)
        )

    def _operations_of(self, number: int) -> list[Any]:
        return self._operations[self._begins[number] : self._begins[number + 1]]

    def _uses(self) -> dict[Any, list[int]]:
        """Return the calls that take each tensor, by its buffer."""
        uses: dict[Any, list[int]] = {}
        for number, call in enumerate(self._calls):
            for symbolic in call.input_tensors:
                self._add_use(uses, self._tensors.get(id(symbolic)), number)
        for key in self._ends:
            self._add_use(uses, self._tensors.get(key), len(self._calls))
        return uses

    def _add_use(self, uses: dict[Any, list[int]], tensor: Any, number: int) -> None:
        for used in (tensor, mask_of(tensor)):
            if used is not None and hasattr(used, "op"):
                uses.setdefault(root_of(used).ref(), []).append(number)

    def _kept_tensors(self, number: int, uses: Mapping[Any, list[int]]) -> Iterable[KeptTensor]:
        backward = self._begins[-1]
        for operation in self._operations_of(number):
            if operation.type in MAKE_NOTHING:
                continue
            for tensor in operation.outputs:
                later = [call for call in uses.get(tensor.ref(), []) if call > number]
                for_gradient = self._is_read_after(tensor, backward)
                if not later and not for_gradient:
                    continue
                size = bytes_of(tensor) if tensor.dtype.name != "variant" else list_bytes(operation, tensor)
                yield KeptTensor(size, max(later, default=None), for_gradient)

    def _is_read_after(self, tensor: Any, position: int) -> bool:
        """Return whether an operation from a position on reads the tensor's values, possibly through aliases."""
        for operation in tensor.consumers():
            if self._position[operation.name] >= position:
                if operation.type not in SHAPE_ONLY and operation.name in self._needed:
                    return True
            elif operation.type in ALIASES and any(self._is_read_after(alias, position) for alias in operation.outputs):
                return True
        return False

    def _working_bytes(self) -> list[int]:
        """Return the peak of the backward pass's live tensors during each call's turn."""
        begin, turns = self._begins[-1], self._traced.turns
        until = {}  # the update of a weight follows its gradient when the call's turn is over
        for gradient in self._traced.graph.outputs:
            position = self._position[root_of(gradient).op.name]
            ends = [after for before, after in turns if before <= position < after]
            until[root_of(gradient).ref()] = max(ends, default=0) - 1
        lives = lifetimes(self._operations[begin:], self._needed, until, begin, self._scratch)
        return [max(lives[before - begin : after - begin], default=0) for before, after in turns]

    def _forward(self) -> list[int]:
        """Return the peak of each call's forward pass, without the tensors kept for the gradient."""
        begin, end = self._begins[0], self._begins[-1]
        operations = self._operations[begin:end]
        outputs = [tensor for operation in operations for tensor in operation.outputs]
        later = {tensor.ref() for tensor in outputs if self._is_read_after(tensor, end)}
        lives = lifetimes(operations, {operation.name for operation in operations}, {}, begin, self._scratch, later)
        return [
            max(lives[before - begin : after - begin], default=0) for before, after in itertools.pairwise(self._begins)
        ]

    def _scratch(self, operation: Any) -> int:
        """Return the scratch bytes of an operation's kernel."""
        if self._kernels is None:
            return 0
        node, inputs = _as_node(operation)
        node = with_compiled_scratch(node, inputs, self._compiled)
        return sum(needs(node, inputs, self._kernels))


def _as_node(operation: Any) -> tuple[Node, tuple[Tensor, ...]]:
    return node_of(operation), tuple(map(tensor_of, operation.inputs))


_RATES = TABLES[ONEDNN].rates  # only ratios of times count, and they differ little between kernels


def shaped_chain(model: Any, batch_size: int, input_shape: Any = None) -> tuple[LayerCall, ...]:
    """Return the chain of a Functional model's calls on JAX, from shapes: each call keeps its outputs.

    XLA decides about a layer's inside only when it compiles the step. So the cuts are balanced by the layers' outputs,
    and if `memory` is set, the compiled step is checked.

    Args:
        model: a built Functional model; its weights are not read.
        batch_size: samples per batch.
        input_shape: open dimensions of the inputs, as for `kerasmem.estimate`.

    Raises:
        UsageError: If an input has open dimensions that are not in `input_shape`.
        ModelError: If the model cannot be called.
    """
    from kerasmem.training.recompute.model import make_walked
    from kerasmem.training.recompute.segments import call_at_once

    keras = import_keras()
    inputs, calls = inputs_and_calls(model, batch_size, input_shape)
    tensors: dict[int, Any] = {}

    def call(*batch: Any) -> Any:
        run = make_walked(model, call_at_once, tensors)
        return run(keras.tree.pack_sequence_as(model.input, list(batch)), training=True)

    try:
        symbolic_outputs(call, *(keras.KerasTensor(*shape_and_type) for shape_and_type in inputs))
    except KerasmemError:
        raise
    except Exception as error:
        raise ModelError(f"model {model.name!r} cannot be called on a batch: {keras_reason(error)}") from error
    sizes = {key: math.prod(tensor.shape) * element_bytes(str(tensor.dtype)) for key, tensor in tensors.items()}
    uses: dict[int, list[int]] = {}
    for number, (_, node) in enumerate(calls):
        for tensor in node.input_tensors:
            uses.setdefault(id(tensor), []).append(number)
    for tensor in model.outputs:
        uses.setdefault(id(tensor), []).append(len(calls))
    last_call = last_calls(node for _, node in calls)
    return tuple(
        _step(name, node, sizes, uses, last_call[id(node.operation)] == number)
        for number, (name, node) in enumerate(calls)
    )


def _step(name: str, call: Any, sizes: dict[int, int], uses: dict[int, list[int]], may_end: bool) -> LayerCall:
    inputs = sum(sizes.get(id(tensor), 0) for tensor in call.input_tensors)
    outputs = {id(tensor): sizes.get(id(tensor), 0) for tensor in call.outputs}
    kept_tensors = tuple(
        KeptTensor(size, max(uses[key], default=None), for_gradient=True)
        for key, size in outputs.items()
        if key in uses
    )
    working = inputs + sum(outputs.values()) + 2 * update_bytes(call.operation)
    return LayerCall(name, working / _BYTES_A_SECOND, working, kept_tensors, may_end)
