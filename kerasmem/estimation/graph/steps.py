"""The graph method: several steps of a training process simulated, and the peak of the usual one divided up."""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

from kerasmem.devices.kernels import CardKernels, CpuKernels
from kerasmem.estimation.allocator import LARGEST_WASTE, BFCAllocator, smallest_limit
from kerasmem.estimation.graph.costs import VARIATION, seconds
from kerasmem.estimation.graph.cuda import WORKSPACE_LIMIT
from kerasmem.estimation.graph.executor import SETTLED, Executor
from kerasmem.estimation.graph.memory import Buffer, Heap, Memory, Peak
from kerasmem.estimation.graph.placement import host_bytes
from kerasmem.estimation.graph.program import COPY, Node, Program
from kerasmem.estimation.graph.rules import KINDS, is_known, table_of, threads_of, title_of
from kerasmem.estimation.graph.scratch import Kernels
from kerasmem.estimation.report import SPREAD, Outcome, Pool, Shares, Unmodelled
from kerasmem.models.op_names import CATEGORIES, Attribution
from kerasmem.processes.guarding import note_stage

# Processes are simulated one after another, each with its own heap: what the first steps leave behind and, with some
# kernels, the order of operations stay what they are for as long as a process lives.
PROCESSES, WARM_UP_STEPS, STEPS, FEWEST_STEPS = 8, 2, 4, 2
_BEYOND = KINDS["cuda"]["missing"]  # what a step on a card takes beyond the total, where such operations are
# The smallest matrix product takes this long, with either kind of kernels (steps of a GRU over few features, traced).
# In loops it decides whether a thread keeps it for itself.
SMALLEST_PRODUCT_SECONDS = 7e-6
MOST_OPERATIONS = 300_000  # to simulate in all; longer steps are simulated fewer times
# A thread that is woken may be put on the processor of the one that woke it (on virtual machines most are), where it
# waits until Linux balances its processors: at a tick, 250 times a second. In a step without a tick threads take turns.
TICK_SECONDS = 4e-3


