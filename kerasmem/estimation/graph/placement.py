"""Which operations of a step run on a card, which on the CPU beside it, and in whose memory each tensor lies.

TensorFlow puts an operation on the card where it has a kernel for GPUs that takes its dtypes, with all others on the
same variable (tensorflow/core/common_runtime/placer.cc). Some of those kernels keep inputs or outputs, such as shapes
and most numbers of 32-bit integers, in the host's memory. Where an operation wants a tensor in the other memory, it is
copied, once for all that want it there (tensorflow/core/graph/graph_partition.cc, common_runtime/memory_types.cc).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kerasmem.compat.graphs import GPU, GpuKernel, gpu_kernels
from kerasmem.compat.xla import CPU
from kerasmem.estimation.graph.program import COPY, ON_HOST, Node, Program, Tensor

_NAMES_ONLY = ("resource", "variant")  # dtypes of what stands for something elsewhere; it is not copied


class Place(NamedTuple):
    """Where an operation runs.

    Attributes:
        on_host: whether on the CPU.
        inputs: numbers of the inputs that it wants in the host's memory; all of them on the CPU.
        outputs: of the outputs that it leaves there.
        declared: how many inputs it has in TensorFlow; those after them stand for what is in a list.
    """

    on_host: bool
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    declared: int = 1 << 30


_HOST, _CARD = Place(True), Place(False)
Kernels = Callable[[str], tuple[GpuKernel, ...]]


def place(operation: Any, definition: Any, kernels: Kernels = gpu_kernels) -> Place:
    """Return where an operation runs by TensorFlow's kernels; a device that it already has is kept.

    Args:
        operation: a `tf.Operation`.
        definition: its `NodeDef`.
        kernels: those for GPUs, by operation.
    """
    if "CPU" in definition.device:
        return _HOST
    values = [definition.attr[name] for name in _asked(kernels, definition.op)]
    dtypes = tuple(tuple(each.list.type) if each.HasField("list") else (each.type,) for each in values)
    label = definition.attr["_kernel"].s.decode() if "_kernel" in definition.attr else ""
    kernel = _chosen(kernels, definition.op, label, dtypes)
    if kernel is None:
        return _HOST
    if not kernel.host:
        return Place(False, declared=len(operation.inputs))
    described = operation.op_def
    return Place(
        False,
        _numbers(described.input_arg, definition, kernel.host),
        _numbers(described.output_arg, definition, kernel.host),
        len(operation.inputs),
    )


@functools.cache
def _asked(kernels: Kernels, operation: str) -> tuple[str, ...]:
    """Return the attributes by whose dtypes an operation's kernels differ."""
    return tuple(dict.fromkeys(name for each in kernels(operation) for name in each.dtypes))


@functools.cache
def _chosen(kernels: Kernels, operation: str, label: str, dtypes: tuple[tuple[int, ...], ...]) -> GpuKernel | None:
    """Return the kernel for an operation whose attributes (`_asked`) have these dtypes; None where there is none."""
    given = dict(zip(_asked(kernels, operation), dtypes, strict=True))
    fitting = [
        each
        for each in kernels(operation)
        if each.label == label and all(allowed.issuperset(given[name]) for name, allowed in each.dtypes.items())
    ]
    return max(fitting, key=lambda each: each.rank, default=None)


def _numbers(arguments: Iterable[Any], definition: Any, names: frozenset[str]) -> frozenset[int]:
    """Return the numbers of the inputs, or of the outputs, that have these names."""
    found: set[int] = set()
    first = 0
    for each in arguments:
        count = 1
        if each.number_attr:
            count = definition.attr[each.number_attr].i
        elif each.type_list_attr:
            count = len(definition.attr[each.type_list_attr].list.type)
        if each.name in names:
            found.update(range(first, first + count))
        first += count
    return frozenset(found)


def devices(operations: Sequence[Any], definitions: Mapping[str, Any], on_host: Iterable[str]) -> dict[str, str]:
    """Return the device of each operation, by name, before Grappler rewrites them.

    Args:
        operations: of the step.
        definitions: their `NodeDef`s, by name.
        on_host: names of those that the caller has on the host: the batch.
    """
    kept = frozenset(on_host)
    handles: dict[str, str] = {}  # operation → where the handle of the variable that it works on comes from
    without: set[str] = set()  # handles whose variable some operation on the CPU works on
    for operation in operations:
        given = [each.op.name for each in operation.inputs if each.dtype.name == "resource"]
        if given or any(each.dtype.name == "resource" for each in operation.outputs):
            handles[operation.name] = handles.get(given[0], given[0]) if given else operation.name
    placed = {
        each.name: each.name not in kept and not place(each, definitions[each.name]).on_host for each in operations
    }
    without = {handle for name, handle in handles.items() if not placed[name]}
    return {name: CPU if not is_on or handles.get(name) in without else GPU for name, is_on in placed.items()}


def on_card(program: Program, places: Mapping[str, Place]) -> Program:
    """Return the program with each tensor in its memory, and the copies between the two.

    Args:
        program: the step, loops unrolled.
        places: where operations run, by name; the card for those that are missing.
    """
    nodes: list[Node] = []
    for node in program.nodes:
        at = places.get(node.name, _CARD)
        outputs = tuple(
            replace(each, on_host=at.on_host or number in at.outputs or each.dtype == "string")
            for number, each in enumerate(node.outputs)
        )
        attributes = {**node.attributes, ON_HOST: True} if at.on_host else node.attributes
        nodes.append(replace(node, outputs=outputs, attributes=attributes))
    copies: dict[tuple[int, int], int] = {}
    for number, node in enumerate(program.nodes):
        at = places.get(node.name, _CARD)
        inputs = tuple(
            source if taken >= at.declared else _copied(nodes, copies, source, at.on_host or taken in at.inputs)
            for taken, source in enumerate(node.inputs)
        )
        if inputs != node.inputs:
            nodes[number] = replace(nodes[number], inputs=inputs)
    host = {node.variable for node in nodes if node.type == "VarHandleOp" and ON_HOST in node.attributes}
    variables = tuple(
        replace(each, bytes=0) if number in host else each for number, each in enumerate(program.variables)
    )
    return replace(program, nodes=tuple(nodes), variables=variables)


def _copied(
    nodes: list[Node], copies: dict[tuple[int, int], int], source: tuple[int, int], on_host: bool
) -> tuple[int, int]:
    """Return the tensor in the memory where it is wanted."""
    node = nodes[source[0]]
    made: Tensor = node.outputs[source[1]]
    if made.on_host == on_host or made.dtype in _NAMES_ONLY:
        return source
    if source not in copies:
        copies[source] = len(nodes)
        nodes.append(Node(node.name, COPY, (source,), (), (replace(made, on_host=on_host),), {}))
    return copies[source], 0


def host_bytes(program: Program) -> int:
    """Return the bytes of all tensors of a step that lie in the host's memory; no more than that is there at once."""
    return sum(each.bytes or 0 for node in program.nodes for each in node.outputs if each.on_host)
