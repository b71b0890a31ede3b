"""What each layer of a live model keeps for its gradient, read off the graph of a forward and a backward pass.

The model is traced on the shapes of a batch; nothing is computed. A tensor that an operation of the forward pass
makes and one of the backward pass takes is kept in between; which layer made it is known, since the layers are called
one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kerasmem.compat.graphs import loop_body
from kerasmem.compat.keras_state import mask_of
from kerasmem.compat.keras_variables import handle_only, raw_value
from kerasmem.errors import KerasmemError, ModelError
from kerasmem.estimation.graph.costs import operations, seconds
from kerasmem.estimation.graph.program import Node, Tensor, tensor_of
from kerasmem.estimation.graph.rules import ALIASES, NOTHING
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.inputs import model_inputs, normalise_input_shapes
from kerasmem.models.sizes import element_bytes, variable_bytes
from kerasmem.models.weightless import with_stand_ins
from kerasmem.training.segments.chain import Kept, Step

# Their gradient is computed from what they put out, and not from what they take.
_GRADIENT_FROM_OUTPUT = frozenset(
    ("Relu", "Relu6", "Elu", "Selu", "Sigmoid", "Tanh", "Softmax", "LogSoftmax", "Exp", "Expm1", "Sqrt", "Rsqrt", "Inv")
)
# They look at a tensor's shape and not at its values.
_SHAPE_ONLY = frozenset(("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "VariableShape"))


def trace_chain(model: Any, batch_size: int, input_shape: Any = None) -> tuple[Step, ...]:
    """Return the chain of a Functional model's calls.

    Args:
        model: a Functional model, built; its weights are not read.
        batch_size: samples in a batch.
        input_shape: open dimensions of the inputs, as for `kerasmem.estimate`.

    Raises:
        UsageError: an input has open dimensions that `input_shape` does not give.
        ModelError: the model cannot be traced.
    """
    inputs, calls = inputs_and_calls(model, batch_size, input_shape)
    try:
        with with_stand_ins(handle_only):
            graph, begins, tensors = _traced(model, inputs)
    except KerasmemError:
        raise
    except Exception as error:
        raise ModelError(f"model {model.name!r} cannot be traced for training: {keras_reason(error)}") from error
    return _Reader(graph, begins, tensors, model, calls).steps()


def inputs_and_calls(
    model: Any, batch_size: int, input_shape: Any
) -> tuple[list[tuple[tuple[int | None, ...], str]], list[tuple[str, Any]]]:
    """Return the shape, with a batch, and the type of each input of a Functional model, and its calls by name.

    Raises:
        UsageError: an input has open dimensions that `input_shape` does not give.
    """
    from kerasmem.models.recomputed import chain_of

    _, inputs = model_inputs(model, normalise_input_shapes(input_shape))
    batch = [((each.shape[0] or batch_size, *each.shape[1:]), each.dtype) for each in inputs]
    return batch, [pair for each in chain_of(model) for pair in each.inner]


def last_calls(calls: Iterable[Any]) -> dict[int, int]:
    """Return the number of the last call of each operation, by the operation's identity."""
    return {id(each.operation): number for number, each in enumerate(calls)}


def update_bytes(operation: Any) -> int:
    """Return the bytes that a layer's update takes, which follows its gradients at once: those, and as much again for
    what the optimizer makes of them."""
    return 2 * sum(variable_bytes(each) for each in getattr(operation, "trainable_variables", ()))


