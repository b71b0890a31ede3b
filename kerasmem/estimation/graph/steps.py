"""The graph method: several steps of a training process simulated, and the peak of the usual one divided up."""

from __future__ import annotations

import bisect
import random
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

from kerasmem.devices.kernels import CardKernels, CpuKernels
from kerasmem.estimation.allocator import LARGEST_WASTE, BFCAllocator, smallest_limit
from kerasmem.estimation.graph.costs import VARIATION, seconds
from kerasmem.estimation.graph.cuda import WORKSPACE_LIMIT
from kerasmem.estimation.graph.executor import Executor
from kerasmem.estimation.graph.memory import Buffer, Heap, Memory, Peak
from kerasmem.estimation.graph.placement import host_bytes
from kerasmem.estimation.graph.program import COPY, Program
from kerasmem.estimation.graph.rules import KINDS, is_known, table_of, threads_of, title_of
from kerasmem.estimation.graph.scratch import Kernels
from kerasmem.estimation.report import SPREAD, Outcome, Pool, Shares, Unmodelled
from kerasmem.models.op_names import CATEGORIES, Attribution
from kerasmem.processes.guarding import note_stage

# Processes are simulated one after another, each with its own heap: what the first steps leave behind and, with some
# kernels, the order of operations stay what they are for as long as a process lives.
PROCESSES, WARM_UP_STEPS, STEPS = 8, 2, 4
_BEYOND = KINDS["cuda"]["missing"]  # what a step on a card takes beyond the total, where such operations are
# The smallest matrix product takes this long, with either kind of kernels (steps of a GRU over few features, traced).
# In loops it decides whether a thread keeps it for itself.
SMALLEST_PRODUCT_SECONDS = 7e-6
MOST_OPERATIONS = 300_000  # to simulate in all; longer steps are simulated fewer times


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
    simulated = _simulate(program, kernels)
    is_on_cpu = isinstance(kernels, CpuKernels)
    most = _most(program, kernels)
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


def _most(program: Program, kernels: Kernels) -> int:
    """Return the peak of a step that takes more than the usual ones; 0 if none does.

    On a card cuDNN works in as much as it may, unless that much is not available. On a CPU a thread may get no time;
    in a loop its work then piles up iteration by iteration.
    """
    if isinstance(kernels, CardKernels):
        limit, kernels = kernels.available_bytes, replace(kernels, workspace=WORKSPACE_LIMIT)
    elif program.has_loops:
        limit, kernels = None, replace(kernels, inter_op_threads=1)
    else:
        return 0
    most = max(peak.in_use for _, peaks in _simulate(program, kernels) for peak in peaks)
    return most if limit is None else min(most, limit)


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


def _seconds(program: Program, kernels: Kernels) -> list[float]:
    """Return the usual time of each operation; 0 on a card, where one thread starts all of them in order."""
    if isinstance(kernels, CardKernels):
        return [0.0] * len(program.nodes)
    started = SMALLEST_PRODUCT_SECONDS if program.has_loops else 0.0
    taken = []
    for node in program.nodes:
        inputs = [program.nodes[source].outputs[output] for source, output in node.inputs]
        taken.append(seconds(node, inputs, table_of(node, kernels).rates) + started * ("MatMul" in node.type))
    return taken


def _simulate(program: Program, kernels: Kernels) -> list[tuple[Heap, list[Peak]]]:
    """Return the heap of each simulated process and the peaks of its steps."""
    affordable = MOST_OPERATIONS // max(len(program.nodes) * (WARM_UP_STEPS + STEPS), 1)
    processes = 1 if isinstance(kernels, CardKernels) else max(min(PROCESSES, affordable), 1)
    usual = _seconds(program, kernels)
    recipes: list[Any] = [None] * len(program.nodes)
    simulated = []
    for process in range(processes):
        note_stage(f"simulating process {process + 1} of {processes}")
        draw = random.Random(process)
        heap = Heap(BFCAllocator(descending=isinstance(kernels, CpuKernels)))
        memory = Memory(program, kernels, heap, recipes)
        executor = Executor(program, kernels, usual, draw)
        peaks = []
        for _ in range(WARM_UP_STEPS + STEPS):
            heap.reset_peak()
            memory.run(executor.order(lambda took, draw=draw: took * draw.lognormvariate(0, VARIATION)))
            peaks.append(heap.peak)
        simulated.append((heap, peaks[WARM_UP_STEPS:]))
    return simulated


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
