"""The heap of a process that trains: variables are made, the batch arrives, steps follow one another. Pure Python.

The same step takes other chunks in a heap that others have used before it, so the simulation begins where a process
begins and runs a few steps before it looks.
"""

from __future__ import annotations

from kerasmem.estimation.allocator import BFCAllocator
from kerasmem.estimation.graph.program import Program, Variable

HANDLE_BYTES = 200  # a variable's handle is a small tensor of its own


class Buffer:
    """Memory behind one or more tensors or variables; it lives while it has holders."""

    __slots__ = ("bytes", "chunk", "holders", "node", "variable")

    def __init__(self, size: int, chunk: int, node: int, variable: int | None) -> None:
        self.bytes, self.chunk, self.node, self.variable = size, chunk, node, variable
        self.holders = 0


class Heap:
    """Buffers in a simulated allocator, with the requests noted for replays under a limit.

    Args:
        allocator: where the chunks come from.
    """

    def __init__(self, allocator: BFCAllocator | None = None) -> None:
        self.allocator = allocator or BFCAllocator()
        self.requests: list[tuple[int, int]] = []  # (chunk, bytes), or (chunk, -1) for a release
        self.live: set[Buffer] = set()
        self.requested = 0

    def allocate(self, size: int, node: int = -1, variable: int | None = None) -> Buffer:
        """Return a new buffer with one holder."""
        chunk = self.allocator.allocate(max(size, 1))
        buffer = Buffer(size, chunk, node, variable)
        buffer.holders = 1
        self.requests.append((chunk, max(size, 1)))
        self.live.add(buffer)
        self.requested += size
        return buffer

    def let_go(self, buffer: Buffer) -> None:
        """Take one holder away, and free the buffer where it was the last."""
        buffer.holders -= 1
        if not buffer.holders:
            self.allocator.free(buffer.chunk)
            self.requests.append((buffer.chunk, -1))
            self.live.discard(buffer)
            self.requested -= buffer.bytes


def make_variables(program: Program, heap: Heap) -> list[Buffer]:
    """Give the variables their first values as Keras does, and return the buffers by the variables' numbers.

    Weights are made one by one: a random one is drawn, scaled and shifted in three buffers of which the last stays.
    The optimizer's are made by the first call of the step, where TensorFlow finds that fillings of the same shape are
    the same value: they share one buffer until they are written.
    """
    buffers: dict[int, Buffer] = {}
    shared: dict[tuple[tuple[int, ...], str], Buffer] = {}
    for number, variable in enumerate(program.variables):
        heap.allocate(HANDLE_BYTES)
        if variable.kind == "weights" or not variable.shape:
            buffers[number] = _first_value(variable, number, heap)
    for argument in program.arguments:
        heap.allocate(program.nodes[argument].outputs[0].bytes or 0, argument)
    for number, variable in enumerate(program.variables):
        if number in buffers:
            continue
        alike = (variable.shape, variable.dtype)
        if alike in shared:
            shared[alike].holders += 1
        else:
            shared[alike] = heap.allocate(variable.bytes, -1, number)
        buffers[number] = shared[alike]
    return [buffers[number] for number in range(len(program.variables))]


def _first_value(variable: Variable, number: int, heap: Heap) -> Buffer:
    if variable.initial == "filled":
        return heap.allocate(variable.bytes, -1, number)
    drawn, scaled = heap.allocate(variable.bytes), heap.allocate(variable.bytes)
    shifted = heap.allocate(variable.bytes, -1, number)
    heap.let_go(scaled)
    heap.let_go(drawn)
    return shifted