def _traced(model: Any, inputs: Sequence[tuple[Any, str]]) -> tuple[Any, list[int], dict[int, Any]]:
    """Return the graph, the number of operations in it before each call and after the last, and the tensors."""
    import tensorflow as tf

    from kerasmem.models.recomputed import walked

    begins: list[int] = []
    tensors: dict[int, Any] = {}

    def both_passes(*batch: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        run = walked(model, lambda: begins.append(len(graph.get_operations())), tensors)
        with tf.GradientTape() as tape:
            run(import_keras().tree.pack_sequence_as(model.input, list(batch)), training=True)
            begins.append(len(graph.get_operations()))
            ends = [tensors[id(each)] for each in model.outputs]
            losses = [tf.reduce_sum(tf.cast(each, "float32")) for each in (*ends, *run.losses)]
        weights = [raw_value(each) for each in model.trainable_variables]
        return tape.gradient(losses, weights, unconnected_gradients="none")

    specs = [tf.TensorSpec(shape, dtype) for shape, dtype in inputs]
    function = tf.function(both_passes, autograph=False).get_concrete_function(*specs)
    return function.graph, begins, tensors


class _Reader:
    """Reads steps off the graph."""

    def __init__(
        self,
        graph: Any,
        begins: Sequence[int],
        tensors: Mapping[int, Any],
        model: Any,
        calls: Sequence[tuple[str, Any]],
    ) -> None:
        self._operations = graph.get_operations()
        self._place = {each.name: number for number, each in enumerate(self._operations)}
        self._begins, self._tensors = begins, tensors
        self._names, self._calls = zip(*calls, strict=True)
        self._ends = {id(each) for each in model.outputs}
        self._needed = _needed_for(graph.outputs)  # the tape makes gradients of frozen layers too; nothing runs them

    def steps(self) -> tuple[Step, ...]:
        last_call = last_calls(self._calls)
        uses = self._uses()
        trained = self._trained()
        return tuple(
            Step(
                name=self._names[number],
                seconds=sum(seconds(*_as_node(one)) for one in self._made_by(number)),
                flops=round(sum(operations(*_as_node(one)) for one in self._made_by(number))),
                working_bytes=self._working(each) + update_bytes(each.operation) if trained[number] else 0,
                kept=tuple(self._kept(number, uses)),
                may_end=last_call[id(each.operation)] == number,
            )
            for number, each in enumerate(self._calls)
        )

    def _made_by(self, number: int) -> list[Any]:
        made: list[Any] = self._operations[self._begins[number] : self._begins[number + 1]]
        return made

    def _uses(self) -> dict[Any, list[int]]:
        """Return for the tensors that calls hand on, by what holds their values: the calls that take them."""
        found: dict[Any, list[int]] = {}
        for number, call in enumerate(self._calls):
            for each in call.input_tensors:
                self._note(found, self._tensors.get(id(each)), number)
        for key in self._ends:
            self._note(found, self._tensors.get(key), len(self._calls))
        return found

    def _trained(self) -> list[bool]:
        """Return for each call whether it has a backward pass: it or what it takes comes from a trained weight."""
        moved: set[Any] = set()
        found = []
        for call in self._calls:
            taken = [self._tensors.get(id(each)) for each in call.input_tensors]
            found.append(
                bool(getattr(call.operation, "trainable_variables", ()))
                or any(_root(each).ref() in moved for each in taken if hasattr(each, "op"))
            )
            made = [self._tensors.get(id(each)) for each in call.outputs] if found[-1] else []
            moved.update(_root(each).ref() for each in made if hasattr(each, "op"))
        return found

    def _note(self, found: dict[Any, list[int]], tensor: Any, number: int) -> None:
        for one in (tensor, mask_of(tensor)):
            if one is not None and hasattr(one, "op"):
                found.setdefault(_root(one).ref(), []).append(number)

    def _kept(self, number: int, uses: Mapping[Any, list[int]]) -> Iterable[Kept]:
        backward = self._begins[-1]
        for operation in self._made_by(number):
            if operation.type in NOTHING or operation.type in ALIASES:
                continue
            for tensor in operation.outputs:
                taken = uses.get(tensor.ref(), [])
                later = [each for each in taken if each > number]
                for_gradient = self._taken_after(tensor, backward)
                if not later and not for_gradient:
                    continue
                inside = self._taken_inside(tensor, number, backward)
                size = _bytes(tensor) if tensor.dtype.name != "variant" else _list_bytes(operation, tensor)
                own = operation.type in _GRADIENT_FROM_OUTPUT or inside
                yield Kept(size, min(later, default=None), max(later, default=None), for_gradient, own)

    def _taken_after(self, tensor: Any, place: int) -> bool:
        """Return whether an operation from that place on takes the tensor's values, by whatever name."""
        for each in tensor.consumers():
            if self._place[each.name] >= place:
                if each.type not in _SHAPE_ONLY and each.name in self._needed:
                    return True
            elif each.type in ALIASES and any(self._taken_after(one, place) for one in each.outputs):
                return True
        return False

    def _taken_inside(self, tensor: Any, number: int, backward: int) -> bool:
        """Return whether another operation of the same call takes the tensor."""
        end = self._begins[number + 1]
        return any(
            self._taken_inside(each.outputs[0], number, backward) if each.type in ALIASES and each.outputs else True
            for each in tensor.consumers()
            if self._place[each.name] < end and each.type not in _SHAPE_ONLY
        )

    def _working(self, call: Any) -> int:
        tensors = [self._tensors.get(id(each)) for each in (*call.outputs, *call.input_tensors)]
        return sum(_bytes(each) for each in tensors if hasattr(each, "op"))


def _needed_for(tensors: Iterable[Any]) -> set[str]:
    """Return the names of the operations without which tensors are not made."""
    found: set[str] = set()
    pending = [each.op for each in tensors]
    while pending:
        operation = pending.pop()
        if operation.name not in found:
            found.add(operation.name)
            pending.extend((*(each.op for each in operation.inputs), *operation.control_inputs))
    return found


def _root(tensor: Any) -> Any:
    while tensor.op.type in ALIASES and tensor.op.inputs:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def _bytes(tensor: Any) -> int:
    return tensor_of(tensor).bytes or 0


def _list_bytes(operation: Any, tensor: Any) -> int:
    """Return what a list holds in the end: that of a loop its elements' size, times the turns of the loop.

    What each turn computes counts; a weight that every turn reads is in the list many times and in memory once.
    """
    import tensorflow as tf

    if operation.type == "TensorListFromTensor":
        return _bytes(operation.inputs[0])
    number = tensor.value_index
    if operation.type not in ("While", "StatelessWhile") or number >= len(operation.inputs):
        return 0
    begun = operation.inputs[number].op
    if begun.type not in ("EmptyTensorList", "TensorListReserve") or not _made_in_each_turn(operation, number):
        return 0
    shape = tf.get_static_value(begun.inputs[0])
    sizes = [] if shape is None else [int(each) for each in shape.flat]
    if shape is None or any(each < 0 for each in sizes):
        return 0
    return _turns(operation) * math.prod(sizes) * element_bytes(begun.get_attr("element_dtype").name)


def _turns(loop: Any) -> int:
    """Return how often a loop over the steps of a sequence runs: as often as what it takes or fills has steps."""
    import tensorflow as tf

    counts = [1]
    for each in loop.inputs:
        if each.op.type == "TensorListFromTensor":
            counts.append(each.op.inputs[0].shape[0] or 1)
        elif each.op.type == "TensorListReserve":
            size = tf.get_static_value(each.op.inputs[1])
            counts.append(1 if size is None else int(size))
    return max(counts)


def _made_in_each_turn(loop: Any, number: int) -> bool:
    """Return whether what a turn of the loop adds to its list of that number is computed in that turn."""
    added = loop_body(loop).outputs[number].op
    while added.type in ("Identity", "TensorListPushBack"):
        added = added.inputs[-1].op
    return added.type not in ("Placeholder", "ReadVariableOp", "Const")


def _as_node(operation: Any) -> tuple[Node, list[Tensor]]:
    inputs = list(map(tensor_of, operation.inputs))
    attributes = {}
    if "transpose_b" in operation.node_def.attr:
        attributes["transpose_b"] = operation.get_attr("transpose_b")
    outputs = tuple(map(tensor_of, operation.outputs))
    return Node(operation.name, operation.type, (), (), outputs, attributes), inputs
