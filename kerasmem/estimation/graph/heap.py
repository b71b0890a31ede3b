"""The heap of a process that trains: variables are made, the batch arrives, steps follow one another. Pure Python.

The same step takes other chunks in a heap that others have used before it, so the simulation begins where a process
begins and runs a few steps before it looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kerasmem.estimation.allocator import FREE, BFCAllocator, Step
from kerasmem.estimation.graph.program import Variable

HANDLE_BYTES = 200  # a variable's handle is a small tensor of its own


class Buffer:
    """Memory behind one or more tensors or variables; it lives while it has holders.

    Attributes:
        bytes: asked for.
        chunk: the allocator's handle.
        holders: how many hold it.
        node: the operation that allocated it; a number of the batch's, or -1 for neither.
        variable: the variable whose value it is or was, or None.
        value_from: the place in the heap's log from which on it is that value.
        value_to: and where another takes its place; None while it is the value.
        is_scratch: whether it is the operation's scratch.
    """

    __slots__ = ("bytes", "chunk", "holders", "is_scratch", "node", "value_from", "value_to", "variable")

    def __init__(self, size: int, chunk: int, node: int, variable: int | None, is_scratch: bool) -> None:
        self.bytes, self.chunk, self.node, self.variable, self.is_scratch = size, chunk, node, variable, is_scratch
        self.holders = 1
        self.value_from: int = 0
        self.value_to: int | None = None

    def variable_at(self, place: int) -> int | None:
        """Return the variable whose value it is at a place in the heap's log, or None."""
        ended = self.value_to is not None and self.value_to < place
        return None if ended or (self.value_from and self.value_from >= place) else self.variable


class Peak(NamedTuple):
    """The most that was in use.

    Attributes:
        in_use: bytes in chunks.
        requested: bytes asked for.
        node: the operation that ran, -1 for none.
        end: how much of the heap's log leads up to it.
    """

    in_use: int
    requested: int
    node: int
    end: int


class Heap:
    """Buffers in a simulated allocator, with a log of what was allocated and freed and the peak of a step.

    Args:
        allocator: where the chunks come from.
    """

    def __init__(self, allocator: BFCAllocator | None = None) -> None:
        self.allocator = allocator or BFCAllocator(descending=True)
        self.log: list[tuple[Buffer, bool]] = []  # True where it was allocated, False where it was freed
        self.reset_peak()

    def reset_peak(self) -> None:
        """Let the peak begin again at what is in use."""
        self.allocator.reset_peak()
        self.peak = self._now(-1)

    def _now(self, node: int) -> Peak:
        return Peak(self.allocator.in_use, self.allocator.requested_in_use, node, len(self.log))

    def allocate(self, size: int, node: int = -1, variable: int | None = None, is_scratch: bool = False) -> Buffer:
        """Return a new buffer with one holder."""
        buffer = Buffer(size, self.allocator.allocate(max(size, 1)), node, variable, is_scratch)
        self.log.append((buffer, True))
        if self.allocator.in_use > self.peak.in_use:
            self.peak = self._now(node)
        return buffer

    def let_go(self, buffer: Buffer) -> None:
        """Take one holder away, and free the buffer where it was the last."""
        buffer.holders -= 1
        if not buffer.holders:
            self.free(buffer)

    def free(self, buffer: Buffer) -> None:
        """Free a buffer that nobody holds any more."""
        self.allocator.free(buffer.chunk)
        self.log.append((buffer, False))

    def requests(self) -> list[Step]:
        """Return all that was asked of the allocator, for a replay under a limit."""
        steps: list[Step] = []
        keys: dict[Buffer, int] = {}
        for buffer, is_allocation in self.log:
            if is_allocation:
                keys[buffer] = len(keys)
            steps.append((keys[buffer], max(buffer.bytes, 1) if is_allocation else FREE))
        return steps


# TensorFlow evaluates fillings of up to this many elements once more when it looks for constants.
LARGEST_FOLDED = 10 * 1024 * 1024


def make_variables(variables: Sequence[Variable], batch: Iterable[tuple[int, int]], heap: Heap) -> list[Buffer]:
    """Give the variables their first values as Keras does, and return the buffers by the variables' numbers.

    Weights are made one by one: a random one is drawn, scaled and shifted in three buffers; the last one stays.
    The optimizer's are made by the first call of the step, where TensorFlow finds that fillings of the same shape are
    the same value: they share one buffer until they are written.

    Args:
        variables: in the order in which they are made.
        batch: for each tensor of a batch the node that stands for it (or -1) and its bytes.
        heap: where they are made.
    """
    buffers: dict[int, Buffer] = {}
    for number, variable in enumerate(variables):
        heap.allocate(HANDLE_BYTES)
        if variable.kind != "optimizer" or not variable.shape:
            buffers[number] = _first_value(variable, number, heap)
    for node, size in batch:
        heap.allocate(size, node)
    later = [number for number in range(len(variables)) if number not in buffers]
    distinct = {(variables[number].shape, variables[number].dtype): variables[number] for number in reversed(later)}
    for variable in reversed(distinct.values()):
        if math.prod(variable.shape) <= LARGEST_FOLDED:
            heap.let_go(heap.allocate(variable.bytes))
    shared: dict[tuple[tuple[int, ...], str], Buffer] = {}
    for number in later:
        alike = (variables[number].shape, variables[number].dtype)
        if alike in shared:
            shared[alike].holders += 1
        else:
            shared[alike] = heap.allocate(variables[number].bytes, -1, number)
        buffers[number] = shared[alike]
    return [buffers[number] for number in range(len(variables))]


def _first_value(variable: Variable, number: int, heap: Heap) -> Buffer:
    if variable.initial == "filled":
        return heap.allocate(variable.bytes, -1, number)
    drawn, scaled = heap.allocate(variable.bytes), heap.allocate(variable.bytes)
    shifted = heap.allocate(variable.bytes, -1, number)
    heap.let_go(scaled)
    heap.let_go(drawn)
    return shifted
