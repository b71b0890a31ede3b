"""From a traced step to the program that TensorFlow will execute: Grappler's rewriting, shapes, plain data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kerasmem.compat.graphs import constant_value, optimise
from kerasmem.compat.xla import CPU
from kerasmem.errors import KerasmemError
from kerasmem.estimation.graph.control import unroll
from kerasmem.estimation.graph.cuda import rnn_reserve
from kerasmem.estimation.graph.lists import Evaluate, Infer, resolve_lists
from kerasmem.estimation.graph.placement import devices, on_card, place
from kerasmem.estimation.graph.program import Node, NotModelled, Program, Tensor, Variable
from kerasmem.estimation.graph.rules import KernelRules
from kerasmem.estimation.graph.scratch import REPLICAS
from kerasmem.models.sizes import element_bytes
from kerasmem.models.step import TracedStep

DEEP = 20_000  # operations
LARGE = 1 << 20  # bytes
FOLDED = "_kerasmem_folded"
# Grappler makes a tensor of zeros for each placeholder, as large as the batch; beyond so many elements it is given
# another source of a known shape, for which it makes no zeros.
LARGEST_FED, _UNFED = 16 * 2**20, "InfeedDequeue"
_FUNCTIONAL = frozenset({"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"})
_FILLS = ("Zeros", "Ones", "Constant", "function")
_KEPT_ATTRIBUTES = (
    "strides", "padding", "explicit_paddings", "dilations", "data_format", "ksize", "fused_ops", "is_training",
    "rnn_mode", "transpose_a", "transpose_b", "frame_name", "adj_x", "adj_y", "is_constant",
)  # fmt: skip


def _small_reserve(node: Node) -> tuple[Tensor, ...]:
    """Return the outputs of a batch normalisation: what it reserves is a number (fused_batch_norm_op.cc)."""
    last = node.outputs[-1].dtype
    return (*node.outputs[:-1], Tensor((), last, element_bytes(last)))


# Operations of which TensorFlow does not tell how much they hand to their gradient.
_RESERVES = {
    "CudnnRNNV3": rnn_reserve, "FusedBatchNormV3": _small_reserve, "_FusedBatchNormEx": _small_reserve,
}  # fmt: skip


def build_program(traced: TracedStep, rules: KernelRules) -> tuple[Program, tuple[str, ...]]:
    """Optimise the traced step as TensorFlow's runtime does and return it as plain data, and notes.

    Args:
        traced: the step.
        rules: of the kernels that it runs on.

    Raises:
        NotModelled: Grappler refuses the graph, or what runs in it depends on the data.
    """
    graph = traced.function.graph
    definition = _runnable(traced, rules.card is not None)
    lowered = _lowered(definition)
    fetches = list(dict.fromkeys([each.name for each in graph.outputs] + [each.name for each in graph.control_outputs]))
    if len(definition.node) > DEEP:
        _fold_large(graph, definition)
    capability = None if rules.card is None else rules.card.capability
    optimised = _optimise(definition, fetches, capability)
    try:
        imported = _imported(optimised, rules.card is not None)
    except ValueError:  # fused operations of dtypes that they are not registered for (bfloat16 convolutions)
        optimised = _optimise(definition, fetches, capability, fuses=False)
        try:
            imported = _imported(optimised, rules.card is not None)
        except ValueError as error:
            raise NotModelled(f"the optimised graph cannot be read: {str(error).splitlines()[0][:200]}") from error
    program, notes = unroll(_plain(imported, traced, [each.name for each in graph.outputs], rules))
    by_name = {node.name: node for node in optimised.node}
    program = resolve_lists(program, *_asked_of_tensorflow(by_name, optimised.versions))
    if rules.card is not None:
        program = on_card(program, {each.name: place(each, by_name[each.name]) for each in imported.get_operations()})
    return program, (*lowered, *notes)


def _lowered(definition: Any) -> tuple[str, ...]:
    """Let loops and branches that a kernel runs as a whole, as in TensorFlow's CTC loss, be spelled out as others are.

    Returns a note where there are such.
    """
    inside = (node for function in definition.library.function for node in function.node_def)
    found = [node for node in (*definition.node, *inside) if node.op in _FUNCTIONAL]
    whole = [node for node in found if not node.attr["_lower_using_switch_merge"].b]
    for node in whole:
        node.attr["_lower_using_switch_merge"].b = True
    if not whole:
        return ()
    return (f"{len(whole)} loops or branches ({whole[0].name}, …) run as one operation, and are counted as several",)


def _fold_large(graph: Any, definition: Any) -> None:
    """Put a constant without a value in place of each operation that makes a large tensor out of constants alone.

    A decoder makes a mask in each of its blocks. Grappler would compute every one before it finds that they are the
    same, in memory and time that grow with the depth.
    """
    nodes = {node.name: node for node in definition.node}
    values: dict[str, str] = {}  # operations on constants alone → what stands for their value
    large: dict[str, str] = {}
    for operation in graph.get_operations():
        sizes = [tensor_of(each) for each in operation.outputs]
        on_shapes = operation.type in ("Shape", "ShapeN", "Size", "Rank") and all(
            tensor.shape.is_fully_defined() for tensor in operation.inputs
        )
        on_constants = bool(operation.inputs) and all(tensor.op.name in values for tensor in operation.inputs)
        if not (operation.type == "Const" or on_shapes or (on_constants and not operation.op_def.is_stateful)):
            continue
        if not sizes or any(each.bytes is None for each in sizes):
            continue
        values[operation.name] = _value_of(operation, nodes[operation.name], values)
        if operation.type != "Const" and len(sizes) == 1 and (sizes[0].bytes or 0) > LARGE:
            large[operation.name] = values[operation.name]
    first: dict[str, str] = {}
    for name, value in large.items():
        node, is_first = nodes[name], value not in first
        first.setdefault(value, name)
        made = graph.get_operation_by_name(name).outputs[0]
        node.attr.clear()
        del node.input[:]
        if is_first:
            node.op = "Placeholder"
            node.attr["dtype"].type = made.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(made.shape.as_proto())
            node.attr[FOLDED].b = True
        else:
            node.op = "Identity"
            node.input.append(first[value])
            node.attr["T"].type = made.dtype.as_datatype_enum


def _value_of(operation: Any, node: Any, values: dict[str, str]) -> str:
    """Return a digest that two operations share only where they make the same value."""
    digest = hashlib.sha256(operation.type.encode())
    for key in sorted(node.attr):
        if not key.startswith("_"):
            digest.update(key.encode() + node.attr[key].SerializeToString(deterministic=True))
    for tensor in operation.inputs:
        known = values.get(tensor.op.name) or str(tensor.shape)
        digest.update(f"{known}:{tensor.value_index}".encode())
    return digest.hexdigest()


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


def _runnable(traced: TracedStep, is_on_card: bool) -> Any:
    """Return the function's graph with its captured variables as operations of their own, all on their devices."""
    import tensorflow as tf

    graph = traced.function.graph
    definition = graph.as_graph_def()
    for node in definition.node:
        node.device = CPU
        variable = traced.captures.get(node.name)
        if variable is not None:
            node.op = "VarHandleOp"
            del node.input[:]
            node.attr.clear()
            node.attr["dtype"].type = tf.as_dtype(variable.dtype).as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(tuple(variable.shape)).as_proto())
            node.attr["shared_name"].s = node.name.encode()
        elif node.op == "Placeholder" and _is_large(node.attr["shape"].shape):
            node.op = _UNFED
    if is_on_card:
        # `fit` takes the batch from a dataset, which is on the host.
        batch = [each.op.name for each in graph.inputs[: len(traced.flat)]]
        by_name = {node.name: node for node in definition.node}
        for node in definition.node:
            node.device = ""
        for name, device in devices(graph.get_operations(), by_name, batch).items():
            by_name[name].device = device
    return definition


