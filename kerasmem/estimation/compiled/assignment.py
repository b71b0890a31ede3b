"""XLA's buffer assignment, read from a serialised `HloProto`. Pure.

Fields are numbered as in `xla/service/hlo.proto` and `xla/xla_data.proto`. They are read without Google's protobuf,
which Keras on JAX does not install, and without TensorFlow's classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from kerasmem.estimation.compiled.plan import XlaPlan

_ALLOCATED, _FREED = 0, 1  # kinds of events in a trace of the heap
_CONVOLUTION, _PRODUCT = "__cudnn$conv", "__cublas$"
_RECOMPUTED = ".remat"
_LIBRARY = re.compile(r'"kind":"__(?:ynn|xnn|onednn)')  # kernels of a library on a CPU
_BYTES_OF_TYPE = {
    **dict.fromkeys((1, 2, 6, 19, 20, 23, 24, 25, 28, 29, 33), 1),  # PRED, S8, U8, F8…
    **dict.fromkeys((3, 7, 10, 16), 2),  # S16, U16, F16, BF16
    **dict.fromkeys((4, 8, 11), 4),  # S32, U32, F32
    **dict.fromkeys((5, 9, 12, 15), 8),  # S64, U64, F64, C64
    18: 16,  # C128
    **dict.fromkeys((21, 22), 0.5),  # S4, U4
}


class Message:
    """A message in protobuf's wire format.

    Raises:
        IndexError: it ends too early.
    """

    def __init__(self, data: bytes = b"") -> None:
        self._values: dict[int, list[Any]] = {}  # by field: an int, or bytes of a text or of a message inside
        position = 0
        while position < len(data):
            key, position = _varint(data, position)
            number, kind = key >> 3, key & 7
            value: Any
            if kind == 0:
                value, position = _varint(data, position)
            else:
                size, position = _varint(data, position) if kind == 2 else ({1: 8, 5: 4}[kind], position)
                value = data[position : position + size]
                position += size
            if position > len(data):
                raise IndexError(f"{position - len(data)} bytes of field {number} are missing")
            self._values.setdefault(number, []).append(value)

    def number(self, field: int) -> int:
        """Return a number, 0 if it is not set."""
        value = int(self._values.get(field, [0])[-1])
        return value - (1 << 64) if value >> 63 else value

    def text(self, field: int) -> str:
        """Return a text, "" if it is not set."""
        return str(self._values.get(field, [b""])[-1], "utf-8", "replace")

    def messages(self, field: int) -> list[Message]:
        """Return a repeated message."""
        return [Message(data) for data in self._values.get(field, ())]

    def message(self, field: int) -> Message:
        """Return a message, an empty one if it is not set."""
        return Message(*self._values.get(field, [])[-1:])

    def numbers(self, field: int) -> list[int]:
        """Return a repeated number, packed or not."""
        numbers: list[int] = []
        for value in self._values.get(field, ()):
            position = 0
            while not isinstance(value, int) and position < len(value):
                number, position = _varint(value, position)
                numbers.append(number)
            if isinstance(value, int):
                numbers.append(value)
        return numbers


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


class Instruction:
    """An instruction of the optimised module.

    Attributes:
        message: XLA's.
        name: XLA's.
        opcode: XLA's.
        operation: the name that the program gave it, or "".
        target: of a custom call, or "".
        shapes: bytes of its result, of each element of a tuple.
        operands: ids of the instructions it takes from.
        called: ids of the computations it calls.
    """

    def __init__(self, message: Message) -> None:
        self.message = message
        self.name, self.opcode, self.target = (message.text(field) for field in (1, 2, 28))
        self.operation = message.message(7).text(2)
        self.shapes = tuple(_shape_bytes(message.message(3)))
        self.operands, self.called = message.numbers(36), message.numbers(38)

    @property
    def dimensions(self) -> list[int]:
        """The sizes of its result."""
        return self.message.message(3).numbers(3)


def read_plan(serialised: bytes) -> XlaPlan:
    """Return the plan in a serialised `HloProto`.

    Raises:
        IndexError: it is cut off within a part.
        ValueError: it is cut off between parts.
    """
    proto = Message(serialised)
    (assignment,), (hlo,) = proto.messages(3), proto.messages(1)
    buffers = assignment.messages(3)
    own = [buffer for buffer in buffers if not any(map(buffer.number, (3, 5, 12)))]  # thread-local, argument, constant
    module = _Module(hlo)
    live, at = _fullest(assignment, module)
    return XlaPlan(
        argument=sum(buffer.number(2) for buffer in buffers if buffer.number(5)),
        results=tuple(buffer.number(2) for buffer in own if buffer.number(7)),
        temporary=sum(buffer.number(2) for buffer in own if not buffer.number(7)),
        live=live,
        at=at,
        convolutions=tuple(module.convolutions()),
        products=tuple(module.products()),
        is_recomputed=any(_RECOMPUTED in instruction.name for _, instruction in module),
        cpu_scratch=module.cpu_scratch(),
    )


def _fullest(assignment: Message, module: _Module) -> tuple[tuple[tuple[int, str], ...], str | None]:
    """Replay XLA's longest trace of a heap, and return the heap's contents at its peak."""
    buffers = {buffer.number(1): buffer for buffer in assignment.messages(1)}
    events = max((trace.messages(1) for trace in assignment.messages(4)), key=len, default=[])
    live: dict[int, int] = {}
    total = most = 0
    fullest: dict[int, int] = {}
    at: int | None = None
    for event in events:
        kind, buffer = event.number(1), event.number(2)
        if kind == _ALLOCATED:
            live[buffer] = buffers[buffer].number(2)
            total += live[buffer]
        elif kind == _FREED:
            total -= live.pop(buffer, 0)
        if total > most:
            most, fullest, at = total, dict(live), buffer

    names = module.operations()

    def maker(buffer: int) -> str:
        location = buffers[buffer].message(3)
        name = location.text(2)  # newer versions of XLA have the id alone
        return names.get(name) or names.get(location.number(4)) or name

    return tuple((size, maker(buffer)) for buffer, size in fullest.items()), None if at is None else maker(at)


class _Module:
    """The instructions of an `HloModuleProto`, by computation."""

    def __init__(self, hlo: Message) -> None:
        self.computations = {
            computation.number(5): {part.number(35): Instruction(part) for part in computation.messages(2)}
            for computation in hlo.messages(3)
        }

    def __iter__(self) -> Iterator[tuple[dict[int, Instruction], Instruction]]:
        """Yield each instruction with its computation."""
        for computation in self.computations.values():
            for instruction in computation.values():
                yield computation, instruction

    def operations(self) -> dict[int | str, str]:
        """Return each instruction's operation, by id and by name.

        A fusion has that of the last instruction inside with one; an instruction that XLA added that of an operand.
        """
        names: dict[int | str, str] = {}
        for computation in self.computations.values():
            of_number: dict[int, str] = {}
            for number, instruction in computation.items():  # operands come first
                parts = [part for called in instruction.called for part in self.computations[called].values()]
                inside = [part.operation for part in parts]
                operands = [of_number.get(operand, "") for operand in instruction.operands]
                candidates = (instruction.operation, *reversed(inside), *operands)
                of_number[number] = names[number] = names[instruction.name] = next(filter(None, candidates), "")
        return names

    def convolutions(self) -> Iterator[tuple[int, str]]:
        """Yield each convolution of cuDNN's without workspace: bytes of its inputs and outputs, and its operation."""
        for computation, instruction in self:
            if instruction.target.startswith(_CONVOLUTION) and instruction.shapes[-1] == 0:
                operands = [sum(computation[number].shapes) for number in instruction.operands]
                yield sum((*instruction.shapes, *operands)), instruction.operation or instruction.name

    def cpu_scratch(self) -> int:
        """Return the most bytes that one call of a library's kernel on a CPU may copy beside the plan.

        A convolution may be a matrix product of a copy that has, for each position of the output, the part of the input
        it is made of ("im2col"). YNNPACK makes that copy, or a smaller one, in JAX 0.10; in 0.12 it copies the result
        alone. A matrix product may copy its operand and its result into blocks. Weights are copied block by block.
        """
        most = 0
        for _, caller in self:
            if _LIBRARY.search(caller.message.text(43)) is None:
                continue
            for number in caller.called:
                inside = self.computations[number]
                for instruction in inside.values():
                    operands = [inside[operand] for operand in instruction.operands]
                    if instruction.opcode == "dot":
                        most = max(most, sum(operands[0].shapes) + sum(instruction.shapes))
                    elif instruction.opcode == "convolution":
                        most = max(most, _patches_bytes(instruction, operands[1]) + sum(instruction.shapes))
        return most

    def products(self) -> Iterator[int]:
        """Yield for each matrix product the bytes of its tensors that have no buffer in a kernel of Triton's.

        Such a kernel computes operands while it reads them and goes on with the result before it writes. cuBLAS reads
        operands from buffers and writes the product itself to another.
        """
        for computation, instruction in self:
            if instruction.target.startswith(_PRODUCT):
                yield 0
            elif instruction.opcode == "dot":
                operands = [_source(computation, computation[number]) for number in instruction.operands]
                inside = [operand for operand in operands if operand.opcode != "parameter"]
                root = _source(computation, list(computation.values())[-1])
                yield sum(sum(part.shapes) for part in (*inside, *[instruction] * (root != instruction)))


def _source(computation: dict[int, Instruction], instruction: Instruction) -> Instruction:
    """Return the instruction behind bitcasts, which only rename its buffer."""
    while instruction.opcode == "bitcast":
        instruction = computation[instruction.operands[0]]
    return instruction


def _patches_bytes(convolution: Instruction, kernel: Instruction) -> int:
    """Return the bytes of a convolution's input written out by position, or 0 if it reads one channel at a time."""
    numbers, groups = convolution.message.message(16), convolution.message.number(50)
    if groups > 1 and kernel.dimensions[numbers.number(3)] == 1:
        return 0
    positions = math.prod(convolution.dimensions) // convolution.dimensions[numbers.number(10)]
    return positions * sum(kernel.shapes) // kernel.dimensions[numbers.number(4)] * max(groups, 1)


def _shape_bytes(shape: Message) -> Iterator[int]:
    """Yield the bytes of a shape, or of each element of a tuple."""
    elements = shape.messages(4)
    for element in elements:
        yield from _shape_bytes(element)
    if not elements:
        yield math.ceil(math.prod(shape.numbers(3)) * _BYTES_OF_TYPE.get(shape.number(2), 0))
