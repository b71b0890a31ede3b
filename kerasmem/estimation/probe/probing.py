"""The probe method: run the step at small batches, and extend a line through the measured peaks."""

from __future__ import annotations

from collections.abc import Sequence

from kerasmem.errors import KerasmemError
from kerasmem.estimation.probe.running import DEFAULT_TIMEOUT, MeasuredSteps, Run, run_steps
from kerasmem.estimation.report import SPREAD, Outcome, Pool
from kerasmem.models.spec import StepSpec

# The smallest default batch is this share of the target, within these bounds; the others are twice and three times as
# large. Larger batches predict better: at a small one the optimizer's updates, which do not grow with it, may be the
# peak. XLA makes another plan for each batch size, so only batches near the target show how memory grows.
SHARE, LEAST_UNIT, MOST_UNIT = 6, 8, 64
STEPS = 10
MOST_BENT = 0.03  # of the growth between the outer batches that the middle one may be off the line
_SECONDS_A_RUN = 30.0


def probe(
    request: StepSpec,
    *,
    batch_sizes: Sequence[int] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    is_fixed: bool = False,
) -> Outcome:
    """Predict the memory of a step from steps at smaller batches.

    A batch size that is no larger than the largest of `batch_sizes` is run itself.

    Args:
        request: the model, how it is trained, and the requested batch size.
        batch_sizes: three small ones, rising. Defaults to `default_batch_sizes`.
        timeout: seconds for the process that runs the steps.
        is_fixed: whether the model takes no other batch size than the request's.

    Raises:
        ModelError: If a step failed, or ran out of memory.
        KerasmemError: If the process gave no answer, or memory does not grow in proportion to the batch.
    """
    target = request.batch_size
    sizes = default_batch_sizes(target, request.jit_compile is True) if batch_sizes is None else tuple(batch_sizes)
    if is_fixed or target <= sizes[-1]:
        return _direct(run_steps(request, [(target, STEPS)], timeout=timeout))
    runs = [(size, STEPS) for size in sizes[::-1]]
    measured = run_steps(request, runs, timeout=timeout, seconds=_SECONDS_A_RUN)
    return _extrapolated(measured, request)


def default_batch_sizes(target: int, is_xla: bool = False) -> tuple[int, int, int]:
    """Return the batch sizes that are run to predict a target.

    Examples:
        >>> default_batch_sizes(64), default_batch_sizes(1024)
        ((10, 20, 30), (64, 128, 192))
    """
    unit = max(target // SHARE, LEAST_UNIT)
    unit = unit if is_xla else min(unit, MOST_UNIT)
    return unit, 2 * unit, 3 * unit


def _direct(measured: MeasuredSteps) -> Outcome:
    run = measured.runs[0]
    note = f"batch {run.batch_size} is small enough to be run itself: {len(run.peaks)} steps on {measured.device}"
    return _outcome(measured, run.median, min(run.peaks), max(run.peaks), run.inputs, note)


def _extrapolated(measured: MeasuredSteps, request: StepSpec) -> Outcome:
    large, middle, small = measured.runs
    target, spread = request.batch_size, SPREAD[measured.execution]
    sizes = ", ".join(str(run.batch_size) for run in (small, middle, large))
    growth = large.median - small.median
    bent = abs(middle.median - _on_line(small, large, small.median, large.median, middle.batch_size))
    if bent > MOST_BENT * growth + spread * middle.median:
        raise KerasmemError(
            f"probe of {request.label}: the peaks at batches {sizes} "
            f"({', '.join(f'{run.median:,} B' for run in (small, middle, large))}; {measured.execution} mode) do not "
            f"grow in proportion to the batch; measure batch {target} itself, or use another method"
        )
    total = _on_line(small, large, small.median, large.median, target)
    steepest = _on_line(middle, large, middle.median, large.median, target)
    return _outcome(
        measured,
        total,
        min(_on_line(small, large, max(small.peaks), min(large.peaks), target), int(total * (1 - spread))),
        max(_on_line(small, large, min(small.peaks), max(large.peaks), target), int(total * (1 + spread)), steepest),
        _on_line(small, large, small.inputs, large.inputs, target),
        f"run at batches {sizes} on {measured.device}; a line through their peaks gives batch {target}",
    )


def _on_line(small: Run, large: Run, at_small: int, at_large: int, batch_size: int) -> int:
    """Return the bytes at a batch size on the line through those of two others."""
    slope = (at_large - at_small) / (large.batch_size - small.batch_size)
    return round(at_large + slope * (batch_size - large.batch_size))


def _outcome(measured: MeasuredSteps, total: int, low: int, high: int, inputs: int, note: str) -> Outcome:
    held = {"weights": measured.weights, "optimizer": measured.optimizer, "inputs": inputs}
    return Outcome(
        method="probe",
        execution=measured.execution,
        total=total,
        low=low,
        high=high,
        pool=Pool(None, total, None),
        categories={name: size for name, size in held.items() if size is not None},
        notes=(note, *measured.notes),
    )
