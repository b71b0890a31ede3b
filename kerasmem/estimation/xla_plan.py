"""XLA's plan of a step: read from its buffer assignment, and its memory by category and layer. Pure.

`data/hlo.txtpb` has the messages of `xla/service/hlo.proto` and `xla/xla_data.proto`: no package has their classes.
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
Held = Iterable[tuple[int, str, str | None]]  # bytes, category and layer of what a step holds from beginning to end


class JaxNames(Attribution):
    """Looks up the origin of operations by the names that JAX gives them.

    JAX wraps the scope of a layer's call in what is done to it: `jvp(conv1)` going forward, `transpose(jvp(conv1))`
    going back. The last part is the operation itself, and `jit(relu)` a function of JAX's: neither is a layer.

    Args:
        layers: the names of the model's layers.
        optimizer: the optimizer's name; None for inference.
        rows: the names of the layers in the report; without any, a layer's whole path is its row.

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
        """Return the operation itself, the last part of the name."""
        return name.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class XlaPlan:
    """XLA's plan of one compilation.

    Attributes:
        argument: bytes of the arguments.
        results: bytes of each buffer that the step returns and that no argument lends.
        temporary: bytes of the buffers in between.
        live: the temporary buffers when most of them are in use: (bytes, the operation that made it), in no order.
        at: the operation that runs then.
        convolutions: for each of cuDNN's convolutions without workspace in the plan the bytes of its inputs and
            outputs, and its operation.
        products: for each matrix product the bytes of buffers that it has in cuBLAS and not in a kernel of Triton's.
        is_recomputed: whether XLA computes values a second time to save memory.
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
        """The bytes that the step asks its allocator for, beside the arguments."""
        return self.temporary + sum(self.results)

    @property
    def total(self) -> int:
        """The bytes of the step by this plan."""
        return self.argument + self.requested

    def divided(self, outcome: Outcome, held: Held, names: Attribution) -> Outcome:
        """Return the outcome of this plan with its peak divided by category and by layer.

        Args:
            outcome: the outcome.
            held: the arguments.
            names: origins of the operations in the plan.
        """
        shares = Shares()
        for size, category, layer in held:
            shares.add(size, category, layer)
        for size, name in self.live:
            origin = names.origin(name)
            shares.add(size, CATEGORIES[origin.phase], origin.layer)
        shares.add(self.requested - sum(size for size, _ in self.live), "workspace")
        shares.fill(outcome.total)
        instant = None if self.at is None else names.instant(self.at)
        return replace(outcome, **shares.categories, layers=shares.layers, instant=instant)


def product_bytes(plans: Iterable[XlaPlan], capability: tuple[int, int]) -> int:
    """Return the most bytes that a matrix product may take beside the plans if XLA chooses the fastest kernel.

    One that is planned for Triton may run in cuBLAS, with buffers for operands and results that the kernel kept to
    itself. cuBLAS has a workspace: 32 MiB from Hopper on (`GemmConfig::kHopperWorkspace`), where plans without the card
    have 4 MiB (`CublasLtBackend::GetDefaultConfig`), as everywhere before. Products run one after another.
    """
    products = [size for plan in plans for size in plan.products]
    workspace = _HOPPER_WORKSPACE if capability >= HOPPER else _CUBLAS_WORKSPACE
    return max(products) + workspace if products else 0


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A step that was compiled on JAX, once or in variants.

    Attributes:
        arguments: sizes in bytes of the step's arguments on a device, by group: "trainable", "non_trainable",
            "optimizer", "metrics", "inputs".
        plans: the compilations within the device's memory; the first is the one that XLA makes by itself.
        unlimited: the same without that limit, if it changes them.
        layers: the names of the model's layers.
        optimizer: the optimizer's name; None for inference.
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
        """The plan that XLA makes by itself."""
        return self.plans[0]

    def requests(self, plan: XlaPlan) -> list[tuple[int, int]]:
        """Return a plan's requests to the allocator, one after another: a number and bytes."""
        groups = ("trainable", "non_trainable", "metrics", "optimizer", "inputs")
        sizes = [size for group in groups for size in self.arguments.get(group, ())]
        sizes += [size for size in (sum(plan.results), plan.temporary) if size > 0]
        return list(enumerate(sizes))

    def allocated(self, plan: XlaPlan) -> BFCAllocator:
        """Return the allocator after all requests of a plan."""
        allocator = BFCAllocator()
        for _, size in self.requests(plan):
            allocator.allocate(size)
        return allocator

    def held(self, weights: Weights) -> Held:
        """Yield the arguments: bytes, category, and the row that counts them.

        Args:
            weights: of the model, in its order; a group that the step has otherwise belongs to no row.
        """
        for group, sizes in self.arguments.items():
            category = group if group in ("optimizer", "inputs") else "weights"
            of_model = weights.get(group, ())
            is_same = [size for size, _ in of_model] == list(sizes)
            rows = [row for _, row in of_model] if is_same else [None] * len(sizes)
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


