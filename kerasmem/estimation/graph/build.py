"""From a traced step to the program that TensorFlow will execute, as plain data with all shapes filled in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kerasmem.compat.graphs import constant_value
from kerasmem.devices.kernels import CardKernels
from kerasmem.estimation.graph.control import CONTROL, unroll
from kerasmem.estimation.graph.cuda import rnn_reserve
from kerasmem.estimation.graph.lists import Evaluate, Infer, resolve_lists
from kerasmem.estimation.graph.placement import on_card, placement_of
from kerasmem.estimation.graph.program import Node, Program, Tensor, Variable, tensor_of
from kerasmem.estimation.graph.rewriting import UNFED, rewritten
from kerasmem.estimation.graph.rules import KINDS, table_of
from kerasmem.estimation.graph.scratch import AXES, REPLICAS, Kernels, reduction
from kerasmem.models.sizes import element_bytes
from kerasmem.models.step import TracedStep

_FILLS = ("Zeros", "Ones", "Constant", "function")
_KEPT_ATTRIBUTES = (
    "strides", "padding", "explicit_paddings", "dilations", "data_format", "ksize", "fused_ops", "is_training",
    "rnn_mode", "transpose_a", "transpose_b", "frame_name", "adj_x", "adj_y", "is_constant",
    "equation",
)  # fmt: skip
# What follows from constants alone is computed once, when the step is made ready, and kept: by Grappler where it is
# small (kMaxConstantSize), by the runtime up to so many bytes (constant_folding.h).
_SMALL_CONSTANT, _LARGEST_CONSTANT = 100 << 10, 10 << 20
_REDUCTIONS = frozenset(name for name, needs in KINDS["both"]["scratch"].items() if needs == reduction.__name__)


def _small_reserve(node: Node) -> tuple[Tensor, ...]:
    """Return the outputs of a batch normalisation: what it reserves is a number (fused_batch_norm_op.cc)."""
    last = node.outputs[-1].dtype
    return (*node.outputs[:-1], Tensor((), last, element_bytes(last)))


# Operations of which TensorFlow does not tell how much they hand to their gradient.
_RESERVES = {
    "CudnnRNNV3": rnn_reserve, "FusedBatchNormV3": _small_reserve, "_FusedBatchNormEx": _small_reserve,
}  # fmt: skip


def build_program(traced: TracedStep, kernels: Kernels) -> tuple[Program, tuple[str, ...]]:
    """Optimise the traced step as TensorFlow's runtime does and return it as plain data, and notes.

    Args:
        traced: the step.
        kernels: that run it.

    Raises:
        NotModelled: Grappler refuses the graph, or what runs in it depends on the data.
    """
    graph, definition, lowered = rewritten(traced, kernels.capability if isinstance(kernels, CardKernels) else None)
    program, notes = unroll(_plain(graph, traced, [each.name for each in traced.function.graph.outputs], kernels))
    by_name = {node.name: node for node in definition.node}
    program = resolve_lists(program, *_asked_of_tensorflow(by_name, definition.versions))
    if isinstance(kernels, CardKernels):
        operations = graph.get_operations()
        program = on_card(program, {each.name: placement_of(each, by_name[each.name]) for each in operations})
    return program, (*lowered, *notes)


def _asked_of_tensorflow(by_name: dict[str, Any], versions: Any) -> tuple[Infer, Evaluate]:
    """Return TensorFlow's own shape inference, and its evaluation, of an operation whose inputs have become known."""
    known: dict[Any, Any] = {}

    def ask(
        node: Node, inputs: Sequence[Tensor], values: Sequence[Any], read: Callable[[Any], Any], what: int | None = None
    ) -> Any:
        if node.name not in by_name:
            return None
        key = (node.name, what, tuple(each.shape for each in inputs), tuple(map(_as_key, values)))
        if key not in known:
            made = _alone(by_name[node.name], versions, inputs, values)
            known[key] = None if made is None else read(made)
        return known[key]

    def infer(node: Node, inputs: Sequence[Tensor], values: Sequence[Any]) -> list[tuple[int, ...] | None] | None:
        shapes: list[tuple[int, ...] | None] | None = ask(node, inputs, values, _shapes_of)
        return shapes

    def evaluate(node: Node, output: int, inputs: Sequence[Tensor], values: Sequence[Any]) -> Any:
        return ask(node, inputs, values, lambda made: constant_value(made.outputs[output]), output)

    return infer, evaluate


