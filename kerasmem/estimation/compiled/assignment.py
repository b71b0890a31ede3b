"""XLA's buffer assignment, read from a serialised `HloProto`.

`data/hlo.txtpb` has the messages of `xla/service/hlo.proto` and `xla/xla_data.proto`: no package has their classes.
"""

from __future__ import annotations

import functools
import math
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, message_factory, text_format
from google.protobuf.message import DecodeError

from kerasmem.estimation.compiled.plan import XlaPlan

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
