"""The memory of a step, simulated: the buffers that its operations allocate, reuse and free. Pure Python.

A buffer lives while it has holders: edges to operations that have not run yet, variables, the caller. An operation may
reuse an input's buffer if it is the only holder.

The chunks that a step gets depend on what used the heap before. So the simulation starts as a process does, with the
variables' first values and the batch, and runs a few steps to warm up.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kerasmem.estimation.allocator import FREE, BFCAllocator, Step
from kerasmem.estimation.graph.program import Node, NotModelled, Program, Variable
from kerasmem.estimation.graph.rules import ALIASES, NOTHING, TAKEN_FROM_LIST, UPDATES, needs, reusable_inputs
from kerasmem.estimation.graph.scratch import Inputs, Kernels, Need

HANDLE_BYTES = 200  # a variable's handle is a small tensor of its own


class Buffer:
    """Memory of one or more tensors or variables.

    Attributes:
        bytes: requested bytes.
        chunk: the allocator's handle.
        holders: number of holders.
        node: number of the operation that allocated it, or of the batch's placeholder. -1 for other buffers.
        variable: number of the variable whose value it is or was, or None.
        value_from: length of the heap's log when it became that value.
        value_to: length of the heap's log when another buffer replaced it, or None.
        is_scratch: whether it is an operation's scratch.
    """

    __slots__ = ("bytes", "chunk", "holders", "is_scratch", "node", "value_from", "value_to", "variable")

    def __init__(self, size: int, chunk: int, node: int, variable: int | None, is_scratch: bool) -> None:
        self.bytes, self.chunk, self.node, self.variable, self.is_scratch = size, chunk, node, variable, is_scratch
        self.holders = 1
        self.value_from: int = 0
        self.value_to: int | None = None

    def variable_at(self, end: int) -> int | None:
        """Return the variable whose value it is when the heap's log has a length, or None."""
        is_replaced = self.value_to is not None and self.value_to < end
        is_future = self.value_from and self.value_from >= end
        return None if is_replaced or is_future else self.variable


class Peak(NamedTuple):
    """The peak of a step.

    Attributes:
        in_use: bytes in chunks.
        requested: requested bytes.
        node: number of the running operation, or -1.
        end: length of the heap's log at the peak.
    """

    in_use: int
    requested: int
    node: int
    end: int


