"""The graph method: simulate steps and divide the peak by layer.

`build` turns the traced step into a `Program`. `executor` orders its operations as TensorFlow's threads do, and
`memory` allocates and frees their buffers by the tables in `rules`, on the simulated allocator. This module runs some
steps in several simulated processes, as processes that train the same model differ in their peaks.
"""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kerasmem.devices.kernels import CUDA, TITLES, CardKernels, CpuKernels
from kerasmem.estimation.allocator import LARGEST_WASTE, NO_VARIABLE, BFCAllocator, Buffer, Heap, Peak, smallest_limit
from kerasmem.estimation.graph.executor import Executor
from kerasmem.estimation.graph.memory import Memory, recipes_of
from kerasmem.estimation.graph.program import COPY, Program
from kerasmem.estimation.graph.rules import PASSING_SECONDS, VARIATION, is_known, seconds, table_of, threads_of
from kerasmem.estimation.graph.scratch import Kernels
from kerasmem.estimation.report import SPREAD, Outcome, Pool, Shares, Unmodelled
from kerasmem.estimation.unmodelled import TENSORFLOW_WORKSPACE_LIMIT, beside_a_card, copied_operands, without_a_rule
from kerasmem.models.op_names import CATEGORIES, Attribution
from kerasmem.units import format_count, format_size

PROCESSES, WARM_UP_STEPS, STEPS = 8, 2, 4
MOST_OPERATIONS = 300_000  # of all simulated steps; long steps are simulated in fewer processes
SMALLEST_PRODUCT_SECONDS = 7e-6  # of a matrix product in a loop, measured in steps of a GRU over few features
# Linux may start a woken thread on its waker's processor, where it waits until the next balancing, 250 times a second.
# A step between two ticks runs on a single thread.
TICK_SECONDS = 4e-3


class _Step(NamedTuple):
    """A simulated step: its peak, and the heap of its process."""

    peak: Peak
    heap: Heap


def graph_outcome(program: Program, layer_of: dict[int, str], attribution: Attribution, kernels: Kernels) -> Outcome:
    """Return the outcome of a step in graph mode.

    Args:
        program: the step.
        layer_of: layer of each variable, by its number.
        attribution: origins of the operations.
        kernels: kernels of the CPU or card that runs it.

    Raises:
        NotModelled: If a size or a variable is unknown.
    """
    programs, groups = _simulate_branches(program, kernels)
    program, steps = programs[0], groups[0]
    sizes = [step.peak.in_use for step in steps]
    total = _mean_of_middle(sizes)
    usual = steps[bisect.bisect_right(sizes, total) - 1]
    largest = max((group[-1] for group in groups), key=_in_use)
    live = usual.heap.live_at(usual.peak.end)
    shares = _divide(program, live, layer_of, attribution)
    shares.fill(total)
    is_on_cpu = isinstance(kernels, CpuKernels)
    title = TITLES[CUDA]
    if isinstance(kernels, CpuKernels):  # their scratch depends on both sizes
        cache = format_size(kernels.cache_bytes)
        title = f"{kernels.title} with {format_count(kernels.intra_op_threads, 'thread')} and a last cache of {cache}"
    limit = smallest_limit(largest.heap.requests(), descending=is_on_cpu)
    most = _most(programs, kernels)
    spread = SPREAD["graph"] if is_on_cpu else 0.0
    # The largest buffer's chunk may be nearly twice as large, depending on earlier allocations.
    wasted = min(max((buffer.bytes for buffer in live), default=0), LARGEST_WASTE)
    totals = [_mean_of_middle(list(map(_in_use, group))) for group in groups]
    needed = max(limit, int(max(totals) * (1 + spread)), _in_use(largest) + wasted)
    processes = len({step.heap for step in steps})
    return Outcome(
        method="graph",
        execution="graph",
        total=total,
        low=min(*(_in_use(group[0]) for group in groups), int(min(totals) * (1 - spread))),
        high=max(most, needed),
        optional_workspace=None if is_on_cpu else max(most - needed, 0),
        pool=Pool(usual.peak.requested, total, usual.heap.allocator.reserved, limit),
        **shares.categories,
        layers=shares.layers,
        instant=attribution.instant(program.nodes[usual.peak.node].name),
        unmodelled=tuple(_list_unmodelled(program, kernels, max(most - total, 0))),
        notes=(
            f"{len(steps)} simulated steps of {len(program.nodes):,} operations in {processes} processes, "
            f"{threads_of(kernels)} at once, on {title}",
        ),
    )


def _in_use(step: _Step) -> int:
    return step.peak.in_use


def _simulate_branches(program: Program, kernels: Kernels) -> tuple[list[Program], list[list[_Step]]]:
    """Simulate a step with each of its branches, and return programs and sorted steps, the usual one first.

    Among branches that are as usual as others, the one with the largest peak is the usual one.
    """
    programs = [program, *program.alternatives]
    groups = _simulate(programs, kernels)
    usual = max(
        (number for number, other in enumerate(programs) if other.is_usual or not number),
        key=lambda number: _mean_of_middle(list(map(_in_use, groups[number]))),
    )
    if usual:  # the names of constants and of the batch are those of the first program
        programs.insert(0, programs.pop(usual))
        groups = _simulate(programs, kernels)
    return programs, groups


