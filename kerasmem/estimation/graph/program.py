"""The step as TensorFlow will execute it: the traced graph after Grappler, with the bytes of every tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kerasmem.errors import KerasmemError
from kerasmem.models.sizes import element_bytes
from kerasmem.models.step import TracedStep

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


class NotModelled(KerasmemError):
    """The step holds something that the simulation has no rule for; `probe` runs it for real."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """What comes out of an operation: shape (None where it depends on the data), dtype and bytes."""

    shape: tuple[int, ...] | None
    dtype: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Node:
    """An operation of the executed graph.

    Attributes:
        name: as TensorFlow names it; it holds the names of Keras's layers.
        type: "Conv2D", "ReadVariableOp", …
        inputs: for each input the number of the node that makes it, and which of its outputs it is.
        controls: the nodes that must have run before.
        outputs: what it makes.
        attributes: the few that rules look at (strides, padding, constants).
        variable: for operations on a variable, its number in `Program.variables`.
    """

    name: str
    type: str
    inputs: tuple[tuple[int, int], ...]
    controls: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    attributes: dict[str, Any]
    variable: int | None = None


@dataclass(frozen=True)
class Variable:
    """A variable of the model, its optimizer or its metrics.

    Attributes:
        path: in Keras.
        bytes: of its value.
        kind: "weights", "optimizer" or "metrics".
        initial: how it gets its first value: "random" (drawn, scaled and shifted, each in a buffer of its own) or
            "filled" (with one number).
        shape: of its value; with the dtype it says which fillings are the same.
        dtype: of its value.
        layer: the layer that has it, or None.
    """

    path: str
    bytes: int
    kind: str
    initial: str
    shape: tuple[int, ...]
    dtype: str
    layer: str | None = None


@dataclass(frozen=True)
class Program:
    """All that the simulation needs, without TensorFlow.

    Attributes:
        nodes: the operations; an index in it is a node's number.
        variables: those that the step touches.
        arguments: numbers of the nodes that stand for the batch, held by the caller.
        results: (node, output) of what the step returns.
        functions: names of functions that stay calls (no rule looks inside).
    """

    nodes: tuple[Node, ...]
    variables: tuple[Variable, ...]
    arguments: tuple[int, ...]
    results: tuple[tuple[int, int], ...]


_FILLS = ("Zeros", "Ones", "Constant", "function")
_KEPT_ATTRIBUTES = (
    "strides", "padding", "data_format", "ksize", "fused_ops", "transpose_a", "transpose_b", "frame_name", "T", "N",
    "num_args", "adj_x", "adj_y", "dilations", "_kernel", "index", "element_dtype",
)  # fmt: skip


def build_program(traced: TracedStep) -> Program:
    """Optimise the traced step as TensorFlow's runtime does and return it as plain data.

    Raises:
        NotModelled: Grappler refuses the graph.
    """
    import tensorflow as tf

    graph = traced.function.graph
    definition = _runnable(traced)
    fetches = list(dict.fromkeys([each.name for each in graph.outputs] + [each.name for each in graph.control_outputs]))
    optimised = _optimise(definition, fetches)
    with tf.Graph().as_default() as imported:
        tf.import_graph_def(optimised, name="")
    return _plain(imported, traced, [each.name for each in graph.outputs])


def _runnable(traced: TracedStep) -> Any:
    """Return the function's graph with its captured variables as operations of their own, all on one CPU."""
    import tensorflow as tf

    definition = traced.function.graph.as_graph_def()
    for node in definition.node:
        node.device = CPU
        variable = traced.captures.get(node.name)
        if variable is not None:
            node.op = "VarHandleOp"
            del node.input[:]
            node.attr.clear()
            node.attr["dtype"].type = tf.as_dtype(variable._dtype).as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(tuple(variable.shape)).as_proto())
            node.attr["shared_name"].s = node.name.encode()
    return definition


def _optimise(definition: Any, fetches: list[str]) -> Any:
    from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
    from tensorflow.python.grappler import tf_optimizer

    whole = meta_graph_pb2.MetaGraphDef()
    whole.graph_def.CopyFrom(definition)
    whole.collection_def["train_op"].node_list.value.extend(fetches)
    options = config_pb2.ConfigProto()
    options.graph_options.rewrite_options.min_graph_nodes = -1
    try:
        return tf_optimizer.OptimizeGraph(options, whole)
    except Exception as error:
        raise NotModelled(f"Grappler refuses the step's graph: {str(error).splitlines()[0][:200]}") from error


def _plain(graph: Any, traced: TracedStep, results: list[str]) -> Program:
    operations = graph.get_operations()
    number = {operation.name: index for index, operation in enumerate(operations)}
    place = {id(each): index for index, each in enumerate(traced.variables)}
    of_capture = {name: place[id(each)] for name, each in traced.captures.items() if id(each) in place}
    nodes = []
    behind: dict[int, int] = {}  # node → the variable whose handle it passes on
    for index, operation in enumerate(operations):
        inputs = tuple((number[tensor.op.name], tensor.value_index) for tensor in operation.inputs)
        if operation.type == "VarHandleOp" and operation.name in of_capture:
            behind[index] = of_capture[operation.name]
        elif inputs and inputs[0][0] in behind:
            behind[index] = behind[inputs[0][0]]
        nodes.append(
            Node(
                operation.name,
                operation.type,
                inputs,
                tuple(number[each.name] for each in operation.control_inputs),
                tuple(_tensor(each) for each in operation.outputs),
                _attributes(operation),
                behind.get(index),
            )
        )
    arguments = tuple(
        number[each.op.name]
        for each in traced.function.graph.inputs[: len(traced.flat)]
        if each.op.name in number
    )
    ends = []
    for name in results:
        operation_name, _, output = name.partition(":")
        if operation_name in number:
            ends.append((number[operation_name], int(output or 0)))
    return Program(tuple(nodes), variables_of(traced), arguments, tuple(ends))


def variables_of(traced: TracedStep) -> tuple[Variable, ...]:
    """Return the variables of a step as plain data, in the order in which they are made."""
    return tuple(_variable(each, traced) for each in traced.variables)


def _variable(variable: Any, traced: TracedStep) -> Variable:
    shape, dtype = tuple(variable.shape), str(variable._dtype)
    initializer = type(getattr(variable, "_initializer", None)).__name__
    return Variable(
        variable.path,
        math.prod(shape) * element_bytes(dtype),
        traced.kinds[id(variable)],
        "filled" if initializer in _FILLS or initializer == "NoneType" else "random",
        shape,
        dtype,
    )


def _tensor(tensor: Any) -> Tensor:
    dtype = tensor.dtype.base_dtype.name
    if dtype in ("resource", "variant"):
        return Tensor(None, dtype, 0)
    shape = tensor.shape
    if shape.rank is None or not shape.is_fully_defined():
        return Tensor(None, dtype, None)
    sizes = tuple(shape.as_list())
    return Tensor(sizes, dtype, math.prod(sizes) * element_bytes(dtype))


def _attributes(operation: Any) -> dict[str, Any]:
    from tensorflow.python.framework import tensor_util

    definition = operation.node_def
    found: dict[str, Any] = {}
    for key in _KEPT_ATTRIBUTES:
        if key in definition.attr:
            found[key] = operation.get_attr(key)
    if operation.type == "Const":
        value = definition.attr["value"].tensor
        if math.prod(size.size for size in value.tensor_shape.dim) <= 64:
            found["value"] = tensor_util.MakeNdarray(value)
    return found