class Heap:
    """Buffers in a simulated allocator, with a log of allocations and the peak of a step.

    Args:
        allocator: provides the chunks. Defaults to a CPU's.
    """

    def __init__(self, allocator: BFCAllocator | None = None) -> None:
        self.allocator = allocator or BFCAllocator(descending=True)
        self.log: list[tuple[Buffer, bool]] = []  # True for an allocation, False when it is freed
        self.reset_peak()

    def reset_peak(self) -> None:
        """Reset the peak to the bytes in use."""
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
        """Remove one holder, and free the buffer after the last one."""
        buffer.holders -= 1
        if not buffer.holders:
            self.free(buffer)

    def free(self, buffer: Buffer) -> None:
        """Free a buffer without holders."""
        self.allocator.free(buffer.chunk)
        self.log.append((buffer, False))

    def live_at(self, end: int) -> list[Buffer]:
        """Return the buffers in use when the log had this length."""
        live: dict[Buffer, None] = {}
        for buffer, is_allocation in self.log[:end]:
            if is_allocation:
                live[buffer] = None
            else:
                del live[buffer]
        return list(live)

    def requests(self) -> list[Step]:
        """Return all requests to the allocator, to replay them under a limit."""
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
    """Give the variables their first values as Keras does, and return their buffers in order.

    Weights are created one by one: a random one is drawn, scaled and shifted in three buffers, and the last one stays.
    The optimizer's are created by the first call of the step. TensorFlow finds that fillings of one shape are the same
    value, so they share a buffer until they are written.

    Args:
        variables: in the order of their creation.
        batch: node (or -1) and bytes of each tensor of a batch.
        heap: provides the buffers.
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


class _Action(enum.IntEnum):
    """What a node does with its outputs when it starts."""

    COMPUTE = 0
    HOLD = 1  # inputs, as they are
    READ = 2  # a variable
    UPDATE = 3  # a variable in place
    NOTHING = 4


class Recipe(NamedTuple):
    """The work of a node with buffers, computed once for all steps.

    An output is named by its slot: its number among the outputs of all nodes.

    Attributes:
        action: what the node does when it starts.
        inputs: slots of its inputs.
        held: (slot, input's slot) of outputs that are inputs as they are.
        computed: (slot, bytes, inputs whose buffer it may reuse) of computed outputs.
        needs: its scratch.
        taken: (slot, further holders when the node has run) of outputs that others take.
        dropped: slots of outputs that nobody takes.
        returned: slots of outputs that the caller takes, once for each time.
        variable: number of its variable, or None.
        assigns: whether its second input becomes the variable's value.
    """

    action: _Action
    inputs: tuple[int, ...]
    held: tuple[tuple[int, int], ...]
    computed: tuple[tuple[int, int, tuple[int, ...]], ...]
    needs: tuple[Need, ...]
    taken: tuple[tuple[int, int], ...]
    dropped: tuple[int, ...]
    returned: tuple[int, ...]
    variable: int | None
    assigns: bool

    @property
    def is_idle(self) -> bool:
        """Whether it touches no buffer, neither when it starts nor when it ends."""
        return self.action is _Action.NOTHING and not (self.inputs or self.needs or self.assigns)


def recipes_of(program: Program, kernels: Kernels) -> list[Recipe]:
    """Return the recipe of each node.

    Raises:
        NotModelled: If a size or a variable is unknown.
    """
    first = [0, *itertools.accumulate(len(node.outputs) for node in program.nodes)]
    returned = Counter(program.results)
    holders = Counter(end for node in program.nodes for end in node.inputs) + returned
    recipes = []
    for number, node in enumerate(program.nodes):
        action, held = _action(program, node)
        if action in (_Action.READ, _Action.UPDATE) and node.variable is None:
            raise NotModelled(f"{node.name} ({node.type}): which variable it works on is not known")
        slots = range(first[number], first[number + 1])
        inputs = tuple(first[source] + output for source, output in node.inputs)
        wanted = [holders[number, output] for output in range(len(node.outputs))]
        tensors = tuple(program.nodes[source].outputs[output] for source, output in node.inputs)
        computed = _computed(node, tensors, inputs, kernels) if action is _Action.COMPUTE else ()
        recipes.append(
            Recipe(
                action=action,
                inputs=inputs,
                held=tuple((slots[output], inputs[source]) for output, source in held),
                computed=tuple((slots[output], size, reusable) for output, size, reusable in computed),
                needs=needs(node, tensors, kernels),
                taken=tuple((slot, count - 1) for slot, count in zip(slots, wanted, strict=True) if count),
                dropped=tuple(slot for slot, count in zip(slots, wanted, strict=True) if not count),
                returned=tuple(slot for output, slot in enumerate(slots) for _ in range(returned[number, output])),
                variable=node.variable,
                assigns=node.type == "AssignVariableOp",
            )
        )
    return recipes


def _action(program: Program, node: Node) -> tuple[_Action, list[tuple[int, int]]]:
    """Return a node's action, and the (output, input) pairs that it holds."""
    outputs = range(len(node.outputs))
    if node.type == "ReadVariableOp":
        return _Action.READ, [(0, 0)]
    if node.type in NOTHING:
        return (_Action.UPDATE if node.type in UPDATES else _Action.NOTHING), []
    if node.type in ALIASES:
        held = [(output, output if node.type == "IdentityN" else 0) for output in outputs]
        return (_Action.HOLD if held else _Action.NOTHING), held
    if node.type in TAKEN_FROM_LIST and len(node.inputs) > TAKEN_FROM_LIST[node.type]:
        return _Action.HOLD, [(len(outputs) - 1, TAKEN_FROM_LIST[node.type])]
    if node.type == "Split" and _is_first_axis(program, node):
        return _Action.HOLD, [(output, 1) for output in outputs]
    return _Action.COMPUTE, []


def _computed(
    node: Node, inputs: Inputs, slots: Sequence[int], kernels: Kernels
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield each computed output, its bytes, and the slots of the inputs whose buffer it may reuse."""
    for output, tensor in enumerate(node.outputs):
        if tensor.dtype in ("resource", "variant") or tensor.on_host:
            continue
        if tensor.bytes is None:
            raise NotModelled(f"the size of {node.name} ({node.type}) depends on the data")
        candidates: Sequence[int] | None = reusable_inputs(node, kernels) if output == 0 else ()
        if output == 1 and node.type == "SparseSoftmaxCrossEntropyWithLogits":
            candidates = (0,)
        if candidates is None:
            candidates = range(len(inputs))
        size = (tensor.bytes, tensor.dtype)
        existing = [number for number in candidates if number < len(inputs)]
        alike = [number for number in existing if (inputs[number].bytes, inputs[number].dtype) == size]
        yield output, tensor.bytes, tuple(slots[number] for number in alike)


def _is_first_axis(program: Program, node: Node) -> bool:
    axis = program.nodes[node.inputs[0][0]].attributes.get("value")
    return axis is not None and int(axis) == 0


class Memory:
    """The buffers of a training process while the nodes of its steps start and end.

    Args:
        program: the step.
        recipes: of its nodes, from `recipes_of`.
        heap: provides the buffers; the variables are created at once.
    """

    def __init__(self, program: Program, recipes: Sequence[Recipe], heap: Heap) -> None:
        self._recipes, self._heap = recipes, heap
        nodes = program.nodes
        batch = [(number, nodes[number].outputs[0]) for number in program.arguments]
        on_device = [(number, tensor.bytes or 0) for number, tensor in batch if not tensor.on_host]
        self.variables = make_variables(program.variables, on_device, heap)
        # A constant's kernel keeps its value from the first step on; unrolled loops name the same one many times.
        for number in {node.name: number for number, node in enumerate(nodes) if node.type == "Const"}.values():
            if not nodes[number].outputs[0].on_host:
                heap.allocate(nodes[number].outputs[0].bytes or 0, number)
        self._is_idle = [recipe.is_idle for recipe in recipes]
        self._slots: list[Buffer | None] = [None] * sum(len(node.outputs) for node in nodes)
        self._scratch: dict[int, list[Buffer]] = {}
        self._returned: list[Buffer] = []

    def run(self, order: list[tuple[int, bool]]) -> None:
        """Run one step in an order from `Executor.order`, and drop its results."""
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
        """Allocate a node's outputs and scratch."""
        recipe, slots = self._recipes[number], self._slots
        if recipe.action is _Action.COMPUTE:
            self._compute(number, recipe)
        elif recipe.action is _Action.HOLD:
            for slot, source in recipe.held:
                slots[slot] = _hold(slots[source])
        elif recipe.variable is not None and recipe.action is _Action.READ:
            for slot, _ in recipe.held:
                slots[slot] = _hold(self.variables[recipe.variable])
        elif recipe.variable is not None and recipe.action is _Action.UPDATE:
            self._update(number, recipe.variable)
        if recipe.needs:
            inputs = [slots[source] for source in recipe.inputs]
            unserved = [need for need in recipe.needs if not _is_served(need, inputs)]
            self._scratch[number] = [self._heap.allocate(need.bytes, number, is_scratch=True) for need in unserved]

    def _compute(self, number: int, recipe: Recipe) -> None:
        slots = self._slots
        for slot, size, candidates in recipe.computed:
            for candidate in candidates:
                buffer = slots[candidate]
                if buffer is not None and buffer.holders == 1 and buffer.bytes == size:
                    buffer.holders = 2
                    slots[slot] = buffer
                    break
            else:
                slots[slot] = self._heap.allocate(size, number)

    def _update(self, number: int, variable: int) -> None:
        """Update a variable in place, or in a copy if its buffer has other holders."""
        buffer = self.variables[variable]
        if buffer.holders > 1:
            self._replace(variable, self._heap.allocate(buffer.bytes, number))

    def _replace(self, variable: int, new: Buffer) -> None:
        """Give a variable another buffer for its value."""
        old, self.variables[variable] = self.variables[variable], new
        if old is not new:
            new.variable, new.value_from, new.value_to = variable, len(self._heap.log), None
            if old.holders > 1 and old not in self.variables:
                old.value_to = len(self._heap.log)
        self._heap.let_go(old)

    def end(self, number: int) -> None:
        """Release a node's inputs and scratch, and pass its outputs on."""
        recipe, slots = self._recipes[number], self._slots
        if recipe.needs:
            self._release(self._scratch.pop(number))
        if recipe.assigns and recipe.variable is not None and (value := slots[recipe.inputs[1]]) is not None:
            value.holders += 1
            self._replace(recipe.variable, value)
        for slot, more in recipe.taken:
            output = slots[slot]
            if output is not None:
                output.holders += more
        if recipe.returned:
            self._returned += [output for output in map(slots.__getitem__, recipe.returned) if output is not None]
        if recipe.inputs:
            self._release(map(slots.__getitem__, recipe.inputs))
        if recipe.dropped:
            self._release(map(slots.__getitem__, recipe.dropped))

    def _release(self, buffers: Iterable[Buffer | None]) -> None:
        """Remove a holder from each buffer, and free those without holders."""
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
    """Return whether a need takes no new buffer: it is empty, or an input without other holders serves."""
    buffer = None if need.takes_over is None else inputs[need.takes_over]
    return not need.bytes or (buffer is not None and buffer.holders == 1)
