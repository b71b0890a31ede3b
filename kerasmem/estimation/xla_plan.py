"""XLA's memory plan of a step, read from its buffer assignment, by category and layer.

No package has the classes of `xla/service/hlo.proto` and `xla/xla_data.proto`; `data/hlo.txtpb` has their messages.
"""

from __future__ import annotations

import functools
import math
import pkgutil
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf import descriptor_pb2, message_factory, text_format
from google.protobuf.message import DecodeError

from kerasmem.estimation.allocator import BFCAllocator
from kerasmem.estimation.report import Outcome, Shares
from kerasmem.models.op_names import CATEGORIES, Attribution, Origin
from kerasmem.units import MIB

_FUNCTION = re.compile(r"\bp?jit\([^()]*\)")
_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|remat)\(")
HOPPER = (9, 0)  # compute capability
_HOPPER_WORKSPACE, _CUBLAS_WORKSPACE = 32 * MIB, 4 * MIB

Weights = Mapping[str, Sequence[tuple[int, str | None]]]  # by group: each weight's bytes and the row that counts it
ArgumentShares = Iterable[tuple[int, str, str | None]]  # bytes, category and layer of each argument


class JaxNames(Attribution):
    """Looks up the origin of operations by the names that JAX gives them.

    JAX wraps a layer's scope in its transformations: `jvp(conv1)` in the forward pass, `transpose(jvp(conv1))` in the
    backward pass. The last part is the operation, and `jit(relu)` a function of JAX; neither is a layer.

    Args:
        layers: names of the model's layers.
        optimizer: the optimizer's name, or None for inference.
        rows: names of the report's rows. Defaults to the whole path of each layer.

    Examples:
        >>> names = JaxNames({"encoder", "dense"}, "adam")
        >>> names.origin("jit(train_step)/transpose(jvp(encoder))/dense/dot_general")
        Origin(layer='encoder/dense', phase='backward')
    """

    def __init__(self, layers: Collection[str], optimizer: str | None = None, rows: Collection[str] = ()) -> None:
        super().__init__({}, rows, () if optimizer is None else (optimizer,))
        self.layers = frozenset(layers)

    def origin(self, name: str) -> Origin:
        """Return the origin of the operation of this name."""
        scopes = _FUNCTION.sub("", name.rpartition("/")[0])
        pieces = _WRAPPER.sub("", scopes).replace(")", "").split("/")
        if any(map(self._is_optimizer, pieces)):
            return Origin(None, "optimizer")
        layers = [piece for piece in pieces if piece in self.layers]
        paths = ("/".join(layers[:end]) for end in range(len(layers), 0, -1))
        row = next((path for path in paths if not self._rows or path in self._rows), None)
        return Origin(row, "backward" if "transpose(" in name else "forward")

    def short_name(self, name: str) -> str:
        """Return the operation, the last part of the name."""
        return name.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class XlaPlan:
    """XLA's plan of one compilation.

    Attributes:
        argument: bytes of the arguments.
        results: bytes of each returned buffer, except donated arguments.
        temporary: bytes of the temporary buffers.
        live: temporary buffers in use at their peak: (bytes, operation that made it), in no order.
        at: the operation that runs at that peak, if known.
        convolutions: bytes of inputs and outputs, and operation, of each cuDNN convolution without workspace in the
            plan.
        products: for each matrix product, bytes of the buffers that it needs in cuBLAS but not in a Triton kernel.
        is_recomputed: whether XLA recomputes values to save memory.
    """

    argument: int
    results: tuple[int, ...]
    temporary: int
    live: tuple[tuple[int, str], ...] = ()
    at: str | None = None
    convolutions: tuple[tuple[int, str], ...] = ()
    products: tuple[int, ...] = ()
    is_recomputed: bool = False

    @property
    def requested(self) -> int:
        """Bytes that the step requests from its allocator, without the arguments."""
        return self.temporary + sum(self.results)

    @property
    def total(self) -> int:
        """Bytes of the plan, arguments included."""
        return self.argument + self.requested

    def divide(self, outcome: Outcome, arguments: ArgumentShares, names: Attribution) -> Outcome:
        """Return the plan's outcome, with the peak by category and layer.

        Args:
            outcome: the outcome.
            arguments: bytes, category and layer of each argument.
            names: origins of the plan's operations.
        """
        shares = Shares()
        for size, category, layer in arguments:
            shares.add(size, category, layer)
        for size, name in self.live:
            origin = names.origin(name)
            shares.add(size, CATEGORIES[origin.phase], origin.layer)
        shares.add(self.requested - sum(size for size, _ in self.live), "workspace")
        shares.fill(outcome.total)
        instant = None if self.at is None else names.instant(self.at)
        return replace(outcome, **shares.categories, layers=shares.layers, instant=instant)


def product_bytes(plans: Iterable[XlaPlan], capability: tuple[int, int]) -> int:
    """Return the further bytes of the fastest kernels of matrix products.

    A product that is planned for Triton may run in cuBLAS, which needs buffers for operands and results, and a
    workspace. That is 32 MiB from Hopper on (`GemmConfig::kHopperWorkspace`), though plans without the card have 4 MiB
    (`CublasLtBackend::GetDefaultConfig`); on older cards it is 4 MiB. Products run one after another.
    """
    products = [size for plan in plans for size in plan.products]
    workspace = _HOPPER_WORKSPACE if capability >= HOPPER else _CUBLAS_WORKSPACE
    return max(products) + workspace if products else 0


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A step compiled on JAX, with one plan or several.

    Attributes:
        arguments: bytes of each argument by group: "trainable", "non_trainable", "optimizer", "metrics", "inputs".
        plans: plans within the device's memory. The first is XLA's default.
        unlimited: plans without that limit, if they differ.
        layers: names of the model's layers.
        optimizer: the optimizer's name, or None for inference.
        notes: assumptions about the training.
    """

    arguments: Mapping[str, tuple[int, ...]]
    plans: tuple[XlaPlan, ...]
    unlimited: tuple[XlaPlan, ...] = ()
    layers: tuple[str, ...] = ()
    optimizer: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def likely(self) -> XlaPlan:
        """XLA's default plan."""
        return self.plans[0]

    def requests(self, plan: XlaPlan) -> list[tuple[int, int]]:
        """Return a plan's requests to the allocator in order: a number and bytes."""
        groups = ("trainable", "non_trainable", "metrics", "optimizer", "inputs")
        sizes = [size for group in groups for size in self.arguments.get(group, ())]
        sizes += [size for size in (sum(plan.results), plan.temporary) if size > 0]
        return list(enumerate(sizes))

    def allocate(self, plan: XlaPlan) -> BFCAllocator:
        """Simulate all requests of a plan and return the allocator."""
        allocator = BFCAllocator()
        for _, size in self.requests(plan):
            allocator.allocate(size)
        return allocator

    def argument_shares(self, weights: Weights) -> ArgumentShares:
        """Yield the bytes, category and row of each argument.

        Args:
            weights: bytes and rows of the model's weights, by group. A group of other sizes than the step's has no
                rows.
        """
        for group, sizes in self.arguments.items():
            category = group if group in ("optimizer", "inputs") else "weights"
            group_weights = weights.get(group, ())
            is_same = [size for size, _ in group_weights] == list(sizes)
            rows = [row for _, row in group_weights] if is_same else [None] * len(sizes)
            for size, row in zip(sizes, rows, strict=True):
                yield size, category, row


_ALLOCATED, _FREED = 0, 1  # kinds of events in a trace of the heap
_CONVOLUTION, _PRODUCT = "__cudnn$conv", "__cublas$"
_RECOMPUTED = ".remat"
_BYTES_OF_TYPE = {
    **dict.fromkeys((1, 2, 6, 19, 20, 23, 24, 25, 28, 29, 33), 1),  # PRED, S8, U8, F8…
    **dict.fromkeys((3, 7, 10, 16), 2),  # S16, U16, F16, BF16
    **dict.fromkeys((4, 8, 11), 4),  # S32, U32, F32
    **dict.fromkeys((5, 9, 12, 15), 8),  # S64, U64, F64, C64
    18: 16,  # C128
    **dict.fromkeys((21, 22), 0.5),  # S4, U4
}


Instruction = Any  # a message of XLA's optimised module
Computation = dict[int, Instruction]  # by id


@functools.cache
def _message_class() -> Any:
    """Return the class of `HloProto`."""
    text = pkgutil.get_data("kerasmem.estimation", "data/hlo.txtpb") or b""
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    return message_factory.GetMessages([file])["kerasmem.HloProto"]


def read_plan(serialised: bytes) -> XlaPlan:
    """Read the plan of a serialised `HloProto`.

    Raises:
        DecodeError: If the message is truncated.
    """
    proto = _message_class().FromString(serialised)
    if not proto.HasField("buffer_assignment"):
        raise DecodeError("the message has no buffer assignment")
    assignment = proto.buffer_assignment
    computations = {
        computation.id: {instruction.id: instruction for instruction in computation.instructions}
        for computation in proto.hlo_module.computations
    }
    instructions = [(inside, instruction) for inside in computations.values() for instruction in inside.values()]
    buffers = [buffer for buffer in assignment.buffer_allocations if not (buffer.is_thread_local or buffer.is_constant)]
    own = [buffer for buffer in buffers if not buffer.is_entry_computation_parameter]
    live, at = _peak_contents(assignment, _operations(computations))
    return XlaPlan(
        argument=sum(buffer.size for buffer in buffers if buffer.is_entry_computation_parameter),
        results=tuple(buffer.size for buffer in own if buffer.maybe_live_out),
        temporary=sum(buffer.size for buffer in own if not buffer.maybe_live_out),
        live=live,
        at=at,
        convolutions=tuple(_convolutions(instructions)),
        products=tuple(_products(instructions)),
        is_recomputed=any(_RECOMPUTED in instruction.name for _, instruction in instructions),
    )


def _peak_contents(assignment: Any, names: Mapping[int, str]) -> tuple[tuple[tuple[int, str], ...], str | None]:
    """Replay XLA's longest heap trace. Return the contents and operation at its peak.

    Args:
        assignment: XLA's buffer assignment.
        names: operations by the ids of their instructions.
    """
    buffers = {buffer.id: buffer for buffer in assignment.logical_buffers}
    events: Sequence[Any] = max((trace.events for trace in assignment.heap_simulator_traces), key=len, default=[])
    live: dict[int, int] = {}
    total = peak = 0
    contents: dict[int, int] = {}
    at: int | None = None
    for event in events:
        if event.kind == _ALLOCATED:
            live[event.buffer_id] = buffers[event.buffer_id].size
            total += live[event.buffer_id]
        elif event.kind == _FREED:
            total -= live.pop(event.buffer_id, 0)
        if total > peak:
            peak, contents, at = total, dict(live), event.buffer_id

    def maker(buffer: int) -> str:
        return names.get(buffers[buffer].defined_at.instruction_id, "")

    return tuple((size, maker(buffer)) for buffer, size in contents.items()), None if at is None else maker(at)


def _operations(computations: Mapping[int, Computation]) -> dict[int, str]:
    """Return the operation of each instruction, by id.

    For a fusion it is that of the last inner instruction that has one; for an instruction that XLA added, that of an
    operand.
    """
    names: dict[int, str] = {}
    for computation in computations.values():
        for number, instruction in computation.items():  # operands come first
            parts = [part for called in instruction.called_computation_ids for part in computations[called].values()]
            inside = [part.metadata.op_name for part in parts]
            operands = [names.get(operand, "") for operand in instruction.operand_ids]
            candidates = (instruction.metadata.op_name, *reversed(inside), *operands)
            names[number] = next(filter(None, candidates), "")
    return names


def _convolutions(instructions: Iterable[tuple[Computation, Instruction]]) -> Iterator[tuple[int, str]]:
    """Yield the bytes and operation of each cuDNN convolution without workspace."""
    for computation, instruction in instructions:
        if instruction.custom_call_target.startswith(_CONVOLUTION):
            *results, workspace = _sizes(instruction.shape)
            operands = [_bytes(computation[number]) for number in instruction.operand_ids]
            if workspace == 0:
                yield sum((*results, *operands)), instruction.metadata.op_name or instruction.name


def _products(instructions: Iterable[tuple[Computation, Instruction]]) -> Iterator[int]:
    """Yield the bytes of each matrix product that have no buffer in Triton.

    A Triton kernel computes operands while it reads them and transforms the result before it writes it. cuBLAS reads
    operands from buffers and writes the plain product to another.
    """
    for computation, instruction in instructions:
        if instruction.custom_call_target.startswith(_PRODUCT):
            yield 0
        elif instruction.opcode == "dot":
            operands = [_source(computation, computation[number]) for number in instruction.operand_ids]
            inside = [operand for operand in operands if operand.opcode != "parameter"]
            root = _source(computation, list(computation.values())[-1])
            yield sum(map(_bytes, (*inside, *[instruction] * (root.id != instruction.id))))


def _source(computation: Computation, instruction: Instruction) -> Instruction:
    """Return the instruction behind bitcasts, which share its buffer."""
    while instruction.opcode == "bitcast":
        instruction = computation[instruction.operand_ids[0]]
    return instruction


def _bytes(instruction: Instruction) -> int:
    return sum(_sizes(instruction.shape))


def _sizes(shape: Any) -> Iterator[int]:
    """Yield the bytes of a shape, or of each element of a tuple."""
    for element in shape.tuple_shapes:
        yield from _sizes(element)
    if not shape.tuple_shapes:
        yield math.ceil(math.prod(shape.dimensions) * _BYTES_OF_TYPE.get(shape.element_type, 0))