def graph_outcome(program: Program, layer_of: dict[int, str], attribution: Attribution, kernels: Kernels) -> Outcome:
    """Return the peak of a step in graph mode.

    Args:
        program: the step.
        layer_of: variable's number → layer.
        attribution: for the names of operations.
        kernels: that run it.

    Raises:
        NotModelled: the step holds something without a rule.
    """
    times = _times(program, kernels)
    simulated = _simulate(program, kernels, times)
    is_on_cpu = isinstance(kernels, CpuKernels)
    most = max(peak.in_use for peak in _largest(program, kernels, times))
    spread = SPREAD["graph"] if is_on_cpu else 0.0
    by_size = sorted(((peak, heap) for heap, peaks in simulated for peak in peaks), key=lambda each: each[0].in_use)
    sizes = [peak.in_use for peak, _ in by_size]
    # Where the order of threads decides between some outcomes, a mean hangs less on the draw than the median does.
    total = int(statistics.mean(sizes[len(sizes) // 4 : len(sizes) - len(sizes) // 4]))
    usual, heap = by_size[bisect.bisect_right(sizes, total) - 1]
    live = _live(heap, usual.end)
    shares = _divide(program, live, usual, layer_of, attribution)
    shares.fill(total)
    limit = max(
        smallest_limit(each.requests(), descending=is_on_cpu, enough=each.allocator.reserved)
        for each in {id(each): each for each in (heap, by_size[-1][1])}.values()
    )
    # A chunk may be nearly twice as large as what lies in it, within a limit; whether the largest one's is, depends on
    # the past.
    wasted = min(max((buffer.bytes for buffer in live), default=0), LARGEST_WASTE)
    unknown = Counter(
        node.type for node in program.nodes if not is_known(node.type) and "scratch" not in node.attributes
    )
    at = program.nodes[usual.node].name
    return Outcome(
        "graph", "graph", total,
        low=min(sizes[0], int(total * (1 - spread))),
        high=max(most, limit, int(total * (1 + spread)), sizes[-1] + wasted),
        pool=Pool(usual.requested, total, heap.allocator.reserved, None, limit),
        categories=shares.categories,
        layers=shares.layers,
        instant=attribution.instant(at),
        unmodelled=tuple(
            Unmodelled(f"scratch of {name}", f"no rule for this operation ({count} of them): its outputs are counted")
            for name, count in unknown.items()
        ) + (
            _copied_blocks(program, kernels)
            if isinstance(kernels, CpuKernels)
            else _not_on_card(program, workspace=max(most - total, 0), host=host_bytes(program))
        ),
        notes=(
            f"{len(sizes)} simulated steps of {len(program.nodes):,} operations in {len(simulated)} processes, "
            f"{threads_of(kernels)} at once, on {title_of(kernels)}",
        ),
    )  # fmt: skip


def _largest(program: Program, kernels: Kernels, times: dict[int, float]) -> list[Peak]:
    """Return the peaks of steps that take more than the usual ones.

    On a card cuDNN works in as much as it may, unless that much is not available. On a CPU a thread may get no time;
    in a loop its work then piles up iteration by iteration.
    """
    if isinstance(kernels, CardKernels):
        ((_, peaks),) = _simulate(program, replace(kernels, workspace=WORKSPACE_LIMIT), times)
        return [peak._replace(in_use=min(peak.in_use, kernels.available_bytes)) for peak in peaks]
    ran = replace(kernels, inter_op_threads=1) if program.has_loops else kernels
    return [peak for _, peaks in _simulate(program, ran, times, is_settled=True) for peak in peaks]


def _copied_blocks(program: Program, kernels: CpuKernels) -> tuple[Unmodelled, ...]:
    """Return, by dtype, that products and convolutions copy blocks of their operands in sizes that no rule gives."""
    products = (node for node in program.nodes if "MatMul" in node.type or node.type.endswith("Conv2D"))
    counts = Counter(node.outputs[0].dtype for node in products if node.outputs)
    return tuple(
        Unmodelled(
            f"copies in {dtype} products and convolutions",
            f"on this CPU oneDNN copies blocks of their operands ({counts[dtype]} operations), some MB at a time",
        )
        for dtype in kernels.copied
        if counts[dtype]
    )


def _not_on_card(program: Program, **figures: int) -> tuple[Unmodelled, ...]:
    """Return what a step on a card takes beyond the total, with the bytes that are known of it."""
    kinds = {node.type for node in program.nodes}
    return tuple(
        Unmodelled(row["what"], row["why"], figures.get(row.get("figure")))
        for row in _BEYOND
        if any(row["where"] in kind for kind in kinds)
    )


def _times(program: Program, kernels: Kernels) -> dict[int, float]:
    """Return the usual seconds of each operation, by its id."""
    has_loops = program.has_loops

    def seconds_of(node: Node) -> float:
        inputs = [program.nodes[source].outputs[output] for source, output in node.inputs]
        started = SMALLEST_PRODUCT_SECONDS if has_loops and "MatMul" in node.type else 0.0
        return seconds(node, inputs, table_of(node, kernels).rates) + started

    # On a card one thread starts one operation after another, however long they take.
    is_on_card = isinstance(kernels, CardKernels)
    return {id(node): 0.0 if is_on_card else seconds_of(node) for node in program.nodes}


def _simulate(
    program: Program, kernels: Kernels, times: dict[int, float], is_settled: bool = False
) -> list[tuple[Heap, list[Peak]]]:
    """Return the heap of each simulated process and its steps' peaks; of one process where kernels are settled."""
    affordable = MOST_OPERATIONS // max(len(program.nodes), 1)  # steps
    is_on_card = isinstance(kernels, CardKernels)
    most = 1 if is_settled or is_on_card else PROCESSES
    processes = max(min(most, affordable // (WARM_UP_STEPS + FEWEST_STEPS)), 1)
    steps = max(min(STEPS, affordable // processes - WARM_UP_STEPS), FEWEST_STEPS)
    without_tick = 0.0 if is_settled or is_on_card else 1 - sum(times.values()) / TICK_SECONDS
    # Processes in which one thread runs at a time: not all, as a tick may fall into any.
    in_turns = min(math.ceil(processes * max(without_tick, 0.0)), processes - 1)
    found = []
    recipes: list[Any] = [None] * len(program.nodes)
    for process in range(processes):
        draw = random.Random(process + PROCESSES * is_settled)
        heap = Heap(BFCAllocator(descending=not is_on_card))
        memory = Memory(program, kernels, heap, recipes)
        past = SETTLED if is_settled else WARM_UP_STEPS + STEPS * process  # each is looked at later in its life
        threads = 1 if process < in_turns else threads_of(kernels)
        executor = Executor(program, kernels, threads, lambda node: times[id(node)], past, draw)
        peaks = []

        def varied(usual: float, draw: random.Random = draw) -> float:
            return usual * draw.lognormvariate(0, VARIATION)

        for step in range(WARM_UP_STEPS + steps):
            note_stage(f"simulating step {step + 1} of {WARM_UP_STEPS + steps}, process {process + 1} of {processes}")
            heap.reset_peak()
            memory.run(executor.order(varied))
            if step >= WARM_UP_STEPS:
                peaks.append(heap.peak)
        found.append((heap, peaks))
    return found


def _live(heap: Heap, end: int) -> list[Buffer]:
    live: dict[Buffer, None] = {}
    for buffer, is_allocation in heap.log[:end]:
        if is_allocation:
            live[buffer] = None
        else:
            del live[buffer]
    return list(live)


def _divide(
    program: Program, live: list[Buffer], peak: Peak, layer_of: dict[int, str], attribution: Attribution
) -> Shares:
    """Return the bytes at the peak by category and by layer."""
    shares = Shares()
    arguments = set(program.arguments)
    arguments.update(
        number
        for number, node in enumerate(program.nodes)
        if node.type == COPY and node.inputs[0][0] in program.arguments
    )
    for buffer in live:
        if (number := buffer.variable_at(peak.end)) is not None:
            kind = "optimizer" if program.variables[number].kind == "optimizer" else "weights"
            shares.add(buffer.bytes, kind, layer_of.get(number))
        elif buffer.node in arguments:
            shares.add(buffer.bytes, "inputs")
        elif buffer.node < 0:
            shares.add(buffer.bytes, "workspace")
        else:
            origin = attribution.origin(program.nodes[buffer.node].name)
            shares.add(buffer.bytes, "workspace" if buffer.is_scratch else CATEGORIES[origin.phase], origin.layer)
    return shares
