"""XLA's buffer assignment, read from a serialised `HloProto`. Pure.

Fields are numbered as in `xla/service/hlo.proto` and `xla/xla_data.proto`. They are read without Google's protobuf,
which Keras on JAX does not install, and without TensorFlow's classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kerasmem.estimation.compiled.plan import XlaPlan

Fields = dict[int, list[Any]]  # number → values: an int, or bytes of a text or of a message inside

_ALLOCATED, _FREED = 0, 1  # kinds of events in a trace of the heap
_CONVOLUTION, _PRODUCT = "__cudnn$conv", "__cublas$"
_RECOMPUTED = ".remat"
_LIBRARY = re.compile(r'"kind":"__(ynn|xnn|onednn)')  # kernels of a library on a CPU
_BYTES_OF_TYPE = {
    **dict.fromkeys((1, 2, 6, 19, 20, 23, 24, 25, 28, 29, 33), 1),  # PRED, S8, U8, F8…
    **dict.fromkeys((3, 7, 10, 16), 2),  # S16, U16, F16, BF16
    **dict.fromkeys((4, 8, 11), 4),  # S32, U32, F32
    **dict.fromkeys((5, 9, 12, 15), 8),  # S64, U64, F64, C64
    18: 16,  # C128
    **dict.fromkeys((21, 22), 0.5),  # S4, U4
}


@dataclass(frozen=True)
class Instruction:
    """An instruction of the optimised module.

    Attributes:
        name: XLA's.
        opcode: XLA's.
        operation: the name that the program gave it, or "".
        target: of a custom call, or "".
        shapes: bytes of its result, of each element of a tuple.
        operands: ids of the instructions it takes from.
        called: ids of the computations it calls.
        fields: of the message.
    """

    name: str
    opcode: str
    operation: str
    target: str
    shapes: tuple[int, ...]
    operands: tuple[int, ...]
    called: tuple[int, ...]
    fields: Fields


def read_plan(serialised: bytes) -> XlaPlan:
    """Return the plan in a serialised `HloProto`.

    Raises:
        IndexError: it is cut off within a part.
        KeyError: it is cut off between parts.
    """
    proto = _fields(serialised)
    plan = _fields(proto[3][0])
    argument = temporary = 0
    results = []
    for buffer in map(_fields, plan.get(3, ())):
        size, is_argument = _number(buffer, 2), _number(buffer, 5)
        if is_argument:
            argument += size
        elif _number(buffer, 12) or _number(buffer, 3):  # constant, thread-local
            continue
        elif _number(buffer, 7):
            results.append(size)
        else:
            temporary += size
    module = _Module(proto[1][0])
    live, at = _fullest(plan, module)
    return XlaPlan(
        argument=argument,
        results=tuple(results),
        temporary=temporary,
        live=live,
        at=at,
        convolutions=tuple(module.convolutions()),
        products=tuple(module.products()),
        is_recomputed=module.is_recomputed(),
        cpu_scratch=module.cpu_scratch(),
    )


def _fullest(plan: Fields, module: _Module) -> tuple[tuple[tuple[int, str], ...], str | None]:
    """Replay XLA's longest trace of a heap, and return the heap's contents at its peak."""
    buffers = {_number(buffer, 1): buffer for buffer in map(_fields, plan.get(1, ()))}
    traces: list[list[bytes]] = [_fields(trace).get(1, []) for trace in plan.get(4, ())]
    live: dict[int, int] = {}
    total = most = 0
    fullest: dict[int, int] = {}
    at: int | None = None
    longest = max(traces, key=len) if traces else []
    for event in map(_fields, longest):
        kind, buffer = _number(event, 1), _number(event, 2)
        if kind == _ALLOCATED:
            live[buffer] = _number(buffers[buffer], 2)
            total += live[buffer]
        elif kind == _FREED:
            total -= live.pop(buffer, 0)
        if total > most:
            most, fullest, at = total, dict(live), buffer

    def maker(buffer: int) -> str:
        location = _fields(buffers[buffer][3][0])
        return module.operation(_number(location, 4), _text(location, 2))

    return tuple((size, maker(buffer)) for buffer, size in fullest.items()), None if at is None else maker(at)


class _Module:
    """The instructions of a serialised `HloModuleProto`."""

    def __init__(self, serialised: bytes) -> None:
        self.computations: dict[int, dict[int, Instruction]] = {}
        for computation in map(_fields, _fields(serialised).get(3, ())):
            instructions = map(_fields, computation.get(2, ()))
            self.computations[_number(computation, 5)] = {
                _number(each, 35): _instruction(each) for each in instructions
            }

    def operation(self, number: int, name: str) -> str:
        """Return the operation of an instruction, by its name, or by its id alone, as newer versions of XLA have it."""
        return self._operations.get(name) or self._operations.get(number) or name

    @cached_property
    def _operations(self) -> dict[int | str, str]:
        """Each instruction's operation, by id and by name.

        A fusion has that of the last instruction inside with one; an instruction that XLA added that of an operand.
        """
        names: dict[int | str, str] = {}
        for computation in self.computations.values():
            of_number: dict[int, str] = {}
            for number, instruction in computation.items():  # operands come first
                inside = [
                    part.operation for called in instruction.called for part in self.computations[called].values()
                ]
                operands = [of_number.get(operand, "") for operand in instruction.operands]
                candidates = (instruction.operation, *reversed(inside), *operands)
                of_number[number] = names[number] = names[instruction.name] = next(filter(None, candidates), "")
        return names

    def convolutions(self) -> Iterator[tuple[int, str]]:
        """Yield each convolution of cuDNN's without workspace: bytes of its inputs and outputs, and its operation."""
        for computation in self.computations.values():
            for instruction in computation.values():
                if instruction.target.startswith(_CONVOLUTION) and instruction.shapes[-1] == 0:
                    operands = [sum(computation[each].shapes) for each in instruction.operands]
                    yield sum((*instruction.shapes, *operands)), instruction.operation or instruction.name

    def cpu_scratch(self) -> tuple[int, int]:
        """Return the bytes that one call of a library's kernel on a CPU copies beside the plan, and takes at most.

        YNNPACK's convolution is a matrix product of a copy that has, for each place of the output, the part of the
        input it is made of ("im2col"). It makes that copy whole if it takes the input as it is, and none for one
        channel at a time. If the input is padded it makes the padded input, and reads that in place. (XLA's
        `ynn_emitter.cc` defines pad, stencil copy and product; how much each takes was measured.) A matrix product may
        copy its operand and its result into blocks. Weights are copied block by block.
        """
        copied = most = 0
        for caller in (each for computation in self.computations.values() for each in computation.values()):
            library = _LIBRARY.search(_text(caller.fields, 43))
            if library is None:
                continue
            for number in caller.called:
                inside = self.computations[number]
                for instruction in inside.values():
                    kind, operands = instruction.opcode, [inside[each] for each in instruction.operands]
                    if kind == "dot":
                        most = max(most, sum(operands[0].shapes) + sum(instruction.shapes))
                    elif kind == "convolution":
                        columns, padded = _convolution_copies(instruction, *operands)
                        most = max(most, columns, padded)
                        copied = max(copied, (padded or columns) * (library.group(1) == "ynn"))
        return copied, most

    def products(self) -> Iterator[int]:
        """Yield for each matrix product the bytes of its tensors that have no buffer in a kernel of Triton's.

        Such a kernel computes operands while it reads them and goes on with the result before it writes. cuBLAS reads
        operands from buffers and writes the product itself to another.
        """
        for computation in self.computations.values():
            for instruction in computation.values():
                if instruction.target.startswith(_PRODUCT):
                    yield 0
                elif instruction.opcode == "dot":
                    operands = [_source(computation, computation[each]) for each in instruction.operands]
                    inside = [each for each in operands if each.opcode != "parameter"]
                    root = _source(computation, list(computation.values())[-1])
                    yield sum(sum(each.shapes) for each in (*inside, *[instruction] * (root != instruction)))

    def is_recomputed(self) -> bool:
        """Return whether XLA computes values a second time to save memory."""
        return any(_RECOMPUTED in each.name for part in self.computations.values() for each in part.values())


