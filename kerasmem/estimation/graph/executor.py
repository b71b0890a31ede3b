"""TensorFlow's executor, simulated: the order of one step's operations. Pure Python.

As in tensorflow/core/common_runtime/executor.cc: a node is ready when all it waits for has run; one thread finds those
that wait for nothing ready all at once. Inexpensive ones run inline on the thread that made them ready, first in, first
out. Of the expensive ones a thread keeps one for itself where it has nothing inline; the others go to the front of its
queue in the thread pool. Threads take from the front of their queue and from the back of another's. What only hands
on from one iteration of a loop to another is run inline too, in no time.

An operation hands on to its consumers in the order in which these were added to the graph (core/graph/edgeset.h), and
a graph is made of its definition by adding, of the nodes whose inputs are there, the first (graph_constructor.cc). For
TensorFlow's own kernels that is the definition's order, the same in every process. For oneDNN's a pass goes through
the graph in depth and puts a new node in the place of each that it rewrites, behind all others (mkl_layout_pass.cc).
It begins with the nodes without inputs, which lie in a set without an order, so that processes differ.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Sequence

from kerasmem.devices.kernels import CpuKernels
from kerasmem.estimation.graph.control import CONTROL
from kerasmem.estimation.graph.program import Program
from kerasmem.estimation.graph.rules import INEXPENSIVE, table_of, threads_of
from kerasmem.estimation.graph.scratch import Kernels

# Below this a kernel is not worth a thread of its own (kOpIsExpensiveThresholdCycles, 8000 cycles).
EXPENSIVE_SECONDS = 3e-6
KEPT_IN_ORDER = 8  # consumers of one node; more lie in a set without an order


class Executor:
    """Runs a program once, on paper.

    Args:
        program: the step.
        kernels: that run it.
        seconds: time that each node takes; decides the order between threads.
        draw: decides what differs from process to process.
    """

    def __init__(
        self,
        program: Program,
        kernels: Kernels,
        seconds: Sequence[float],
        draw: random.Random | None = None,
    ) -> None:
        nodes = program.nodes
        self._workers = threads_of(kernels)
        self._seconds = seconds
        self._expensive = [False] * len(nodes)
        if isinstance(kernels, CpuKernels):
            self._expensive = _expensive(program, seconds)
        self._hands_on = [program.folded is not None and node.type in CONTROL for node in nodes]
        self._draw = draw or random.Random(0)
        self._waiting = consumers_in_order(program, kernels, self._draw)
        self._waits = [0] * len(nodes)
        for number in itertools.chain.from_iterable(self._waiting):
            self._waits[number] += 1
        self._first = [number for number, wait in enumerate(self._waits) if not wait]
        if len(self._first) > KEPT_IN_ORDER:  # they wait for a node of their own that comes before all
            self._draw.shuffle(self._first)
        self._starts = [(number, False) for number in range(len(nodes))]
        self._ends = [(number, True) for number in range(len(nodes))]

    def order(self, variation: float = 0.0) -> list[tuple[int, bool]]:
        """Return the step as (node, is it the end): each node starts and ends once.

        Args:
            variation: standard deviation of the logarithm of an operation's time. Defaults to 0.
        """
        seconds, expensive, waits = self._seconds, self._expensive, list(self._waits)
        hands_on, draw = self._hands_on, self._draw
        workers = _Workers(self._workers)
        workers.hand(0, self._first, expensive)
        idle = list(range(self._workers))  # the one that became idle last comes first
        clock: list[tuple[float, int, int]] = []  # (end, worker, node)
        steps: list[tuple[int, bool]] = []
        now = 0.0
        while True:
            for worker in tuple(idle):
                number = workers.take(worker)
                while number is not None and hands_on[number]:
                    workers.hand(worker, self._made_ready(number, waits), expensive)
                    number = workers.take(worker)
                if number is None:  # nor is there one for those that come after it
                    break
                idle.remove(worker)
                steps.append(self._starts[number])
                took = seconds[number] * draw.lognormvariate(0, variation)
                heapq.heappush(clock, (now + took, worker, number))
            if not clock:
                return steps
            now, worker, number = heapq.heappop(clock)
            steps.append(self._ends[number])
            idle.insert(0, worker)
            ready = self._made_ready(number, waits)
            if ready:
                workers.hand(worker, ready, expensive)

    def _made_ready(self, number: int, waits: list[int]) -> list[int]:
        """Return those that waited for a node alone; `waits` says for how many each still does."""
        ready = []
        for each in self._waiting[number]:
            left = waits[each] - 1
            waits[each] = left
            if not left:
                ready.append(each)
        return ready


def _expensive(program: Program, seconds: Sequence[float]) -> list[bool]:
    """Return whether TensorFlow takes each operation to be expensive.

    It does so for the first ninety runs of a kernel, unless the kernel calls itself inexpensive. In a loop, those runs
    are over soon, and the time that it takes decides.
    """
    runs = Counter(program.origins)
    is_in_loop = [runs[origin] > 1 for origin in program.origins]
    is_in_loop += [False] * (len(program.nodes) - len(is_in_loop))
    return [
        node.type not in INEXPENSIVE and (took > EXPENSIVE_SECONDS or not in_loop)
        for node, took, in_loop in zip(program.nodes, seconds, is_in_loop, strict=True)
    ]


class _Workers:
    """The threads of the pool, each with a queue that others take from and nodes that it runs inline."""

    def __init__(self, count: int) -> None:
        self._queues: list[deque[int]] = [deque() for _ in range(count)]
        self._inline: list[deque[int]] = [deque() for _ in range(count)]

    def hand(self, worker: int, ready: list[int], expensive: list[bool]) -> None:
        """Hand a thread that is done the nodes that it made ready; `expensive` says of each node whether it is."""
        inline, kept = self._inline[worker], None
        handed: list[int] = []
        for number in ready:
            if not expensive[number]:
                inline.append(number)
                continue
            if kept is not None:
                handed.append(kept)
            kept = number
        if kept is not None:
            (handed if inline else inline).append(kept)
        self._queues[worker].extendleft(handed)

    def take(self, worker: int) -> int | None:
        """Return the node that an idle thread takes; None where there is none for it."""
        own = self._inline[worker] or self._queues[worker]
        if own:
            return own.popleft()
        return next((queue.pop() for queue in self._queues if queue), None)  # its own is empty


def consumers_in_order(program: Program, kernels: Kernels, draw: random.Random) -> list[list[int]]:
    """Return of each node those that wait for it, in the order in which a process hands on to them.

    A consumer stands there once for each tensor that it takes, those that only wait for the end behind the others.

    Args:
        program: the step.
        kernels: that run it.
        draw: decides what differs from process to process.
    """
    if program.folded is None:
        return _handed_on(program, kernels, draw)
    places: list[dict[int, int]] = [
        {consumer: place for place, consumer in enumerate(each)} for each in _handed_on(program.folded, kernels, draw)
    ]
    origins = [*program.origins, *(-1 for _ in program.nodes[len(program.origins) :])]
    places.append({})  # of nodes that were no operation
    waiting: list[list[int]] = [[] for _ in origins]
    for number in range(len(origins)):
        for source in program.awaited(number):
            waiting[source].append(number)
    for source, each in enumerate(waiting):
        if len(each) > 1:
            place = places[origins[source]]
            each.sort(key=lambda number: place.get(origins[number], -1))
    return waiting


def _handed_on(program: Program, kernels: Kernels, draw: random.Random) -> list[list[int]]:
    rewritten = [node.type in table_of(node, kernels).rewritten for node in program.nodes]
    order = list(range(len(rewritten)))
    if any(rewritten):
        last = len(rewritten)
        ranks = {node: last + place for place, node in enumerate(_in_depth(_waiting_for(program), draw))}
        order = _added(program, [ranks[number] if rewritten[number] else number for number in order])
    taking: list[list[int]] = [[] for _ in order]
    after: list[list[int]] = [[] for _ in order]
    for number in order:
        node = program.nodes[number]
        for source, _ in node.inputs:
            taking[source].append(number)
        for source in node.controls:
            after[source].append(number)
    for each in (*taking, *after):
        if len(each) > KEPT_IN_ORDER:
            draw.shuffle(each)
    return [[*first, *then] for first, then in zip(taking, after, strict=True)]


def _waiting_for(program: Program) -> list[list[int]]:
    """Return the nodes that wait for each node, once for each tensor that they take."""
    waiting: list[list[int]] = [[] for _ in program.nodes]
    for number in range(len(waiting)):
        for source in _sources(program, number):
            waiting[source].append(number)
    return waiting


def _sources(program: Program, number: int) -> list[int]:
    node = program.nodes[number]
    return [*(source for source, _ in node.inputs), *node.controls]


def _in_depth(waiting: list[list[int]], draw: random.Random) -> list[int]:
    """Return all nodes in the reverse of the order in which a search in depth is done with them (algorithm.cc)."""
    waited = set(itertools.chain.from_iterable(waiting))
    stack = [number for number in range(len(waiting)) if number not in waited]
    draw.shuffle(stack)
    done: list[int] = []
    seen: set[int] = set()
    while stack:
        number = stack.pop()
        if number < 0:
            done.append(~number)
        elif number not in seen:
            seen.add(number)
            stack.append(~number)
            stack += [each for each in waiting[number] if each not in seen]
    return done[::-1]


def _added(program: Program, ranks: list[int]) -> list[int]:
    """Return the nodes in the order in which they are added: of those whose inputs are there, the lowest rank first."""
    waiting: list[list[int]] = [[] for _ in ranks]
    waits = [0] * len(ranks)
    for number in range(len(ranks)):
        for source in _sources(program, number):
            if program.nodes[source].type != "NextIteration":  # a loop's way back is added last
                waiting[source].append(number)
                waits[number] += 1
    ready = [(ranks[number], number) for number, wait in enumerate(waits) if not wait]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for each in waiting[number]:
            waits[each] -= 1
            if not waits[each]:
                heapq.heappush(ready, (ranks[each], each))
    return order
