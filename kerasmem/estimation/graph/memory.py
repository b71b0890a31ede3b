"""The memory of a step, simulated: which buffers its operations allocate, take over and free. Pure Python.

A buffer lives as long as somebody holds it (an edge to an operation that has not run yet, a variable, the caller). An
operation may take over an input's buffer where it is the only holder.

The same step takes other chunks in a heap that others have used before it, so the simulation begins where a process
begins, with the variables' first values and the batch, and runs a few steps before it looks.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kerasmem.estimation.allocator import FREE, BFCAllocator, Step
from kerasmem.estimation.graph.program import Node, NotModelled, Program, Tensor, Variable
from kerasmem.estimation.graph.rules import ALIASES, NOTHING, TAKEN_FROM_LIST, UPDATES, needs, reusable_inputs
from kerasmem.estimation.graph.scratch import Kernels, Need

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

    def live_at(self, end: int) -> list[Buffer]:
        """Return the buffers that are allocated after so many entries of the log."""
        live: dict[Buffer, None] = {}
        for buffer, is_allocation in self.log[:end]:
            if is_allocation:
                live[buffer] = None
            else:
                del live[buffer]
        return list(live)

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


class _Kind(enum.IntEnum):
    """What a node does with its outputs when it starts."""

    COMPUTES = 0
    HOLDS = 1  # what comes in, as it is
    READS = 2  # a variable
    UPDATES = 3  # a variable in place
    NOTHING = 4


class _Recipe(NamedTuple):
    """What a node does, looked up once for all steps. A place is that of an output among the outputs of all nodes.

    Attributes:
        kind: what it does when it starts.
        inputs: the places of its inputs.
        held: of a node that holds what comes in: (place, that of the input).
        made: of one that computes: (place, bytes, inputs whose buffer it may take over).
        needs: its scratch.
        handed: (place, how many more will hold it when the node has run); none are for those that nobody takes.
        dropped: those.
        returned: the outputs that the caller takes, as often as it does.
        assigns: whether a variable takes its second input over when it has run.
    """

    kind: _Kind
    inputs: tuple[int, ...]
    held: tuple[tuple[int, int], ...]
    made: tuple[tuple[int, int, tuple[int, ...]], ...]
    needs: tuple[Need, ...]
    handed: tuple[tuple[int, int], ...]
    dropped: tuple[int, ...]
    returned: tuple[int, ...]
    assigns: bool

    @property
    def is_idle(self) -> bool:
        """Whether it touches no buffer, neither when it starts nor when it ends."""
        return self.kind is _Kind.NOTHING and not (self.inputs or self.needs or self.assigns)


class Memory:
    """The buffers of a training process as the nodes of its steps start and end.

    Args:
        program: the step.
        kernels: that run it.
        heap: where buffers come from; the variables are made in it at once.
        recipes: what each node does, None where it was not asked yet; processes that run the same program may
            share it.
    """

    def __init__(
        self, program: Program, kernels: Kernels, heap: Heap, recipes: list[_Recipe | None] | None = None
    ) -> None:
        self._program, self._kernels, self._heap = program, kernels, heap
        taken = Counter(each for node in program.nodes for each in node.inputs)
        self._kept = Counter(program.results)
        self._held = taken + self._kept
        batch = [
            (number, program.nodes[number].outputs[0].bytes or 0)
            for number in program.arguments
            if not program.nodes[number].outputs[0].on_host
        ]
        self.variables = make_variables(program.variables, batch, heap)
        # A constant's kernel keeps its value from the first step on; spelled-out loops name the same one many times.
        for number in {node.name: number for number, node in enumerate(program.nodes) if node.type == "Const"}.values():
            if not program.nodes[number].outputs[0].on_host:
                heap.allocate(program.nodes[number].outputs[0].bytes or 0, number)
        self._recipes: list[_Recipe | None] = [None] * len(program.nodes) if recipes is None else recipes
        self._is_idle = [recipe is not None and recipe.is_idle for recipe in self._recipes]
        self._first = [0, *itertools.accumulate(len(node.outputs) for node in program.nodes)]
        self._made: list[Buffer | None] = [None] * self._first[-1]
        self._scratch: dict[int, list[Buffer]] = {}
        self._returned: list[Buffer] = []

    def run(self, order: list[tuple[int, bool]]) -> None:
        """Run one step in an order from `Executor.order`; what it returned is dropped."""
        start, end, is_idle = self.start, self.end, self._is_idle
        for number, is_end in order:
            if is_idle[number]:
                continue
            if is_end:
                end(number)
            else:
                start(number)
        self._release(self._returned)
        self._returned.clear()

    def start(self, number: int) -> None:
        """Allocate what the node needs."""
        recipe = self._recipes[number]
        if recipe is None:
            recipe = self._recipes[number] = self._recipe(number)
            self._is_idle[number] = recipe.is_idle
        kind, buffers = recipe.kind, self._made
        if kind is _Kind.COMPUTES:
            self._compute(number, recipe)
        elif kind is _Kind.HOLDS:
            for place, source in recipe.held:
                buffers[place] = _hold(buffers[source])
        elif kind is _Kind.READS:
            buffers[self._first[number]] = _hold(self.variables[self._variable(number)])
        elif kind is _Kind.UPDATES:
            self._update(number)
        if recipe.needs:
            inputs = [buffers[source] for source in recipe.inputs]
            needs = [need for need in recipe.needs if not _is_served(need, inputs)]
            self._scratch[number] = [self._heap.allocate(need.bytes, number, is_scratch=True) for need in needs]

    def _recipe(self, number: int) -> _Recipe:
        node = self._program.nodes[number]
        kind, count, held = node.type, len(node.outputs), []
        first, inputs = self._first[number], tuple(self._first[source] + output for source, output in node.inputs)
        if kind in ALIASES:
            held = [(place, place if kind == "IdentityN" else 0) for place in range(count)]
        elif kind in TAKEN_FROM_LIST and len(node.inputs) > TAKEN_FROM_LIST[kind]:
            held = [(count - 1, TAKEN_FROM_LIST[kind])]
        elif kind == "Split" and _is_first_axis(self._program, node):
            held = [(place, 1) for place in range(count)]
        does = _Kind.HOLDS if held else _Kind.NOTHING if kind in ALIASES else _Kind.COMPUTES
        if kind in NOTHING:
            does, held = _Kind.UPDATES if kind in UPDATES else _Kind.NOTHING, []
        elif kind == "ReadVariableOp":
            does, held = _Kind.READS, []
        wanted = [self._held[number, place] for place in range(count)]
        return _Recipe(
            kind=does,
            inputs=inputs,
            held=tuple((first + place, inputs[source]) for place, source in held),
            made=tuple(self._outputs(node, first, inputs)) if does is _Kind.COMPUTES else (),
            needs=self._needs(node),
            handed=tuple((first + place, holders - 1) for place, holders in enumerate(wanted) if holders),
            dropped=tuple(first + place for place, holders in enumerate(wanted) if not holders),
            returned=tuple(first + place for place in range(count) for _ in range(self._kept[number, place])),
            assigns=kind == "AssignVariableOp",
        )

    def _outputs(self, node: Node, first: int, inputs: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        for place, tensor in enumerate(node.outputs):
            if tensor.dtype in ("resource", "variant") or tensor.on_host:
                continue
            if tensor.bytes is None:
                raise NotModelled(f"the size of {node.name} ({node.type}) depends on the data")
            candidates: tuple[int, ...] | None = reusable_inputs(node, self._kernels) if place == 0 else ()
            if place == 1 and node.type == "SparseSoftmaxCrossEntropyWithLogits":
                candidates = (0,)
            yield first + place, tensor.bytes, tuple(inputs[each] for each in self._alike(node, tensor, candidates))

    def _alike(self, node: Node, output: Tensor, candidates: tuple[int, ...] | None) -> Iterator[int]:
        """Yield those among the candidates, or among all inputs (None), whose buffer could hold the output."""
        for place in range(len(node.inputs)) if candidates is None else candidates:
            if place >= len(node.inputs):
                return
            source, made = node.inputs[place]
            tensor = self._program.nodes[source].outputs[made]
            if tensor.bytes == output.bytes and tensor.dtype == output.dtype:
                yield place

    def _needs(self, node: Node) -> tuple[Need, ...]:
        """Return the buffers that the node needs while it runs."""
        inputs = tuple(self._program.nodes[source].outputs[output] for source, output in node.inputs)
        return needs(node, inputs, self._kernels)

    def _compute(self, number: int, recipe: _Recipe) -> None:
        buffers = self._made
        for place, size, candidates in recipe.made:
            for candidate in candidates:
                buffer = buffers[candidate]
                if buffer is not None and buffer.holders == 1 and buffer.bytes == size:
                    buffer.holders = 2
                    buffers[place] = buffer
                    break
            else:
                buffers[place] = self._heap.allocate(size, number)

    def _variable(self, number: int) -> int:
        node = self._program.nodes[number]
        if node.variable is None:
            raise NotModelled(f"{node.name} ({node.type}): which variable it works on is not known")
        return node.variable

    def _update(self, number: int) -> None:
        """Note an update in place; a variable whose buffer somebody else holds is copied first."""
        variable = self._variable(number)
        held = self.variables[variable]
        if held.holders > 1:
            self._replace(variable, self._heap.allocate(held.bytes, number))

    def _replace(self, variable: int, new: Buffer) -> None:
        """Give a variable another buffer for its value."""
        old, self.variables[variable] = self.variables[variable], new
        if old is not new:
            new.variable, new.value_from, new.value_to = variable, len(self._heap.log), None
            if old.holders > 1 and old not in self.variables:
                old.value_to = len(self._heap.log)
        self._heap.let_go(old)

    def end(self, number: int) -> None:
        """Release what the node held, and hand its outputs on."""
        recipe, buffers = self._recipes[number], self._made
        assert recipe is not None  # it has started
        if recipe.needs:
            self._release(self._scratch.pop(number))
        if recipe.assigns and (value := buffers[recipe.inputs[1]]) is not None:
            value.holders += 1
            self._replace(self._variable(number), value)
        for place, more in recipe.handed:
            made = buffers[place]
            if made is not None:
                made.holders += more
        if recipe.returned:
            self._returned += [made for made in map(buffers.__getitem__, recipe.returned) if made is not None]
        if recipe.inputs:
            self._release(map(buffers.__getitem__, recipe.inputs))
        if recipe.dropped:
            self._release(map(buffers.__getitem__, recipe.dropped))

    def _release(self, buffers: Iterable[Buffer | None]) -> None:
        """Take a holder away from each, and free those that nobody holds any more."""
        for buffer in buffers:
            if buffer is not None:
                left = buffer.holders - 1
                buffer.holders = left
                if not left:
                    self._heap.free(buffer)


def _hold(buffer: Buffer | None) -> Buffer | None:
    if buffer is not None:
        buffer.holders += 1
    return buffer


def _is_served(need: Need, inputs: list[Buffer | None]) -> bool:
    """Return whether no buffer is needed: there is nothing to hold, or an input's serves, which is held anyway."""
    buffer = None if need.takes_over is None else inputs[need.takes_over]
    return not need.bytes or (buffer is not None and buffer.holders == 1)


def _is_first_axis(program: Program, node: Node) -> bool:
    axis = program.nodes[node.inputs[0][0]].attributes.get("value")
    return axis is not None and int(axis) == 0
