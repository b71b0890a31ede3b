"""What XLA's own texts say of a compiled step: what lives at the peak, and its convolutions. Pure.

The optimised module ("HLO", in the order in which it runs) and dumps of its memory are read: live ranges, and which
values share it. They are meant for people and change between versions; what does not read as expected is left out.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"\b(pred|token|opaque|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv')
_FUNCTION = re.compile(r"\bp?jit\([^()]*\)")
_PEAK = re.compile(r"\s*Live ranges at (\d+) \(peak\):")
_LIVE = re.compile(r"\s+(\S+?)\{[\d,]*\}: (\d+) bytes")
_SEQUENCE = re.compile(r"\s+(\d+):([\w.\-]+)\s*$")
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*):$", re.MULTILINE)
_ALL_BYTES = re.compile(r"^Total bytes: (\d+)\b", re.MULTILINE)
_RECOMPUTED = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+\.remat\d*[\w.]* = ", re.MULTILINE)
_COMPUTATION = re.compile(r"%([\w.\-]+) \(.*\{$")
_LIBRARY_CALL = re.compile(r'calls=%([\w.\-]+).*"kind":"__(ynn|xnn|onednn)')  # kernels of a library on a CPU
_DIMENSION_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"(?<=[{ ])(size|pad)=([\dx_\-]+)(?=[} ])")
_GROUPS = re.compile(r"feature_group_count=(\d+)")


@dataclass(frozen=True)
class LiveBuffer:
    """A value that has memory at the peak.

    Attributes:
        bytes: its size.
        operation: the operation that made it, as the step's code names it; "state[0][5]" and the like for arguments.
        layer: the Keras layer in whose call that was, or None.
        phase: "forward", "backward" or "optimizer"; None for arguments and where it is not known.
    """

    bytes: int
    operation: str
    layer: str | None = None
    phase: str | None = None


def shape_bytes(text: str) -> int:
    """Return the bytes of an HLO shape, of all elements of a tuple: "(f32[8,32]{1,0}, u8[0]{0})" → 1024."""
    total = 0
    for dtype, dimensions in _SHAPE.findall(text):
        count = math.prod(int(size) for size in dimensions.split(",") if size)
        total += -(-count * _bits(dtype) // 8)
    return total


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)  # f32, bf16, s8, f8e4m3fn
    return int(found.group(1)) if found else 0


def assigned_bytes(assignment: str, usage: str) -> dict[str, int] | None:
    """Return what JAX's `memory_analysis` says of a compiled step, from the texts that XLA writes before that.

    Args:
        assignment: the dump of which values share which memory.
        usage: the report of that memory's use, whose totals must be those of the allocations that were read.

    Returns:
        "argument", "output", "alias" and "temp" in bytes, or None where the texts do not read as expected.
    """
    argument = output = alias = temp = total = 0
    for text, what in _ALLOCATION.findall(assignment):
        size = int(text)
        is_given, is_returned = "parameter " in what, "maybe-live-out" in what
        argument += size * is_given
        output += size * is_returned
        alias += size * (is_given and is_returned)
        temp += size * ("preallocated-temp" in what)
        total += size
    if not total or total != sum(map(int, _ALL_BYTES.findall(usage))):
        return None
    return {"argument": argument, "output": output, "alias": alias, "temp": temp}


def is_recomputed(module: str) -> bool:
    """Return whether XLA computes values a second time to save memory."""
    return _RECOMPUTED.search(module) is not None


def convolution_bytes(module: str) -> tuple[tuple[int, str], ...]:
    """Return for each convolution that cuDNN runs the bytes of its inputs and outputs, and its operation's name.

    A convolution whose workspace is part of the plan (more than 0 bytes reserved) is left out.
    """
    return tuple(
        (sum(map(shape_bytes, (each.shape, *each.operands))), each.operation or each.name)
        for each in _instructions(module)
        if _CONVOLUTION.search(each.rest) and "u8[0]" in each.shape
    )


@dataclass(frozen=True)
class Scratch:
    """What one call of a library's kernel on a CPU takes beside the plan, in bytes: the largest call's.

    Attributes:
        copied: by a convolution of YNNPACK's, from its shapes.
        most: at most, matrix products included.
    """

    copied: int
    most: int


NO_SCRATCH = Scratch(0, 0)


def library_scratch(module: str) -> Scratch:
    """Return what kernels of libraries on a CPU take beside the plan.

    YNNPACK's convolution is a matrix product of a copy that has, for each place of the output, the part of the input it
    is made of ("im2col"). It makes that copy whole where it takes the input as it is, and none for one channel at a
    time. Where the input is padded it makes the padded input, and reads that in place. (XLA's `ynn_emitter.cc` defines
    pad, stencil copy and product; how much each takes was measured.) A matrix product may copy what it takes and what
    it puts out into blocks. Weights are copied block by block.
    """
    called = dict(_LIBRARY_CALL.findall(module))
    copied = most = 0
    for each in _instructions(module):
        library = called.get(each.computation)
        if library is None or each.kind not in ("convolution", "dot"):
            continue
        labels = _DIMENSION_LABELS.search(each.rest)
        if each.kind == "dot" or labels is None:
            most = max(most, shape_bytes(each.operands[0]) + shape_bytes(each.shape))
            continue
        columns, padded = _convolution_copies(each, *labels.groups())
        most = max(most, columns, padded)
        if library == "ynn":
            copied = max(copied, padded or columns)
    return Scratch(copied, most)


def _convolution_copies(each: _Instruction, of_input: str, of_kernel: str, of_output: str) -> tuple[int, int]:
    """Return the bytes of a convolution's input for all places (0: one channel at a time) and padded (0: it is not)."""
    left, right = each.operands
    window, groups = dict(_WINDOW.findall(each.rest)), _GROUPS.search(each.rest)
    kernel, output = _sizes(right), _sizes(each.shape)
    places = math.prod(output) // output[of_output.index("f")]
    columns = places * shape_bytes(right) // kernel[of_kernel.index("o")] * int(groups.group(1) if groups else 1)
    if groups is not None and kernel[of_kernel.index("i")] == 1:
        columns = 0
    if "pad" not in window:
        return columns, 0
    padded = _sizes(left)
    unpadded = math.prod(padded)
    for number, edges in enumerate(window["pad"].split("x")):
        padded[of_input.index(str(number))] += sum(map(int, edges.split("_")))
    return columns, shape_bytes(left) * math.prod(padded) // unpadded