def _source(computation: dict[int, Instruction], instruction: Instruction) -> Instruction:
    """Return the instruction whose buffer this one names differently, or the instruction itself."""
    while instruction.opcode == "bitcast":
        instruction = computation[instruction.operands[0]]
    return instruction


def _instruction(fields: Fields) -> Instruction:
    metadata = _fields(fields[7][0]) if 7 in fields else {}
    return Instruction(
        name=_text(fields, 1),
        opcode=_text(fields, 2),
        operation=_text(metadata, 2),
        target=_text(fields, 28),
        shapes=tuple(_shape_bytes(fields[3][0])) if 3 in fields else (),
        operands=_numbers(fields, 36),
        called=_numbers(fields, 38),
        fields=fields,
    )


def _convolution_copies(convolution: Instruction, left: Instruction, kernel: Instruction) -> tuple[int, int]:
    """Return the bytes of a convolution's input for all places (0: one channel at a time) and padded (0: it is not)."""
    numbers, groups = _fields(convolution.fields[16][0]), _number(convolution.fields, 50)
    sizes, of_kernel, of_output = (_dimensions(each) for each in (left, kernel, convolution))
    places = math.prod(of_output) // of_output[_number(numbers, 10)]
    columns = places * sum(kernel.shapes) // of_kernel[_number(numbers, 4)] * max(groups, 1)
    if groups > 1 and of_kernel[_number(numbers, 3)] == 1:
        columns = 0
    window = [_fields(each) for each in _fields(convolution.fields[15][0]).get(1, ())]
    edges = [_number(each, 3) + _number(each, 4) for each in window]
    if not any(edges):
        return columns, 0
    unpadded = math.prod(sizes)
    for dimension, edge in zip(_numbers(numbers, 11), edges, strict=True):
        sizes[dimension] += edge
    return columns, sum(left.shapes) * math.prod(sizes) // unpadded


