"""The order in which nodes that become ready together come: that of TensorFlow's graph when it runs. Pure Python.

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

from kerasmem.estimation.graph.program import ABSORBED, Program
from kerasmem.estimation.graph.rules import KernelRules

KEPT_IN_ORDER = 8  # consumers of one node; more lie in a set without an order


def consumers_in_order(program: Program, rules: KernelRules, draw: random.Random) -> list[list[int]]:
    """Return of each node those that wait for it, in the order in which a process hands on to them.

    A consumer stands there once for each tensor that it takes, those that only wait for the end behind the others.

    Args:
        program: the step.
        rules: of the kernels.
        draw: decides what differs from process to process.
    """
    if program.folded is None:
        return _handed_on(program, rules, draw)
    places: list[dict[int, int]] = [
        {consumer: place for place, consumer in enumerate(each)} for each in _handed_on(program.folded, rules, draw)
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


def _handed_on(program: Program, rules: KernelRules, draw: random.Random) -> list[list[int]]:
    rewritten = [node.type in rules.of(node).rewritten for node in program.nodes]
    order = list(range(len(rewritten)))
    if any(rewritten):
        last = len(rewritten)
        ranks = {node: last + place for place, node in enumerate(_in_depth(_merged(program, order), draw))}
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


def _merged(program: Program, order: list[int]) -> list[list[int]]:
    """Return of each node those that wait for it, when what others have taken over has left the graph.

    Who takes something over is added behind the others. Where one leaves, the last comes into its place.
    """
    waiting: list[list[int]] = [[] for _ in order]
    left = {
        node.attributes[ABSORBED]: number for number, node in enumerate(program.nodes) if ABSORBED in node.attributes
    }
    for number in order:
        for source in _sources(program, number):
            waiting[source].append(number)
        if number in left:
            waiting[program.nodes[left[number]].inputs[2][0]].append(number)
    for gone, number in left.items():
        for source in set(_sources(program, number)):
            each = waiting[source]
            each.append(number)
            for leaving in (gone, number):
                if leaving in each[:-1]:
                    each[each.index(leaving)] = each[-1]
                    each.pop()
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