def _mean_of_middle(sizes: list[int]) -> int:
    """Return the mean of the middle half of sorted sizes."""
    quarter = len(sizes) // 4
    return int(statistics.mean(sizes[quarter : len(sizes) - quarter]))


def _most(programs: Sequence[Program], kernels: Kernels) -> int:
    """Return the peak of the largest possible step, or 0 if none is larger.

    On a card cuDNN may use all of its workspace limit that is available. On a CPU a thread may get no processor, and
    the buffers of a loop's iterations accumulate.
    """
    if isinstance(kernels, CardKernels):
        limit, kernels = kernels.available_bytes, replace(kernels, workspace=TENSORFLOW_WORKSPACE_LIMIT)
    elif any(program.has_loops for program in programs):
        limit, kernels = None, replace(kernels, inter_op_threads=1)
    else:
        return 0
    most = max(_in_use(group[-1]) for group in _simulate(programs, kernels))
    return most if limit is None else min(most, limit)


def _list_unmodelled(program: Program, kernels: Kernels, workspace: int) -> list[Unmodelled]:
    """List the memory of a step that is not in the total."""
    nodes = program.nodes
    unknown = (node.type for node in nodes if not is_known(node.type) and "scratch" not in node.attributes)
    missing = [without_a_rule(name, count) for name, count in Counter(unknown).items()]
    if isinstance(kernels, CardKernels):
        host_bytes = sum(tensor.bytes or 0 for node in nodes for tensor in node.outputs if tensor.on_host)
        return [*missing, *beside_a_card({node.type for node in nodes}, workspace, host_bytes)]
    products = (node for node in nodes if "MatMul" in node.type or node.type.endswith("Conv2D"))
    counts = Counter(node.outputs[0].dtype for node in products if node.outputs)
    return missing + [copied_operands(dtype, counts[dtype]) for dtype in kernels.copied if counts[dtype]]


def _seconds(program: Program, kernels: Kernels) -> list[float]:
    """Return the usual time of each operation, or zeros on a card."""
    if isinstance(kernels, CardKernels):
        return [0.0] * len(program.nodes)
    product_seconds = SMALLEST_PRODUCT_SECONDS if program.has_loops else 0.0
    runs = Counter(node.name for node in program.nodes)
    # Control-flow operations, which pass tensors from one iteration to the next, are not in the unrolled program.
    passing = PASSING_SECONDS * program.passes / max(sum(count for count in runs.values() if count > 1), 1)
    times = []
    for node in program.nodes:
        inputs = [program.nodes[source].outputs[output] for source, output in node.inputs]
        rates = table_of(node, kernels).rates
        extra = product_seconds * ("MatMul" in node.type) + passing * (runs[node.name] > 1)
        times.append(seconds(node, inputs, rates) + extra)
    return times


def _simulate(programs: Sequence[Program], kernels: Kernels) -> list[list[_Step]]:
    """Simulate steps in several processes, and return each program's steps after the warm-up, sorted by peak.

    With several programs, a process runs the first one for some steps, which are the last group, and then all in turn:
    a branch that replaces variables leaves other free chunks to the steps after it.
    """
    rounds, has_branches = WARM_UP_STEPS + STEPS, len(programs) > 1
    turns = [[0]] * rounds + [[*range(len(programs))]] * rounds * has_branches
    operations = sum(len(program.nodes) for program in programs)
    affordable = min(MOST_OPERATIONS // max(operations * rounds, 1), PROCESSES)
    processes = 1 if isinstance(kernels, CardKernels) else max(affordable, 1)
    times = [_seconds(program, kernels) for program in programs]
    recipes = [recipes_of(program, kernels) for program in programs]
    share_without_tick = max(1 - sum(times[0]) / TICK_SECONDS, 0.0)
    single_threaded = min(math.ceil(processes * share_without_tick), processes - 1)
    groups: list[list[_Step]] = [[] for _ in range(len(programs) + has_branches)]
    for process in range(processes):
        heap = Heap(BFCAllocator(descending=isinstance(kernels, CpuKernels)))
        memory = Memory(programs[0], recipes[0], heap)
        threads = 1 if process < single_threaded else threads_of(kernels)
        executors = [
            Executor(program, kernels, seconds_of, random.Random(process), threads)
            for program, seconds_of in zip(programs, times, strict=True)
        ]
        for turn, numbers in enumerate(turns):
            for number in numbers:
                if has_branches:
                    memory.load(programs[number], recipes[number])
                heap.reset_peak()
                memory.run(executors[number].order(VARIATION))
                if turn % rounds >= WARM_UP_STEPS:
                    groups[-1 if turn < rounds else number].append(_Step(heap.peak, heap))
    return [sorted(group, key=_in_use) for group in groups]


def _divide(program: Program, live: Mapping[Buffer, int], layer_of: dict[int, str], attribution: Attribution) -> Shares:
    """Return the bytes at the peak by category and by layer."""
    shares = Shares()
    arguments = set(program.arguments)
    arguments.update(
        number
        for number, node in enumerate(program.nodes)
        if node.type == COPY and node.inputs[0][0] in program.arguments
    )
    for buffer, number in live.items():
        if number != NO_VARIABLE:
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
