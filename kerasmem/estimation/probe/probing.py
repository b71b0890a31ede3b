"""The probe method: run the step at small batches, and extrapolate its allocations to a large one."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence

from kerasmem.devices.recording import of_device, read_recording
from kerasmem.errors import KerasmemError
from kerasmem.estimation.probe.fitting import Fit, fit_recording, replay_fit, split_recording
from kerasmem.estimation.probe.running import DEFAULT_TIMEOUT, Answer, run_steps
from kerasmem.estimation.report import SPREAD, Outcome, Pool
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


def probe(
    request: ModelRequest,
    *,
    batch_sizes: Sequence[int] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    is_fixed: bool = False,
) -> Outcome:
    """Extrapolate the memory of a step to its batch size from steps at smaller ones.

    A batch size that is no larger than the largest of `batch_sizes` is run itself.

    Args:
        request: the model, how it is trained, and the batch size asked for.
        batch_sizes: two or three small ones, rising; a third one checks that sizes grow in proportion. None: see
            `default_batch_sizes`.
        timeout: seconds for the process that runs the steps.
        is_fixed: the model takes no other batch size than the request's.

    Raises:
        ModelError: a step failed, or ran out of memory.
        KerasmemError: the process gave no answer, or memory does not grow in proportion to the batch.
    """
    target = request.batch_size
    sizes = default_batch_sizes(target, request.jit_compile is True) if batch_sizes is None else tuple(batch_sizes)
    if is_fixed or target <= sizes[-1]:
        answer = run_steps(request, [(target, DIRECT_STEPS)], timeout=timeout)
        return _direct(answer)
    falling = sizes[::-1]
    with tempfile.TemporaryDirectory(prefix="kerasmem-probe-") as folder:
        answer = run_steps(
            request,
            [(size, PATTERN_STEPS if size == falling[0] else OTHER_STEPS) for size in falling],
            folder=folder, timeout=timeout, seconds=_SECONDS_A_RUN,
        )  # fmt: skip
        events, marks = read_recording(folder, MARKS)
    events = of_device(events, answer.device)
    if not events:
        raise KerasmemError(
            f"the profiler recorded no allocations of {answer.device}; unset TF_GPU_ALLOCATOR, or measure instead"
        )
    fit = fit_recording(split_recording(events, marks), falling)
    _check(fit, answer, request)
    return _extrapolated(fit, answer, target)


def default_batch_sizes(target: int, is_xla: bool = False) -> tuple[int, int, int]:
    """Return the batches that are run to foretell a target.

    Examples:
        >>> default_batch_sizes(64), default_batch_sizes(1024)
        ((8, 16, 24), (16, 32, 48))
    """
    unit = max(target // SHARE, LEAST_UNIT)
    unit = unit if is_xla else min(unit, MOST_UNIT)
    return unit, 2 * unit, 3 * unit


def _direct(answer: Answer) -> Outcome:
    run = answer.runs[0]
    note = f"batch {run.batch_size} is small enough to be run itself: {len(run.peaks)} steps on {answer.device}"
    return Outcome(
        "probe", answer.execution, run.median, min(run.peaks), max(run.peaks), Pool(None, run.median, None),
        _held(answer, run.inputs), notes=(note, *answer.notes),
    )  # fmt: skip


def _held(answer: Answer, inputs: int) -> dict[str, int]:
    """Return the bytes that a step holds from beginning to end, by category."""
    held = {"weights": answer.weights, "optimizer": answer.optimizer, "inputs": inputs}
    return {name: size for name, size in held.items() if size is not None}


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
    again = replay_fit(fit, fit.batch_size, descending=_descends(answer), with_limit=False)
    measured = statistics.median(answer.runs[0].peaks)
    astray = abs(again.total / measured - 1)
    if astray > MOST_ASTRAY:
        raise KerasmemError(
            f"{what}: the recording replays to {again.total:,} B where {measured:,.0f} B were "
            f"measured at batch {fit.batch_size}, so that it cannot be complete; {instead}"
        )


def _extrapolated(fit: Fit, answer: Answer, target: int) -> Outcome:
    found = replay_fit(fit, target, descending=_descends(answer))
    large, small, *_ = answer.runs
    spread, limit = SPREAD[answer.execution], found.smallest_limit
    sizes = " and ".join(str(run.batch_size) for run in answer.runs[::-1])
    at_peak = found.requested[min(range(len(found.peaks)), key=lambda index: abs(found.peaks[index] - found.total))]
    slope = (large.inputs - small.inputs) / (large.batch_size - small.batch_size)
    note = f"run at batches {sizes} on {answer.device}; {len(found.peaks)} recorded steps replayed at batch {target}"
    return Outcome(
        "probe", answer.execution, found.total,
        low=min(*found.peaks, int(found.total * (1 - spread))),
        high=max(*found.peaks, int(found.total * (1 + spread)), limit or 0),
        pool=Pool(at_peak, found.total, found.reserved, None, limit),
        categories=_held(answer, round(large.inputs + slope * (target - large.batch_size))),
        notes=(note, *answer.notes),
    )  # fmt: skip


def _descends(answer: Answer) -> bool:
    return answer.device.startswith("CPU")  # the C library maps new memory below what it mapped before
