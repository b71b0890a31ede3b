"""Simulate the buffers that a step's operations allocate, reuse and free.

A buffer lives while it has holders: edges to operations that have not run yet, variables, the caller. An operation may
reuse an input's buffer if it is the only holder.

The chunks of a step depend on earlier allocations. So the simulation starts as a process does, with the variables'
first values and the batch, and runs a few steps to warm up.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kerasmem.estimation.allocator import NO_VARIABLE, Buffer, Heap
from kerasmem.estimation.graph.program import Node, NotModelled, Program, Variable
from kerasmem.estimation.graph.rules import ALIASES, NOTHING, TAKEN_FROM_LIST, UPDATES, needs, reusable_inputs
from kerasmem.estimation.graph.scratch import Inputs, Kernels

HANDLE_BYTES = 200  # of the small tensor that is a variable's handle


def make_variables(variables: Sequence[Variable], batch: Iterable[tuple[int, int]], heap: Heap) -> list[Buffer]:
    """Create the variables as Keras does, and return their buffers in order.

    Weights are created one by one. A random one is drawn, scaled and shifted in three buffers; the last one remains.
    The optimizer's variables are created by the first call of the step. Those of one shape are filled with the same
    value, so they share a buffer until they are written.

    Args:
        variables: variables in the order of their creation.
        batch: node (or -1) and bytes of each tensor of a batch.
        heap: simulated heap.
    """
    buffers: dict[int, Buffer] = {}
    for number, variable in enumerate(variables):
        heap.allocate(HANDLE_BYTES)
        if variable.kind != "optimizer" or not variable.shape:
            buffers[number] = _first_value(variable, number, heap)
    for node, size in batch:
        heap.allocate(size, node)
    later = [number for number in range(len(variables)) if number not in buffers]
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
    heap.release(scaled)
    heap.release(drawn)
    return shifted


class Recipe(NamedTuple):
    """The buffers that a node uses, computed once for all steps.

    The slot of an output is its number among the outputs of all nodes.

    Attributes:
        inputs: slots of the inputs.
        aliases: (slot, input's slot) of outputs that are an input's buffer.
        computed: (slot, bytes, slots of reusable inputs) of computed outputs.
        needs: bytes of the scratch.
        extra_holders: (slot, number of holders beyond one) of outputs when the node has run.
        reads: (slot, variable that the output is the value of), or None.
        updates: variable that is changed in place, or None.
        assigns: variable that gets the second input as its value, or None.
    """

    inputs: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...]
    computed: tuple[tuple[int, int, tuple[int, ...]], ...]
    needs: tuple[int, ...]
    extra_holders: tuple[tuple[int, int], ...]
    reads: tuple[int, int] | None
    updates: int | None
    assigns: int | None


def recipes_of(program: Program, kernels: Kernels) -> list[Recipe]:
    """Return the recipe of each node.

    Raises:
        NotModelled: If a size or a variable is unknown.
    """
    first = _first_slots(program)
    holders = Counter(end for node in program.nodes for end in node.inputs) + Counter(program.results)
    recipes = []
    for number, node in enumerate(program.nodes):
        is_read, is_update = node.type == "ReadVariableOp", node.type in UPDATES
        if (is_read or is_update) and node.variable is None:
            raise NotModelled(f"the variable of {node.name} ({node.type}) is unknown")
        slots = range(first[number], first[number + 1])
        inputs = tuple(first[source] + output for source, output in node.inputs)
        tensors = tuple(program.nodes[source].outputs[output] for source, output in node.inputs)
        aliases = _aliases(program, node)
        is_computed = aliases is None and node.type not in NOTHING
        recipes.append(
            Recipe(
                inputs=inputs,
                aliases=() if is_read else tuple((slots[output], inputs[source]) for output, source in aliases or ()),
                computed=tuple(_computed_outputs(node, tensors, inputs, slots, kernels)) if is_computed else (),
                needs=tuple(size for size in needs(node, tensors, kernels) if size),
                extra_holders=tuple((slot, holders[number, output] - 1) for output, slot in enumerate(slots)),
                reads=(slots[0], node.variable) if is_read and node.variable is not None else None,
                updates=node.variable if is_update else None,
                assigns=node.variable if node.type == "AssignVariableOp" else None,
            )
        )
    return recipes


def _first_slots(program: Program) -> list[int]:
    return [0, *itertools.accumulate(len(node.outputs) for node in program.nodes)]


def _aliases(program: Program, node: Node) -> list[tuple[int, int]] | None:
    """Return (output, input) of outputs that alias inputs, or None for other nodes."""
    outputs = range(len(node.outputs))
    if node.type in ALIASES:
        return [(output, output if node.type == "IdentityN" else 0) for output in outputs]
    if node.type in TAKEN_FROM_LIST and len(node.inputs) > TAKEN_FROM_LIST[node.type]:
        return [(len(outputs) - 1, TAKEN_FROM_LIST[node.type])]
    if node.type == "Split" and _is_first_axis(program, node):
        return [(output, 1) for output in outputs]
    return None


def _computed_outputs(
    node: Node, inputs: Inputs, input_slots: Sequence[int], slots: Sequence[int], kernels: Kernels
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield the slot, bytes and reusable slots of each computed output."""
    for output, tensor in enumerate(node.outputs):
        if tensor.dtype in ("resource", "variant") or tensor.on_host:
            continue
        if tensor.bytes is None:
            raise NotModelled(f"the size of {node.name} ({node.type}) depends on the data")
        candidates: Sequence[int] | None = reusable_inputs(node, kernels) if output == 0 else ()
        if output == 1 and node.type == "SparseSoftmaxCrossEntropyWithLogits":
            candidates = (0,)
        alike = [
            slot
            for index, (slot, source) in enumerate(zip(input_slots, inputs, strict=True))
            if (candidates is None or index in candidates)
            and (source.bytes, source.dtype) == (tensor.bytes, tensor.dtype)
        ]
        yield slots[output], tensor.bytes, tuple(alike)


def _is_first_axis(program: Program, node: Node) -> bool:
    axis = program.nodes[node.inputs[0][0]].attributes.get("value")
    return axis is not None and int(axis) == 0


class Memory:
    """Buffers of a training process as its nodes start and end.

    Args:
        program: the step.
        recipes: recipes of its nodes, from `recipes_of`.
        heap: simulated heap. The constructor creates the variables on it.
    """

    def __init__(self, program: Program, recipes: Sequence[Recipe], heap: Heap) -> None:
        self._heap = heap
        self._constants: set[str] = set()
        self._scratch: dict[int, list[Buffer]] = {}
        nodes = program.nodes
        batch = [(number, nodes[number].outputs[0]) for number in program.arguments]
        on_device = [(number, tensor.bytes or 0) for number, tensor in batch if not tensor.on_host]
        self.variables = make_variables(program.variables, on_device, heap)
        for _ in range(program.shape_constants):
            heap.allocate(1)
        self.load(program, recipes)

    def load(self, program: Program, recipes: Sequence[Recipe]) -> None:
        """Prepare the next steps for a program, which may take other branches than the last one."""
        self._recipes, nodes = recipes, program.nodes
        # A constant's kernel keeps its value from the first step on. Unrolled loops have the same one many times.
        constants = {node.name: number for number, node in enumerate(nodes) if node.type == "Const"}
        for name, number in constants.items():
            if name not in self._constants and not nodes[number].outputs[0].on_host:
                self._heap.allocate(nodes[number].outputs[0].bytes or 0, number)
        self._constants.update(constants)
        first = _first_slots(program)
        self._results = [first[number] + output for number, output in program.results]
        self._slots: list[Buffer | None] = [None] * first[-1]

    def run(self, order: list[tuple[int, bool]]) -> None:
        """Run one step in an order from `Executor.order`, and drop its results."""
        for number, is_end in order:
            if is_end:
                self.end(number)
            else:
                self.start(number)
        self._release(self._results)

    def start(self, number: int) -> None:
        """Allocate a node's outputs and scratch."""
        recipe, slots = self._recipes[number], self._slots
        for slot, size, candidates in recipe.computed:
            slots[slot] = self._reuse(size, candidates) or self._heap.allocate(size, number)
        for slot, source in recipe.aliases:
            slots[slot] = _hold(slots[source])
        if recipe.reads is not None:
            slot, variable = recipe.reads
            slots[slot] = _hold(self.variables[variable])
        if recipe.updates is not None and self.variables[recipe.updates].holders > 1:
            size = self.variables[recipe.updates].bytes
            self._replace(recipe.updates, self._heap.allocate(size, number))
        if recipe.needs:
            self._scratch[number] = [self._heap.allocate(size, number, is_scratch=True) for size in recipe.needs]

    def _reuse(self, size: int, candidates: Iterable[int]) -> Buffer | None:
        """Hold and return the first reusable buffer of a size, or None."""
        for candidate in candidates:
            buffer = self._slots[candidate]
            if buffer is not None and buffer.holders == 1 and buffer.bytes == size:
                buffer.holders = 2
                return buffer
        return None

    def _replace(self, variable: int, new: Buffer) -> None:
        """Replace a variable's buffer."""
        old, self.variables[variable] = self.variables[variable], new
        if old is not new:
            self._heap.log.append((new, variable))
            if old.holders > 1 and old not in self.variables:
                self._heap.log.append((old, NO_VARIABLE))
        self._heap.release(old)

    def end(self, number: int) -> None:
        """Release a node's inputs and scratch, and pass its outputs on."""
        recipe, slots = self._recipes[number], self._slots
        for buffer in self._scratch.pop(number, ()):
            self._heap.release(buffer)
        if recipe.assigns is not None and (value := slots[recipe.inputs[1]]) is not None:
            value.holders += 1
            self._replace(recipe.assigns, value)
        for slot, holders in recipe.extra_holders:
            output = slots[slot]
            if output is not None:
                output.holders += holders + 1
                self._heap.release(output)
        self._release(recipe.inputs)

    def _release(self, slots: Iterable[int]) -> None:
        """Remove a holder from the buffer of each slot."""
        for slot in slots:
            buffer = self._slots[slot]
            if buffer is not None:
                self._heap.release(buffer)


def _hold(buffer: Buffer | None) -> Buffer | None:
    if buffer is not None:
        buffer.holders += 1
    return buffer
