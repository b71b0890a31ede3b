"""TensorFlow's executor and the memory of one step, simulated. Pure Python.

Order, as in tensorflow/core/common_runtime/executor.cc: a node is ready when all it waits for has run. Inexpensive
nodes run inline on the thread that made them ready, first in, first out. Of the expensive ones a thread keeps one for
itself where it has nothing inline; the others go to the front of its queue in the thread pool. Threads take from the
front of their own queue and from the back of another's.

Memory: a buffer lives as long as somebody holds it (an edge to an operation that has not run yet, a variable, the
caller). An operation may take over an input's buffer where it is the only holder.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator

from kerasmem.estimation.graph.heap import Buffer, Heap, make_variables
from kerasmem.estimation.graph.program import Node, NotModelled, Program, Tensor
from kerasmem.estimation.graph.rules import ALIASES, INEXPENSIVE, NOTHING, TAKEN_FROM_LIST, UPDATES, KernelRules
from kerasmem.estimation.graph.scratch import Need

# Below this a kernel is not worth a thread of its own (kOpIsExpensiveThresholdCycles, 8000 cycles).
EXPENSIVE_SECONDS = 3e-6


class Executor:
    """Runs a program once, on paper.

    Args:
        program: the step.
        rules: of the kernels.
        seconds: how long an operation takes; decides the order between threads.
        is_reversed: operations that become ready together come in the reverse of the graph's order. TensorFlow's own
            is not the same in two processes: its passes go through sets of nodes that have no order.
    """

    def __init__(
        self, program: Program, rules: KernelRules, seconds: Callable[[Node], float], is_reversed: bool = False
    ) -> None:
        self._program, self._rules = program, rules
        nodes = program.nodes
        self._seconds = [seconds(node) for node in nodes]
        self._expensive = [
            node.type not in INEXPENSIVE and took > EXPENSIVE_SECONDS
            for node, took in zip(nodes, self._seconds, strict=True)
        ]
        self.consumers: list[list[list[int]]] = [[[] for _ in node.outputs] for node in nodes]
        self._after: list[list[int]] = [[] for _ in nodes]
        self._waits = [len(node.inputs) + len(node.controls) for node in nodes]
        for number in range(len(nodes))[:: -1 if is_reversed else 1]:
            node = nodes[number]
            for source, output in node.inputs:
                self.consumers[source][output].append(number)
            for source in node.controls:
                self._after[source].append(number)
        self.results: dict[tuple[int, int], int] = {}
        for end in program.results:
            self.results[end] = self.results.get(end, 0) + 1

    def order(self, vary: Callable[[float], float] = float) -> list[tuple[int, bool]]:
        """Return the step as (node, is it the end): each node starts and ends once.

        Args:
            vary: from an operation's usual time to the one it takes now.
        """
        waits = list(self._waits)
        workers = _Workers(self._rules.workers, [number for number, wait in enumerate(waits) if not wait])
        clock: list[tuple[float, int, int]] = []  # (end, worker, node)
        steps: list[tuple[int, bool]] = []
        now = 0.0

        def start_idle() -> None:
            for worker, number in workers.start():
                steps.append((number, False))
                heapq.heappush(clock, (now + vary(self._seconds[number]), worker, number))

        start_idle()
        while clock:
            now, worker, number = heapq.heappop(clock)
            steps.append((number, True))
            ready = self._made_ready(number, waits)
            workers.hand(worker, [(each, self._expensive[each]) for each in ready])
            start_idle()
        return steps

    def _made_ready(self, number: int, waits: list[int]) -> list[int]:
        """Count down what waits for a node that has run; return what waits for nothing more."""
        ready = []
        for each in (*itertools.chain.from_iterable(self.consumers[number]), *self._after[number]):
            waits[each] -= 1
            if not waits[each]:
                ready.append(each)
        return ready


class _Workers:
    """The threads of the pool, each with a queue that others take from and nodes that it runs inline."""

    def __init__(self, count: int, ready: list[int]) -> None:
        self._queues: list[deque[int]] = [deque(ready[place::count]) for place in range(count)]
        self._inline: list[deque[int]] = [deque() for _ in range(count)]
        self._idle = list(range(count))

    def start(self) -> Iterator[tuple[int, int]]:
        """Yield idle threads, which then are busy, with the node that each takes."""
        for worker in list(self._idle):
            number = self._take(worker)
            if number is not None:
                self._idle.remove(worker)
                yield worker, number

    def hand(self, worker: int, ready: list[tuple[int, bool]]) -> None:
        """Hand a thread that is done, and idle now, the nodes that it made ready, and whether each is expensive."""
        inline, kept = self._inline[worker], None
        handed: list[int] = []
        for number, is_expensive in ready:
            if not is_expensive:
                inline.append(number)
                continue
            if kept is not None:
                handed.append(kept)
            kept = number
        if kept is not None:
            (handed if inline else inline).append(kept)
        self._queues[worker].extendleft(handed)
        self._idle.insert(0, worker)

    def _take(self, worker: int) -> int | None:
        for own in (self._inline[worker], self._queues[worker]):
            if own:
                return own.popleft()
        others = (queue for place, queue in enumerate(self._queues) if place != worker and queue)
        queue = next(others, None)
        return None if queue is None else queue.pop()


class Memory:
    """The buffers of a training process as the nodes of its steps start and end.

    Args:
        program: the step.
        rules: of the kernels.
        executor: it knows who consumes what.
        heap: where buffers come from; the variables are made in it at once.
    """

    def __init__(self, program: Program, rules: KernelRules, executor: Executor, heap: Heap) -> None:
        self._program, self._rules, self._heap = program, rules, heap
        self.consumers, self.results = executor.consumers, executor.results
        batch = [(number, program.nodes[number].outputs[0].bytes or 0) for number in program.arguments]
        self.variables = make_variables(program.variables, batch, heap)
        # A constant's kernel keeps its value from the first step on; spelled-out loops name the same one many times.
        for number in {node.name: number for number, node in enumerate(program.nodes) if node.type == "Const"}.values():
            heap.allocate(program.nodes[number].outputs[0].bytes or 0, number)
        self.made: list[list[Buffer | None] | None] = [None] * len(program.nodes)
        self._scratch: dict[int, list[Buffer]] = {}
        self._taken: dict[int, list[Buffer | None]] = {}
        self._returned: list[Buffer] = []

    def run(self, order: list[tuple[int, bool]]) -> None:
        """Run one step in an order from `Executor.order`; what it returned is dropped."""
        for number, is_end in order:
            if is_end:
                self.end(number)
            else:
                self.start(number)
        for buffer in self._returned:
            self._heap.let_go(buffer)
        self._returned.clear()

    def start(self, number: int) -> None:
        """Allocate what the node needs."""
        node = self._program.nodes[number]
        inputs = [self.made[source][output] for source, output in node.inputs]  # type: ignore[index]
        kind = node.type
        outputs: list[Buffer | None] = [None] * len(node.outputs)
        if kind in NOTHING:
            if kind in UPDATES:
                self._update(number, node)
        elif kind == "ReadVariableOp":
            outputs[0] = self._hold(self.variables[_variable(node)])
        elif kind in ALIASES:
            for place in range(len(outputs)):
                outputs[place] = self._hold(inputs[place if kind == "IdentityN" else 0])
        elif kind in TAKEN_FROM_LIST and len(inputs) > TAKEN_FROM_LIST[kind]:
            outputs[-1] = self._hold(inputs[TAKEN_FROM_LIST[kind]])
        elif kind == "Split" and _is_first_axis(self._program, node):
            outputs = [self._hold(inputs[1]) for _ in outputs]
        else:
            self._compute(number, node, inputs, outputs)
        needs = [need for need in self._needs(node) if not self._is_served(need, inputs)]
        if needs:
            self._scratch[number] = [self._heap.allocate(need.bytes, number, is_scratch=True) for need in needs]
        self.made[number] = outputs
        self._taken[number] = inputs

    def _needs(self, node: Node) -> tuple[Need, ...]:
        """Return the buffers that the node needs while it runs."""
        rules = self._rules.of(node)
        scratch, compiled = rules.scratch.get(node.type), node.attributes.get("scratch", 0)
        if scratch is None:
            return (Need(compiled),) if compiled else ()
        inputs = tuple(self._program.nodes[source].outputs[output] for source, output in node.inputs)
        return scratch(node, inputs, rules.cores)

    def _is_served(self, need: Need, inputs: list[Buffer | None]) -> bool:
        """Return whether no buffer is needed: there is nothing to hold, or an input's serves, which is held anyway."""
        buffer = None if need.takes_over is None else inputs[need.takes_over]
        return not need.bytes or (buffer is not None and buffer.holders == 1)

    def _hold(self, buffer: Buffer | None) -> Buffer | None:
        if buffer is not None:
            buffer.holders += 1
        return buffer

    def _compute(self, number: int, node: Node, inputs: list[Buffer | None], outputs: list[Buffer | None]) -> None:
        for place, tensor in enumerate(node.outputs):
            if tensor.dtype in ("resource", "variant"):
                continue
            if tensor.bytes is None:
                raise NotModelled(f"the size of {node.name} ({node.type}) depends on the data")
            if place == 0:
                outputs[place] = self._forwarded(node, inputs, tensor, self._rules.candidates(node))
            elif node.type == "SparseSoftmaxCrossEntropyWithLogits" and place == 1:
                outputs[place] = self._forwarded(node, inputs, tensor, (0,))
            if outputs[place] is None:
                outputs[place] = self._heap.allocate(tensor.bytes, number)

    def _forwarded(
        self, node: Node, inputs: list[Buffer | None], output: Tensor, candidates: tuple[int, ...] | None
    ) -> Buffer | None:
        """Return the input's buffer that the output takes over, held by the node once more, or None."""
        for place in range(len(inputs)) if candidates is None else candidates:
            if place >= len(inputs):
                break
            buffer, (source, made) = inputs[place], node.inputs[place]
            tensor = self._program.nodes[source].outputs[made]
            alike = tensor.bytes == output.bytes and tensor.dtype == output.dtype
            if buffer is not None and buffer.holders == 1 and alike and buffer.bytes == output.bytes:
                buffer.holders += 1
                return buffer
        return None

    def _update(self, number: int, node: Node) -> None:
        """Note an update in place; a variable whose buffer somebody else holds is copied first."""
        held = self.variables[_variable(node)]
        if held.holders > 1:
            self._replace(_variable(node), self._heap.allocate(held.bytes, number))

    def _replace(self, variable: int, new: Buffer) -> None:
        """Give a variable another buffer for its value."""
        old, self.variables[variable] = self.variables[variable], new
        if old is not new:
            new.variable, new.value_from, new.value_to = variable, len(self._heap.log), None
            if old.holders > 1 and not any(each is old for each in self.variables):
                old.value_to = len(self._heap.log)
        self._heap.let_go(old)

    def end(self, number: int) -> None:
        """Release what the node held, and hand its outputs on."""
        node = self._program.nodes[number]
        for scratch in self._scratch.pop(number, ()):
            self._heap.let_go(scratch)
        inputs = self._taken.pop(number)
        if node.type == "AssignVariableOp" and inputs[1] is not None:
            inputs[1].holders += 1
            self._replace(_variable(node), inputs[1])
        for place, buffer in enumerate(self.made[number] or ()):
            if buffer is not None:
                kept = self.results.get((number, place), 0)
                buffer.holders += len(self.consumers[number][place]) + kept
                self._returned.extend([buffer] * kept)
        for buffer in inputs:
            if buffer is not None:
                self._heap.let_go(buffer)
        for buffer in self.made[number] or ():
            if buffer is not None:
                self._heap.let_go(buffer)


def _variable(node: Node) -> int:
    if node.variable is None:
        raise NotModelled(f"{node.name} ({node.type}): which variable it works on is not known")
    return node.variable


def _is_first_axis(program: Program, node: Node) -> bool:
    axis = program.nodes[node.inputs[0][0]].attributes.get("value")
    return axis is not None and int(axis) == 0
