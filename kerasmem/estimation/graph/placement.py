"""Which operations of a step run on a card, which on the CPU beside it, and in whose memory each tensor lies.

TensorFlow puts an operation on the card where it has a kernel for GPUs that takes its dtypes, with all others on the
same variable (tensorflow/core/common_runtime/placer.cc). Some of those kernels keep inputs or outputs, such as shapes
and most numbers of 32-bit integers, in the host's memory. Where an operation wants a tensor in the other memory, it is
copied, once for all that want it there (tensorflow/core/graph/graph_partition.cc, common_runtime/memory_types.cc).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kerasmem.compat.graphs import GPU, GpuKernel, gpu_kernels
from kerasmem.compat.xla import CPU
from kerasmem.estimation.graph.program import COPY, ON_HOST, Node, Program, Tensor

_NAMES_ONLY = ("resource", "variant")  # dtypes of what stands for something elsewhere; it is not copied


class Placement(NamedTuple):
    """The device of an operation, and the inputs and outputs that it keeps in the host's memory.

    Attributes:
        on_host: whether it runs on the CPU. All inputs and outputs are then in the host's memory.
        inputs: numbers of the inputs in the host's memory.
        outputs: numbers of the outputs in the host's memory.
        declared: number of inputs in TensorFlow; further ones stand for the contents of a list.
    """

    on_host: bool
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    declared: int = 1 << 30


_HOST, _CARD = Placement(True), Placement(False)
KernelsOf = Callable[[str], tuple[GpuKernel, ...]]


def placement_of(operation: Any, definition: Any, kernels: KernelsOf = gpu_kernels) -> Placement:
    """Return the placement of an operation by TensorFlow's kernels; a device that it already has is kept.

    Args:
        operation: a `tf.Operation`.
        definition: its `NodeDef`.
        kernels: those for GPUs, by operation.
    """
    if "CPU" in definition.device:
        return _HOST
    kernel = _kernel(definition, kernels)
    if kernel is None:
        return _HOST
    declared, described = len(operation.inputs), operation.op_def
    if not kernel.host:
        return Placement(False, declared=declared)
    inputs = _numbers(described.input_arg, definition, kernel.host)
    return Placement(False, inputs, _numbers(described.output_arg, definition, kernel.host), declared)


def _kernel(definition: Any, kernels: KernelsOf) -> GpuKernel | None:
    """Return the GPU kernel for an operation's dtypes, or None."""
    candidates = kernels(definition.op)
    label = definition.attr["_kernel"].s.decode() if "_kernel" in definition.attr else ""
    dtypes: dict[str, tuple[int, ...]] = {}
    for name in {name for kernel in candidates for name in kernel.dtypes}:
        value = definition.attr[name]
        dtypes[name] = tuple(value.list.type) if value.HasField("list") else (value.type,)
    matching = [
        kernel
        for kernel in candidates
        if kernel.label == label and all(allowed.issuperset(dtypes[name]) for name, allowed in kernel.dtypes.items())
    ]
    return max(matching, key=lambda kernel: kernel.rank, default=None)


def _numbers(arguments: Iterable[Any], definition: Any, names: frozenset[str]) -> frozenset[int]:
    """Return the numbers of the inputs, or of the outputs, that have these names."""
    numbers: set[int] = set()
    first = 0
    for argument in arguments:
        count = 1
        if argument.number_attr:
            count = definition.attr[argument.number_attr].i
        elif argument.type_list_attr:
            count = len(definition.attr[argument.type_list_attr].list.type)
        if argument.name in names:
            numbers.update(range(first, first + count))
        first += count
    return frozenset(numbers)


def devices(operations: Sequence[Any], definitions: Mapping[str, Any], on_host: Iterable[str]) -> dict[str, str]:
    """Return the device of each operation, by name, before Grappler rewrites them.

    Args:
        operations: of the step.
        definitions: their `NodeDef`s, by name.
        on_host: names of those that the caller has on the host: the batch.
    """
    batch = frozenset(on_host)
    origins: dict[str, str] = {}  # operation on a variable → the operation that its handle comes from
    is_on_card: dict[str, bool] = {}
    for operation in operations:
        name = operation.name
        handles = [tensor.op.name for tensor in operation.inputs if tensor.dtype.name == "resource"]
        if handles:
            origins[name] = origins.get(handles[0], handles[0])
        elif any(tensor.dtype.name == "resource" for tensor in operation.outputs):
            origins[name] = name
        is_on_card[name] = name not in batch and not placement_of(operation, definitions[name]).on_host
    # A variable is on the CPU if one of its operations is.
    on_host_handles = {origin for name, origin in origins.items() if not is_on_card[name]}
    return {
        name: GPU if is_on and origins.get(name) not in on_host_handles else CPU for name, is_on in is_on_card.items()
    }


def on_card(program: Program, placements: Mapping[str, Placement]) -> Program:
    """Return the program with each tensor in its memory, and the copies between the two.

    Args:
        program: the step, loops unrolled.
        placements: of operations, by name. Defaults to the card.
    """
    nodes: list[Node] = []
    for node in program.nodes:
        at = placements.get(node.name, _CARD)
        outputs = tuple(
            replace(each, on_host=at.on_host or number in at.outputs or each.dtype == "string")
            for number, each in enumerate(node.outputs)
        )
        attributes = {**node.attributes, ON_HOST: True} if at.on_host else node.attributes
        nodes.append(replace(node, outputs=outputs, attributes=attributes))
    copies: dict[tuple[int, int], int] = {}
    for number, node in enumerate(program.nodes):
        at = placements.get(node.name, _CARD)
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
