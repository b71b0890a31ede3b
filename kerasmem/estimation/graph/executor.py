"""Simulation of TensorFlow's executor: the order of one step's operations.

As in tensorflow/core/common_runtime/executor.cc, a node is ready when all nodes that it waits for have run:

- An inexpensive node runs inline on the thread that made it ready, first in, first out.
- A thread keeps one expensive node for itself if it has no inline nodes. The others go to the front of its queue.
- A thread takes nodes from the front of its own queue, or else from the back of another thread's.

A node notifies its consumers in the order in which they were added to the graph (core/graph/edgeset.h). With
TensorFlow's own kernels that is the order of the definition, the same in every process. oneDNN's pass
(mkl_layout_pass.cc) walks the graph depth first and adds a new node for each that it replaces. It starts from a set of
the nodes without inputs, so processes differ.
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

EXPENSIVE_SECONDS = 3e-6  # faster kernels run inline (kOpIsExpensiveThresholdCycles, 8000 cycles)
MOST_ORDERED = 8  # consumers of one node; more are in a set without an order


class Executor:
    """Orders a program's operations as TensorFlow's threads do.

    Args:
        program: the step.
        kernels: kernels of the CPU or card that runs it.
        seconds: time of each node, which decides the order between threads.
        draw: random numbers of a process. Defaults to a fixed seed.
        threads: number of operations that run at once. Defaults to the kernels' number.
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
        if len(self._sources) > MOST_ORDERED:  # they are the consumers of TensorFlow's source node
            self._draw.shuffle(self._sources)

    def order(self, variation: float = 0.0) -> list[tuple[int, bool]]:
        """Return the step as (node, whether it ends), in order.

        Args:
            variation: standard deviation of the logarithm of an operation's time. Defaults to 0.
        """
        seconds, expensive, waits = self._seconds, self._expensive, list(self._waits)
        draw = self._draw
        threads = _Threads(self._threads)
        threads.hand(0, self._sources, expensive)
        idle = list(range(self._threads))  # the last idle thread comes first
        clock: list[tuple[float, int, int]] = []  # (end, thread, node)
        steps: list[tuple[int, bool]] = []
        now = 0.0
        while True:
            for thread in tuple(idle):
                number = threads.take(thread)
                if number is None:  # all queues are empty
                    break
                idle.remove(thread)
                steps.append((number, False))
                duration = seconds[number] * draw.lognormvariate(0, variation)
                heapq.heappush(clock, (now + duration, thread, number))
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

    The first ninety runs of a kernel are expensive, unless the kernel declares itself inexpensive. Loops soon exceed
    ninety runs, and the kernel's time decides.
    """
    runs = Counter(node.name for node in program.nodes)
    return [
        node.type not in INEXPENSIVE and (duration > EXPENSIVE_SECONDS or runs[node.name] == 1)
        for node, duration in zip(program.nodes, seconds, strict=True)
    ]


class _Threads:
    """The threads of the pool: their queues, and their inline nodes."""

    def __init__(self, count: int) -> None:
        self._queues: list[deque[int]] = [deque() for _ in range(count)]
        self._inline: list[deque[int]] = [deque() for _ in range(count)]

    def hand(self, thread: int, ready: list[int], expensive: list[bool]) -> None:
        """Hand a thread the nodes that it made ready."""
        inline, last = self._inline[thread], None
        queued: list[int] = []
        for number in ready:
            if not expensive[number]:
                inline.append(number)
                continue
            if last is not None:
                queued.append(last)
            last = number
        if last is not None:
            (queued if inline else inline).append(last)
        self._queues[thread].extendleft(queued)

    def take(self, thread: int) -> int | None:
        """Take the next node for an idle thread, or return None."""
        own = self._inline[thread] or self._queues[thread]
        if own:
            return own.popleft()
        return next((queue.pop() for queue in self._queues if queue), None)


def _consumers_in_order(program: Program, kernels: Kernels, draw: random.Random) -> list[list[int]]:
    """Return each node's consumers in the order in which a process notifies them.

    A consumer appears once for each of its inputs. Consumers by control edges come last.
    """
    by_data: list[list[int]] = [[] for _ in program.nodes]
    by_control: list[list[int]] = [[] for _ in program.nodes]
    for number in _insertion_order(program, kernels, draw):
        node = program.nodes[number]
        for source, _ in node.inputs:
            by_data[source].append(number)
        for source in node.controls:
            by_control[source].append(number)
    for consumers in (*by_data, *by_control):
        if len(consumers) > MOST_ORDERED:
            draw.shuffle(consumers)
    return [[*first, *then] for first, then in zip(by_data, by_control, strict=True)]


def _insertion_order(program: Program, kernels: Kernels, draw: random.Random) -> list[int]:
    """Return the nodes in their order of insertion into the graph.

    Among nodes with all inputs added, the one with the lowest rank comes first (graph_constructor.cc). Nodes that
    oneDNN replaces rank behind all others.
    """
    nodes = program.nodes
    ranks = list(range(len(nodes)))
    replaced = [number for number in ranks if nodes[number].type in table_of(nodes[number], kernels).rewritten]
    if not replaced:
        return ranks
    waiting = _list_consumers(program)
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


def _list_consumers(program: Program) -> list[list[int]]:
    """Return each node's consumers, once for each input and control edge."""
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
