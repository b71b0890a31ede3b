"""TensorFlow's executor, simulated: the order of one step's operations. Pure Python.

As in tensorflow/core/common_runtime/executor.cc, a node is ready when all nodes that it waits for have run:

- An inexpensive node runs inline on the thread that made it ready, first in, first out.
- Of expensive nodes a thread keeps one for itself if it has nothing inline. The others go to the front of its queue.
- A thread takes from the front of its own queue, or else from the back of another's.

A node notifies its consumers in the order in which they were added to the graph (core/graph/edgeset.h). With
TensorFlow's own kernels that is the order of the definition, the same in every process. oneDNN's pass
(mkl_layout_pass.cc) walks the graph depth first and adds a new node for each that it replaces. It starts from the
nodes without inputs, which lie in a set, so processes differ.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Sequence

from kerasmem.devices.kernels import CpuKernels
from kerasmem.estimation.graph.program import Program
from kerasmem.estimation.graph.rules import INEXPENSIVE, table_of, threads_of
from kerasmem.estimation.graph.scratch import Kernels

# A faster kernel is not worth a thread of its own (kOpIsExpensiveThresholdCycles, 8000 cycles).
EXPENSIVE_SECONDS = 3e-6
KEPT_IN_ORDER = 8  # consumers of one node; more lie in a set without an order


class Executor:
    """Runs a program on paper.

    Args:
        program: the step.
        kernels: that run it.
        seconds: time that each node takes; decides the order between threads.
        draw: random numbers that differ between processes.
        threads: how many operations run at once. Defaults to that of the kernels.
    """

    def __init__(
        self,
        program: Program,
        kernels: Kernels,
        seconds: Sequence[float],
        draw: random.Random | None = None,
        threads: int | None = None,
    ) -> None:
        nodes = program.nodes
        self._threads = threads or threads_of(kernels)
        self._seconds = seconds
        self._expensive = [False] * len(nodes)
        if isinstance(kernels, CpuKernels):
            self._expensive = _expensive(program, seconds)
        self._draw = draw or random.Random(0)
        self._consumers = _consumers_in_order(program, kernels, self._draw)
        counts = Counter(itertools.chain.from_iterable(self._consumers))
        self._waits = [counts[number] for number in range(len(nodes))]
        self._sources = [number for number, wait in enumerate(self._waits) if not wait]
        if len(self._sources) > KEPT_IN_ORDER:  # they wait for a node of their own that comes before all
            self._draw.shuffle(self._sources)

    def order(self, variation: float = 0.0) -> list[tuple[int, bool]]:
        """Return the step as (node, whether it ends): each node starts and ends once.

        Args:
            variation: standard deviation of the logarithm of an operation's time. Defaults to 0.
        """
        seconds, expensive, waits = self._seconds, self._expensive, list(self._waits)
        draw = self._draw
        threads = _Threads(self._threads)
        threads.hand(0, self._sources, expensive)
        idle = list(range(self._threads))  # the thread that became idle last comes first
        clock: list[tuple[float, int, int]] = []  # (end, thread, node)
        steps: list[tuple[int, bool]] = []
        now = 0.0
        while True:
            for thread in tuple(idle):
                number = threads.take(thread)
                if number is None:  # nor is there one for the other threads
                    break
                idle.remove(thread)
                steps.append((number, False))
                took = seconds[number] * draw.lognormvariate(0, variation)
                heapq.heappush(clock, (now + took, thread, number))
            if not clock:
                return steps
            now, thread, number = heapq.heappop(clock)
            steps.append((number, True))
            idle.insert(0, thread)
            ready = []
            for consumer in self._consumers[number]:
                waits[consumer] -= 1
                if not waits[consumer]:
                    ready.append(consumer)
            threads.hand(thread, ready, expensive)


def _expensive(program: Program, seconds: Sequence[float]) -> list[bool]:
    """Return whether TensorFlow considers each operation expensive.

    It does so for the first ninety runs of a kernel, unless the kernel declares itself inexpensive. In a loop those
    runs are soon over, and the kernel's time decides.
    """
    runs = Counter(node.name for node in program.nodes)
    return [
        node.type not in INEXPENSIVE and (took > EXPENSIVE_SECONDS or runs[node.name] == 1)
        for node, took in zip(program.nodes, seconds, strict=True)
    ]


class _Threads:
    """The threads of the pool: their queues, and the nodes that they run inline."""

    def __init__(self, count: int) -> None:
        self._queues: list[deque[int]] = [deque() for _ in range(count)]
        self._inline: list[deque[int]] = [deque() for _ in range(count)]

    def hand(self, thread: int, ready: list[int], expensive: list[bool]) -> None:
        """Hand a thread the nodes that it made ready."""
        inline, kept = self._inline[thread], None
        queued: list[int] = []
        for number in ready:
            if not expensive[number]:
                inline.append(number)
                continue
            if kept is not None:
                queued.append(kept)
            kept = number
        if kept is not None:
            (queued if inline else inline).append(kept)
        self._queues[thread].extendleft(queued)

    def take(self, thread: int) -> int | None:
        """Return the next node of an idle thread, or None if there is none."""
        own = self._inline[thread] or self._queues[thread]
        if own:
            return own.popleft()
        return next((queue.pop() for queue in self._queues if queue), None)


def _consumers_in_order(program: Program, kernels: Kernels, draw: random.Random) -> list[list[int]]:
    """Return each node's consumers in the order in which a process notifies them.

    A consumer appears once for each tensor that it takes. Nodes that only wait for the end come last.
    """
    taking: list[list[int]] = [[] for _ in program.nodes]
    after: list[list[int]] = [[] for _ in program.nodes]
    for number in _order_of_adding(program, kernels, draw):
        node = program.nodes[number]
        for source, _ in node.inputs:
            taking[source].append(number)
        for source in node.controls:
            after[source].append(number)
    for consumers in (*taking, *after):
        if len(consumers) > KEPT_IN_ORDER:
            draw.shuffle(consumers)
    return [[*first, *then] for first, then in zip(taking, after, strict=True)]


def _order_of_adding(program: Program, kernels: Kernels, draw: random.Random) -> list[int]:
    """Return the nodes in the order in which they are added to the graph.

    Of the nodes whose inputs are there, the one with the lowest rank comes first (graph_constructor.cc). Nodes that
    oneDNN replaces rank behind all others.
    """
    nodes = program.nodes
    ranks = list(range(len(nodes)))
    replaced = [number for number in ranks if nodes[number].type in table_of(nodes[number], kernels).rewritten]
    if not replaced:
        return ranks
    waiting = _waiting(program)
    depth_first = {number: rank for rank, number in enumerate(_depth_first(waiting, draw))}
    for number in replaced:
        ranks[number] = len(nodes) + depth_first[number]
    counts = Counter(itertools.chain.from_iterable(waiting))
    ready = [(ranks[number], number) for number in range(len(nodes)) if not counts[number]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for consumer in waiting[number]:
            counts[consumer] -= 1
            if not counts[consumer]:
                heapq.heappush(ready, (ranks[consumer], consumer))
    return order


def _waiting(program: Program) -> list[list[int]]:
    """Return the nodes that wait for each node, once for each tensor that they take."""
    waiting: list[list[int]] = [[] for _ in program.nodes]
    for number, node in enumerate(program.nodes):
        for source in (*(source for source, _ in node.inputs), *node.controls):
            waiting[source].append(number)
    return waiting


def _depth_first(waiting: list[list[int]], draw: random.Random) -> list[int]:
    """Return the nodes in reverse postorder of a depth-first search (core/graph/algorithm.cc)."""
    awaiting = set(itertools.chain.from_iterable(waiting))
    stack = [number for number in range(len(waiting)) if number not in awaiting]
    draw.shuffle(stack)
    postorder: list[int] = []
    seen: set[int] = set()
    while stack:
        number = stack.pop()
        if number < 0:
            postorder.append(~number)
        elif number not in seen:
            seen.add(number)
            stack.append(~number)
            stack += [consumer for consumer in waiting[number] if consumer not in seen]
    return postorder[::-1]
