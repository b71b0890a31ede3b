"""`probe`: run the step at small batches, and say from its allocations what a large one will need."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from kerasmem.devices.recording import read_recording
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.outcome import SPREAD, Outcome
from kerasmem.estimation.probe.fitting import Fit, fit_recording, replay_fit, split_recording
from kerasmem.estimation.probe.running import DEFAULT_TIMEOUT, Answer, Run, run_steps
from kerasmem.estimation.report import Pool
from kerasmem.models.request import ModelRequest

# The smallest of the batches that are run by default is this share of the target, within these bounds; the others are
# twice and three times as large. Larger ones foretell better, since at a small batch what does not depend on it (the
# optimizer's updates) takes a larger part of the time and overlaps with more; smaller ones cost less. XLA makes another
# plan for each batch, so that only batches near the target tell whether sizes grow in proportion.
SHARE, LEAST_UNIT, MOST_UNIT = 8, 8, 16
PATTERN_STEPS, OTHER_STEPS = 12, 2  # of the largest batch, whose order is replayed, and of those that tell sizes only
DIRECT_STEPS = 10
MOST_OFF = 0.03  # of a step's bytes that may grow otherwise than in proportion, or have no counterpart
MOST_ASTRAY = 0.02  # of the peak that the replay of the batch that was run may be off
_SECONDS_A_RUN = 30.0
MARKS = "kerasmem-"


@dataclass(frozen=True)
class ProbeResult:
    """What a probe says; bytes.

    Attributes:
        total: the peak in use at the batch asked for: the median over the steps.
        low: the least of the steps, or less (`SPREAD`) where they were foretold.
        high: the most, or more.
        requested: what the step's tensors ask for at the peak; None where the batch was measured itself.
        reserved: the allocator's regions, under memory growth; None likewise.
        smallest_limit: the smallest memory limit that suffices; None likewise.
        points: what was measured: (batch size, median of the peaks).
        device: "CPU:0" or "GPU:0".
        execution: "graph" or "xla".
        weights: of the model's variables.
        optimizer: of the optimizer's, None where there is none.
        inputs: of one batch with its targets.
        notes: how it was found.
    """

    total: int
    low: int
    high: int
    requested: int | None
    reserved: int | None
    smallest_limit: int | None
    points: tuple[tuple[int, int], ...]
    device: str
    execution: str
    weights: int
    optimizer: int | None
    inputs: int
    notes: tuple[str, ...]


def probe(
    request: ModelRequest,
    *,
    batch_sizes: Sequence[int] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    with_limit: bool = True,
    memory_limit: int | None = None,
    is_fixed: bool = False,
) -> ProbeResult:
    """Return what the step of a request needs at its batch size, from steps that ran at smaller ones.

    A batch size that is no larger than the largest of `batch_sizes` is run itself.

    Args:
        request: the model, how it is trained, and the batch size asked for.
        batch_sizes: two or three small ones, rising; a third one checks that sizes grow in proportion. None: see
            `default_batch_sizes`.
        timeout: seconds for the process that runs the steps.
        with_limit: also find the smallest memory limit.
        memory_limit: bytes of host memory that the process may take; None: nearly all that is free.
        is_fixed: the model takes no other batch size than the request's.

    Raises:
        UsageError: the batch sizes are not two or three rising numbers.
        ModelError: a step failed, or ran out of memory.
        KerasmemError: the process gave no answer, or memory does not grow in proportion to the batch.
    """
    target = request.batch_size
    sizes = default_batch_sizes(target, request.jit_compile is True) if batch_sizes is None else tuple(batch_sizes)
    if len(sizes) not in (2, 3) or sorted(set(sizes)) != list(sizes) or sizes[0] < 1:
        raise UsageError(f"batch_sizes {sizes}: give two or three rising numbers, such as (8, 16, 24)")
    if is_fixed or target <= sizes[-1]:
        answer = run_steps(request, [(target, DIRECT_STEPS)], timeout=timeout, memory_limit=memory_limit)
        return _direct(answer)
    falling = sizes[::-1]
    with tempfile.TemporaryDirectory(prefix="kerasmem-probe-") as folder:
        answer = run_steps(
            request,
            [(size, PATTERN_STEPS if size == falling[0] else OTHER_STEPS) for size in falling],
            folder=folder, timeout=timeout, seconds=_SECONDS_A_RUN, memory_limit=memory_limit,
        )  # fmt: skip
        events, marks = read_recording(folder, MARKS)
    name = "GPU_0_bfc" if answer.device.startswith("GPU") else "bfc_cpu_allocator_for_gpu"
    events = tuple(event for event in events if event.allocator == name)
    if not events:
        raise KerasmemError(
            f"the profiler recorded no allocations of {answer.device}; unset TF_GPU_ALLOCATOR, or measure instead"
        )
    fit = fit_recording(split_recording(events, marks), falling)
    _check(fit, answer, request)
    return _extrapolated(fit, answer, target, with_limit)


def probe_outcome(request: ModelRequest, is_fixed: bool = False) -> Outcome:
    """Return what the step needs by running it at small batches.

    Raises:
        KerasmemError: a step fails, or memory does not grow in proportion to the batch.
    """
    found = probe(request, is_fixed=is_fixed)
    divided = {"weights": found.weights, "inputs": found.inputs}
    if found.optimizer is not None:
        divided["optimizer"] = found.optimizer
    return Outcome(
        "probe", found.execution, found.total, found.low, max(found.high, found.smallest_limit or 0),
        Pool(found.requested, found.total, found.reserved, None, found.smallest_limit),
        divided,
        notes=found.notes,
    )  # fmt: skip


def default_batch_sizes(target: int, is_xla: bool = False) -> tuple[int, int, int]:
    """Return the batches that are run to foretell a target.

    Example:
        >>> default_batch_sizes(64), default_batch_sizes(1024)
        ((8, 16, 24), (16, 32, 48))
    """
    unit = max(target // SHARE, LEAST_UNIT)
    unit = unit if is_xla else min(unit, MOST_UNIT)
    return unit, 2 * unit, 3 * unit


def _direct(answer: Answer) -> ProbeResult:
    run = answer.runs[0]
    note = f"batch {run.batch_size} is small enough to be run itself: {len(run.peaks)} steps on {answer.device}"
    return ProbeResult(
        int(statistics.median(run.peaks)), min(run.peaks), max(run.peaks), None, None, None, _points(answer),
        answer.device, answer.execution, answer.weights, answer.optimizer, run.inputs, (note, *answer.notes),
    )  # fmt: skip


def _check(fit: Fit, answer: Answer, request: ModelRequest) -> None:
    """Refuse a fit that cannot be trusted."""
    what = f"probe of {request.source or request.factory}"
    sizes = ", ".join(str(run.batch_size) for run in answer.runs[::-1])
    instead = f"measure batch {request.batch_size} itself, or use another method"
    if fit.off > MOST_OFF:
        raise KerasmemError(
            f"{what}: {fit.off:.0%} of the bytes that a step asks for do not grow in proportion to the batch between "
            f"batches {sizes} ({answer.execution} mode), so that larger ones cannot be foretold; {instead}"
        )
    if fit.unmatched > MOST_OFF:
        raise KerasmemError(
            f"{what}: {fit.unmatched:.0%} of the bytes that a step asks for belong to operations that are not the same "
            f"at batches {sizes}, so that larger ones cannot be foretold; {instead}"
        )
    pattern = answer.runs[0]
    again = replay_fit(fit, fit.batch_size, descending=_descends(answer), with_limit=False)
    astray = abs(again.total / statistics.median(pattern.peaks) - 1)
    if astray > MOST_ASTRAY:
        raise KerasmemError(
            f"{what}: the recording replays to {again.total:,} B where {statistics.median(pattern.peaks):,.0f} B were "
            f"measured at batch {fit.batch_size}, so that it cannot be complete; {instead}"
        )


def _extrapolated(fit: Fit, answer: Answer, target: int, with_limit: bool) -> ProbeResult:
    found = replay_fit(fit, target, descending=_descends(answer), with_limit=with_limit)
    pattern, spread = answer.runs[0], SPREAD[answer.execution]
    sizes = " and ".join(str(run.batch_size) for run in answer.runs[::-1])
    at_peak = found.requested[min(range(len(found.peaks)), key=lambda index: abs(found.peaks[index] - found.total))]
    return ProbeResult(
        total=found.total,
        low=min(*found.peaks, int(found.total * (1 - spread))),
        high=max(*found.peaks, int(found.total * (1 + spread))),
        requested=at_peak,
        reserved=found.reserved,
        smallest_limit=found.smallest_limit,
        points=_points(answer),
        device=answer.device,
        execution=answer.execution,
        weights=answer.weights,
        optimizer=answer.optimizer,
        inputs=_scaled(pattern, answer.runs[1], target),
        notes=(
            f"run at batches {sizes} on {answer.device}; {len(found.peaks)} recorded steps replayed at batch {target}",
            *answer.notes,
        ),
    )


def _descends(answer: Answer) -> bool:
    return answer.device.startswith("CPU")  # the C library maps new memory below what it mapped before


def _points(answer: Answer) -> tuple[tuple[int, int], ...]:
    return tuple((run.batch_size, int(statistics.median(run.peaks))) for run in answer.runs[::-1])


def _scaled(large: Run, small: Run, target: int) -> int:
    slope = (large.inputs - small.inputs) / (large.batch_size - small.batch_size)
    return round(large.inputs + slope * (target - large.batch_size))