Instruction = Any  # of XLA's optimised module: a message, whose class is made from `data/hlo.txtpb`
Computation = dict[int, Instruction]  # by id


@functools.cache
def _message_class() -> Any:
    """Return the class of `HloProto`."""
    text = pkgutil.get_data("kerasmem.estimation", "data/hlo.txtpb") or b""
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    return message_factory.GetMessages([file])["kerasmem.HloProto"]


def read_plan(serialised: bytes) -> XlaPlan:
    """Return the plan in a serialised `HloProto`.

    Raises:
        DecodeError: If it is cut off.
    """
    proto = _message_class().FromString(serialised)
    if not proto.HasField("buffer_assignment"):
        raise DecodeError("it has no buffer assignment")
    assignment = proto.buffer_assignment
    computations = {
        computation.id: {instruction.id: instruction for instruction in computation.instructions}
        for computation in proto.hlo_module.computations
    }
    instructions = [(inside, instruction) for inside in computations.values() for instruction in inside.values()]
    buffers = [buffer for buffer in assignment.buffer_allocations if not (buffer.is_thread_local or buffer.is_constant)]
    own = [buffer for buffer in buffers if not buffer.is_entry_computation_parameter]
    live, at = _fullest(assignment, _operations(computations))
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


def _fullest(assignment: Any, names: Mapping[int, str]) -> tuple[tuple[tuple[int, str], ...], str | None]:
    """Replay XLA's longest trace of a heap, and return the heap's contents at its peak.

    Args:
        assignment: XLA's.
        names: operations by the ids of their instructions.
    """
    buffers = {buffer.id: buffer for buffer in assignment.logical_buffers}
    events: Sequence[Any] = max((trace.events for trace in assignment.heap_simulator_traces), key=len, default=[])
    live: dict[int, int] = {}
    total = most = 0
    fullest: dict[int, int] = {}
    at: int | None = None
    for event in events:
        if event.kind == _ALLOCATED:
            live[event.buffer_id] = buffers[event.buffer_id].size
            total += live[event.buffer_id]
        elif event.kind == _FREED:
            total -= live.pop(event.buffer_id, 0)
        if total > most:
            most, fullest, at = total, dict(live), event.buffer_id

    def maker(buffer: int) -> str:
        return names.get(buffers[buffer].defined_at.instruction_id, "")

    return tuple((size, maker(buffer)) for buffer, size in fullest.items()), None if at is None else maker(at)


def _operations(computations: Mapping[int, Computation]) -> dict[int, str]:
    """Return each instruction's operation, by id.

    A fusion has that of the last instruction inside with one; an instruction that XLA added that of an operand.
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
    """Yield each convolution of cuDNN's without workspace: bytes of its inputs and outputs, and its operation."""
    for computation, instruction in instructions:
        if instruction.custom_call_target.startswith(_CONVOLUTION):
            *results, workspace = _sizes(instruction.shape)
            operands = [_bytes(computation[number]) for number in instruction.operand_ids]
            if workspace == 0:
                yield sum((*results, *operands)), instruction.metadata.op_name or instruction.name


def _products(instructions: Iterable[tuple[Computation, Instruction]]) -> Iterator[int]:
    """Yield for each matrix product the bytes of its tensors that have no buffer in a kernel of Triton's.

    Such a kernel computes operands while it reads them and goes on with the result before it writes. cuBLAS reads
    operands from buffers and writes the product itself to another.
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
    """Return the instruction behind bitcasts: these only rename its buffer."""
    while instruction.opcode == "bitcast":
        instruction = computation[instruction.operand_ids[0]]
    return instruction


def _bytes(instruction: Instruction) -> int:
    """Return the bytes of an instruction's result."""
    return sum(_sizes(instruction.shape))


def _sizes(shape: Any) -> Iterator[int]:
    """Yield the bytes of a shape, or of each element of a tuple."""
    for element in shape.tuple_shapes:
        yield from _sizes(element)
    if not shape.tuple_shapes:
        yield math.ceil(math.prod(shape.dimensions) * _BYTES_OF_TYPE.get(shape.element_type, 0))