def _dimensions(instruction: Instruction) -> list[int]:
    return list(_numbers(_fields(instruction.fields[3][0]), 3))


def _shape_bytes(serialised: bytes) -> Iterator[int]:
    """Yield the bytes of a shape, or of each element of a tuple."""
    shape = _fields(serialised)
    for element in shape.get(4, ()):
        yield from _shape_bytes(element)
    if 4 not in shape:
        yield math.ceil(math.prod(_numbers(shape, 3)) * _BYTES_OF_TYPE.get(_number(shape, 2), 0))


def _fields(data: bytes) -> Fields:
    """Return the fields of a message in protobuf's wire format.

    Raises:
        IndexError: the message ends too early.
    """
    fields: Fields = {}
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        value: Any
        if kind == 0:
            value, position = _varint(data, position)
        else:
            size, position = _varint(data, position) if kind == 2 else ({1: 8, 5: 4}[kind], position)
            value = data[position : position + size]
            position += size
        if position > end:
            raise IndexError(f"{position - end} bytes of field {number} are missing")
        fields.setdefault(number, []).append(value)
    return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _number(fields: Fields, number: int) -> int:
    value = int(fields[number][-1]) if number in fields else 0
    return value - (1 << 64) if value >> 63 else value


def _text(fields: Fields, number: int) -> str:
    return str(fields[number][-1], "utf-8", "replace") if number in fields else ""


def _numbers(fields: Fields, number: int) -> tuple[int, ...]:
    """Return a repeated number, packed or not."""
    values: list[int] = []
    for item in fields.get(number, ()):
        if isinstance(item, int):
            values.append(item)
            continue
        position = 0
        while position < len(item):
            value, position = _varint(item, position)
            values.append(value)
    return tuple(values)