def _is_large(shape: Any) -> bool:
    return math.prod(each.size for each in shape.dim) > LARGEST_FED


def _imported(definition: Any, is_on_card: bool) -> Any:
    import tensorflow as tf

    if not is_on_card:
        for node in definition.node:
            node.device = ""  # all are on one; TensorFlow would look at each
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
    return graph


def _optimise(
    definition: Any, fetches: list[str], capability: tuple[int, int] | None = None, fuses: bool = True
) -> Any:
    """Return what Grappler makes of the graph, on one CPU or on a card of this compute capability beside it."""
    try:
        return optimise(definition, fetches, fuses, capability)
    except KerasmemError:
        raise
    except Exception as error:
        raise NotModelled(f"Grappler refuses the step's graph: {str(error).splitlines()[0][:200]}") from error


def _plain(graph: Any, traced: TracedStep, results: list[str], rules: KernelRules) -> Program:
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
                "Placeholder" if operation.type == _UNFED else operation.type,
                inputs,
                tuple(number[each.name] for each in operation.control_inputs),
                tuple(tensor_of(each) for each in operation.outputs),
                _attributes(operation),
                behind.get(index),
            )
        )
    nodes = [replace(each, outputs=_RESERVES[each.type](each)) if each.type in _RESERVES else each for each in nodes]
    _add_hidden_outputs(nodes, rules)
    _add_compiled_scratch(nodes)
    arguments = tuple(
        number[each.op.name] for each in traced.function.graph.inputs[: len(traced.flat)] if each.op.name in number
    )
    ends: list[tuple[int, int]] = []
    for name in results:
        operation_name, _, output = name.partition(":")
        if operation_name in number:
            ends.append((number[operation_name], int(output or 0)))
    return Program(tuple(nodes), variables_of(traced), arguments, tuple(ends))