class _Instruction(NamedTuple):
    """A line of a module: in which computation it stands, what it makes, and of what (shapes, where they are known)."""

    computation: str
    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    operation: str | None
    rest: str


def _instructions(module: str) -> Iterator[_Instruction]:
    shapes: dict[str, str] = {}
    computation = ""
    for line in module.splitlines():
        begins, found, operation = _COMPUTATION.match(line), _INSTRUCTION.match(line), _OP_NAME.search(line)
        computation = computation if begins is None else begins.group(1)
        if found is None:
            continue
        name, shape, kind, operands, rest = found.groups()
        shapes[name] = shape
        taken = tuple(shapes.get(each.rpartition("%")[2].strip(), "") for each in operands.split(","))
        yield _Instruction(computation, name, shape, kind, taken, operation and operation.group(1), rest)


def _sizes(shape: str) -> list[int]:
    found = _SHAPE.search(shape)
    return [int(size) for size in found.group(2).split(",") if size] if found is not None else []


def operation_names(module: str) -> dict[str, str]:
    """Return the operation's name of every instruction that has one."""
    return {each.name: each.operation for each in _instructions(module) if each.operation is not None}


def peak_of(live_ranges: str) -> tuple[str | None, tuple[tuple[str, int], ...]]:
    """Return the instruction at which most bytes live, and what lives then: instruction and bytes, as XLA lists it."""
    sequence: dict[int, str] = {}
    lines = iter(live_ranges.splitlines())
    for line in lines:
        step = _SEQUENCE.match(line)
        if step is not None:
            sequence.setdefault(int(step.group(1)), step.group(2))
        peak = _PEAK.match(line)
        if peak is not None:
            listed = itertools.takewhile(bool, map(_LIVE.match, lines))
            return sequence.get(int(peak.group(1))), tuple((each[1], int(each[2])) for each in listed if each)
    return None, ()


def live_buffers(
    live: Collection[tuple[str, int]], operations: dict[str, str], layers: Collection[str], optimizer: str | None
) -> tuple[LiveBuffer, ...]:
    """Name the values that live at the peak.

    Args:
        live: instruction and bytes, from `peak_of`.
        operations: instruction → the operation's name, from `operation_names`.
        layers: names of the model's layers.
        optimizer: the optimizer's name; None for inference.
    """
    found = []
    for instruction, size in live:
        operation = operations.get(instruction, instruction)
        layer, phase = origin(operation, layers, optimizer)
        found.append(LiveBuffer(size, operation, layer, phase))
    return tuple(found)


def origin(operation: str, layers: Collection[str], optimizer: str | None) -> tuple[str | None, str | None]:
    """Return the layer and the phase of an operation by its name.

    JAX wraps the scope of a layer's call in what is done to it: `jvp(conv1)` going forward, `transpose(jvp(conv1))`
    going back. What comes last is the operation itself, and `jit(relu)` a function of JAX's: neither is a layer.

    Examples:
        >>> origin("jit(train_step)/transpose(jvp(encoder))/dense/dot_general", {"encoder", "dense"}, "adam")
        ('encoder/dense', 'backward')
    """
    if "/" not in operation:
        return None, None
    scopes = _FUNCTION.sub("", operation.rpartition("/")[0])
    pieces = re.sub(r"\b(?:jvp|transpose|vmap|checkpoint|remat)\(", "", scopes).replace(")", "").split("/")
    if optimizer is not None and any(re.fullmatch(rf"{re.escape(optimizer)}(_\d+)?", piece) for piece in pieces):
        return None, OPTIMIZER
    path = [piece for piece in pieces if piece in layers]
    return "/".join(path) or None, BACKWARD if "transpose(" in operation else FORWARD