def _shapes_of(operation: Any) -> list[tuple[int, ...] | None]:
    shapes = [tensor.shape for tensor in operation.outputs]
    return [tuple(each.as_list()) if each.is_fully_defined() else None for each in shapes]


def _as_key(value: Any) -> Any:
    return None if value is None else (value.shape, value.tobytes())


def _alone(definition: Any, versions: Any, inputs: Sequence[Tensor], values: Sequence[Any]) -> Any:
    """Return an operation in a graph of its own, on constants where its inputs' values are known; None if refused."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        small = tf.compat.v1.GraphDef(versions=versions)
        small.node.add().CopyFrom(definition)
        del small.node[0].input[:]
        small.node[0].attr.pop("_class", None)
        for place, (tensor, value) in enumerate(zip(inputs, values, strict=True)):
            name = f"kerasmem_input_{place}"
            if value is not None:
                tf.constant(value, tensor.dtype, name=name)
            else:
                tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name=name)
            small.node[0].input.append(name)
        small.node.extend(graph.as_graph_def().node)
    with tf.Graph().as_default() as graph:
        try:
            tf.import_graph_def(small, name="")
        except ValueError:
            return None
    return graph.get_operation_by_name(definition.name)


def _plain(graph: Any, traced: TracedStep, results: list[str], kernels: Kernels) -> Program:
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
        controls = tuple(number[each.name] for each in operation.control_inputs)
        nodes.append(node_of(operation, inputs, controls, behind.get(index)))
    ends = _numbered(results, number)
    _fold_constants(nodes, {index for index, each in enumerate(operations) if each.op_def.is_stateful}, ends)
    _add_hidden_outputs(nodes, kernels)
    _add_compiled_scratch(nodes)
    arguments = tuple(
        number[each.op.name] for each in traced.function.graph.inputs[: len(traced.flat)] if each.op.name in number
    )
    return Program(tuple(nodes), variables_of(traced), arguments, ends)


def _numbered(results: list[str], number: dict[str, int]) -> tuple[tuple[int, int], ...]:
    """Return tensors, by their names, as numbers of nodes and of their outputs."""
    parts = (name.partition(":") for name in results)
    return tuple((number[name], int(output or 0)) for name, _, output in parts if name in number)


def _fold_constants(nodes: list[Node], stateful: set[int], results: tuple[tuple[int, int], ...]) -> None:
    """Put constants in place of operations that follow from constants alone; what only those took goes.

    Of a chain the last is kept, unless it is too large: then all of it runs in each step.
    """
    constant: set[int] = set()  # each comes before those that take it
    for number, node in enumerate(nodes):
        follows = bool(node.inputs) and number not in stateful and node.type not in CONTROL
        is_plain = all(each.bytes is not None and each.dtype not in ("resource", "variant") for each in node.outputs)
        if node.type == "Const" or (follows and is_plain and all(source in constant for source, _ in node.inputs)):
            constant.add(number)
    asked = {source for source, _ in results}
    asked.update(source for number, node in enumerate(nodes) if number not in constant for source, _ in node.inputs)
    for number in constant & asked:
        node = nodes[number]
        size = sum(each.bytes or 0 for each in node.outputs)
        if node.type != "Const" and _SMALL_CONSTANT < size <= _LARGEST_CONSTANT:
            nodes[number] = replace(node, type="Const", inputs=(), attributes={})
    taken = Counter(source for node in nodes for source, _ in node.inputs)
    for number in sorted(constant - asked, reverse=True):  # those that take a node come before it
        node = nodes[number]
        if node.inputs and not taken[number]:
            taken.subtract(source for source, _ in node.inputs)
            nodes[number] = Node(node.name, "NoOp", (), node.controls, (), {})


def node_of(
    operation: Any,
    inputs: tuple[tuple[int, int], ...] = (),
    controls: tuple[int, ...] = (),
    variable: int | None = None,
) -> Node:
    """Return an operation of TensorFlow's as plain data, its edges as they are given."""
    node = Node(
        operation.name,
        "Placeholder" if operation.type == UNFED else operation.type,
        inputs,
        controls,
        tuple(tensor_of(each) for each in operation.outputs),
        _attributes(operation),
        variable,
    )
    return replace(node, outputs=_RESERVES[node.type](node)) if node.type in _RESERVES else node