def _add_hidden_outputs(nodes: list[Node], rules: KernelRules) -> None:
    """Give pooling the second output that its gradient takes: a number for each maximum, where in the window it was."""
    for number, node in enumerate(nodes):
        if node.type not in ("MaxPoolGrad", "MaxPool3DGrad") or len(node.inputs) < 2:
            continue
        source = node.inputs[1][0]
        pool = nodes[source]
        if rules.of(pool).hidden_outputs.get(pool.type) != node.type or pool.outputs[0].shape is None:
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
    from kerasmem.estimation.xla import XlaRefused, compile_function

    known: dict[Any, int] = {}
    for number, node in enumerate(nodes):
        if "compiled_function" not in node.attributes:
            continue
        inputs = [nodes[source].outputs[output] for source, output in node.inputs]
        key = (node.attributes["compiled_function"], tuple(each.shape for each in inputs))
        if key not in known and all(each.shape is not None for each in inputs):
            try:
                known[key] = compile_function(key[0], [(each.shape or (), each.dtype) for each in inputs]).temporary
            except XlaRefused:
                continue
        if key in known:
            nodes[number] = replace(node, attributes={**node.attributes, "scratch": known[key]})


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


def tensor_of(tensor: Any) -> Tensor:
    """Return a symbolic tensor as plain data; what only names a value elsewhere takes nothing."""
    dtype = tensor.dtype.base_dtype.name
    if dtype in ("resource", "variant"):
        return Tensor(None, dtype, 0)
    shape = tensor.shape
    if shape.rank is None or not shape.is_fully_defined():
        return Tensor(None, dtype, None)
    sizes = tuple(shape.as_list())
    return Tensor(sizes, dtype, math.prod(sizes) * element_bytes(dtype))


def _attributes(operation: Any) -> dict[str, Any]:
    import tensorflow as tf

    definition = operation.node_def
    found: dict[str, Any] = {}
    for key in _KEPT_ATTRIBUTES:
        if key in definition.attr:
            found[key] = operation.get_attr(key)
    if "_XlaMustCompile" in definition.attr and definition.attr["_XlaMustCompile"].b and "f" in definition.attr:
        found["compiled_function"] = definition.attr["f"].func.name
    if operation.type == "CollectiveReduceV2":
        found[REPLICAS] = int(tf.get_static_value(operation.inputs[1]))
    if operation.type == "Const":
        value = definition.attr["value"].tensor
        if math.prod(size.size for size in value.tensor_shape.dim) <= 64:
            found["value"] = tf.make_ndarray(value)
    return found
