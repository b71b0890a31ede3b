"""The graph of a traced step as TensorFlow's runtime makes it over before it runs: on one CPU, or beside a card."""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

from kerasmem.compat.graphs import optimise
from kerasmem.compat.xla import CPU
from kerasmem.errors import KerasmemError, first_line
from kerasmem.estimation.graph.placement import devices
from kerasmem.estimation.graph.program import NotModelled, tensor_of
from kerasmem.models.step import TracedStep

DEEP = 20_000  # operations
LARGE = 1 << 20  # bytes
# Grappler makes a tensor of zeros for each placeholder, as large as the batch; beyond so many elements it is given
# another source of a known shape, for which it makes no zeros.
LARGEST_FED, UNFED = 16 * 2**20, "InfeedDequeue"
_FUNCTIONAL = frozenset({"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"})


class Rewritten(NamedTuple):
    """A graph that Grappler has made over: as TensorFlow reads it, its definition, and notes."""

    graph: Any
    definition: Any
    notes: tuple[str, ...]


def rewritten(traced: TracedStep, capability: tuple[int, int] | None) -> Rewritten:
    """Optimise the graph of a traced step as TensorFlow's runtime does.

    Args:
        traced: the step.
        capability: compute capability of the card that it runs on; None for a CPU.

    Raises:
        NotModelled: Grappler refuses the graph, or TensorFlow what comes of it.
    """
    graph, is_on_card = traced.function.graph, capability is not None
    definition = _runnable(traced, is_on_card)
    notes = _lowered(definition)
    fetches = list(dict.fromkeys([each.name for each in graph.outputs] + [each.name for each in graph.control_outputs]))
    if len(definition.node) > DEEP:
        _fold_large(graph, definition)
    reason = ""
    for fuses in (True, False):  # operations may be fused for whose dtype there is none, as bfloat16 convolutions
        optimised = _optimised(definition, fetches, fuses, capability)
        try:
            return Rewritten(_imported(optimised, is_on_card), optimised, notes)
        except ValueError as error:
            reason = first_line(error)
    raise NotModelled(f"the optimised graph cannot be read: {reason}")


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
        elif node.op == "Placeholder" and math.prod(each.size for each in node.attr["shape"].shape.dim) > LARGEST_FED:
            node.op = UNFED
    if is_on_card:
        # `fit` takes the batch from a dataset, which is on the host.
        batch = [each.op.name for each in graph.inputs[: len(traced.flat)]]
        by_name = {node.name: node for node in definition.node}
        for node in definition.node:
            node.device = ""
        for name, device in devices(graph.get_operations(), by_name, batch).items():
            by_name[name].device = device
    return definition


def _imported(definition: Any, is_on_card: bool) -> Any:
    import tensorflow as tf

    if not is_on_card:
        for node in definition.node:
            node.device = ""  # all are on one; TensorFlow would look at each
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
    return graph


def _optimised(definition: Any, fetches: list[str], fuses: bool, capability: tuple[int, int] | None) -> Any:
    try:
        return optimise(definition, fetches, fuses, capability)
    except KerasmemError:
        raise
    except Exception as error:
        raise NotModelled(f"Grappler refuses the step's graph: {first_line(error)}") from error