def _add_hidden_outputs(nodes: list[Node], kernels: Kernels) -> None:
    """Give pooling the second output that its gradient takes: a number for each maximum, where in the window it was."""
    for number, node in enumerate(nodes):
        if node.type not in ("MaxPoolGrad", "MaxPool3DGrad") or len(node.inputs) < 2:
            continue
        source = node.inputs[1][0]
        pool = nodes[source]
        if table_of(pool, kernels).hidden_outputs.get(pool.type) != node.type or pool.outputs[0].shape is None:
            continue
        if len(pool.outputs) == 1:
            window = math.prod(pool.attributes.get("ksize", ()))
            dtype = "uint8" if window <= 256 else "int32"
            size = math.prod(pool.outputs[0].shape) * element_bytes(dtype)
            hidden = Tensor(pool.outputs[0].shape, dtype, size)
            nodes[source] = replace(pool, outputs=(*pool.outputs, hidden))
        nodes[number] = replace(node, inputs=(*node.inputs, (source, 1)))


def _add_compiled_scratch(nodes: list[Node]) -> None:
    """Give calls of functions that XLA compiles, such as Keras's grouped convolutions, the buffer that they work in."""
    known: dict[Any, int] = {}
    for number, node in enumerate(nodes):
        nodes[number] = with_compiled_scratch(
            node, [nodes[source].outputs[output] for source, output in node.inputs], known
        )


def with_compiled_scratch(node: Node, inputs: Sequence[Tensor], known: dict[Any, int]) -> Node:
    """Return an operation with the buffer that it works in where it calls a function that XLA compiles.

    Args:
        node: the operation.
        inputs: what it takes.
        known: bytes, by what the function does and on which shapes; what becomes known is added.
    """
    name = node.attributes.get("compiled_function")
    if name is None or any(each.shape is None for each in inputs):  # a variable's shape is not known here
        return node
    from kerasmem.compat.xla import body_of
    from kerasmem.estimation.xla import XlaRefused, compile_function

    key = (body_of(name), tuple(each.shape for each in inputs))
    if key not in known:
        try:
            known[key] = compile_function(name, [(each.shape or (), each.dtype) for each in inputs]).temporary
        except XlaRefused:
            return node
    return replace(node, attributes={**node.attributes, "scratch": known[key]})


def variables_of(traced: TracedStep) -> tuple[Variable, ...]:
    """Return the variables of a step as plain data, in the order in which they are made."""
    return tuple(_variable(each, traced) for each in traced.variables)


def _variable(variable: Any, traced: TracedStep) -> Variable:
    shape, dtype = tuple(variable.shape), str(variable.dtype)
    initializer = type(getattr(variable, "_initializer", None)).__name__
    return Variable(
        variable.path,
        math.prod(shape) * element_bytes(dtype),
        traced.kinds[id(variable)],
        "filled" if initializer in _FILLS or initializer == "NoneType" else "random",
        shape,
        dtype,
    )


def _attributes(operation: Any) -> dict[str, Any]:
    import tensorflow as tf

    definition = operation.node_def
    found: dict[str, Any] = {}
    for key in _KEPT_ATTRIBUTES:
        if key in definition.attr:
            found[key] = operation.get_attr(key)
    if "_XlaMustCompile" in definition.attr and definition.attr["_XlaMustCompile"].b and "f" in definition.attr:
        found["compiled_function"] = definition.attr["f"].func.name
    if operation.type in _REDUCTIONS and (axes := tf.get_static_value(operation.inputs[1])) is not None:
        found[AXES] = tuple(int(axis) for axis in axes.flat)
    if operation.type == "CollectiveReduceV2":
        found[REPLICAS] = int(tf.get_static_value(operation.inputs[1]))
    if operation.type == "Const":
        value = definition.attr["value"].tensor
        if math.prod(size.size for size in value.tensor_shape.dim) <= 64:
            found["value"] = tf.make_ndarray(value)
    return found
