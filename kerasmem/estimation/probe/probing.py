"""The probe method: run the step at small batches, and extend a line through the measured peaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kerasmem.errors import KerasmemError
from kerasmem.estimation.probe.running import DEFAULT_TIMEOUT, run_steps
from kerasmem.estimation.probe.worker import MeasuredSteps
from kerasmem.estimation.report import SPREAD, Outcome, Pool
from kerasmem.models.spec import StepSpec

LEAST_BATCH = 8
STEPS = 10
MOST_BENT = 0.2  # of the line's total, by which a parabola through the three peaks may exceed it
_SECONDS_A_RUN = 30.0


def probe(request: StepSpec, *, timeout: float = DEFAULT_TIMEOUT, is_fixed: bool = False) -> Outcome:
    """Predict the memory of a step from steps at smaller batches, or run it itself at a small batch.

    Args:
        request: the model, how it is trained, and the requested batch size.
        timeout: seconds for each process that runs steps.
        is_fixed: whether the model takes no other batch size than the request's.

    Raises:
        ModelError: If a step failed, or ran out of memory.
        KerasmemError: If the process gave no answer, or memory does not grow in proportion to the batch.
    """
    sizes = smaller_batches(request.batch_size)
    if is_fixed or request.batch_size <= sizes[-1]:
        itself = run_steps(request, [(request.batch_size, STEPS)], timeout=timeout)
        run = itself.runs[0]
        note = f"batch {run.batch_size} is small enough to be run itself: {len(run.peaks)} steps on {itself.device}"
        return _outcome(itself, run.median, min(run.peaks), max(run.peaks), run.inputs, note)
    # A process for each: the chunks of one size would be reused by the next, and waste memory in other ways.
    measured = []
    for size in sizes:
        measured.append(run_steps(request, [(size, STEPS)], timeout=timeout, seconds=_SECONDS_A_RUN))
        if measured[-1].execution == "xla":
            raise KerasmemError(
                f"probe of {request.label}: XLA asks for one large buffer, whose chunk may be "
                "nearly twice as large, so peaks jump from batch to batch; use method xla, or measure the batch itself"
            )
    return _line(replace(measured[-1], runs=tuple(each.runs[0] for each in measured)), request)


def smaller_batches(target: int) -> tuple[int, int, int]:
    """Return the batch sizes that are run to predict a target: a quarter of it, a half and three quarters.

    Smaller ones predict worse: at a small batch the optimizer's updates, which do not grow with it, may be the peak.

    Examples:
        >>> smaller_batches(64), smaller_batches(25)
        ((16, 32, 48), (8, 16, 24))
    """
    unit = max(target // 4, LEAST_BATCH)
    return unit, 2 * unit, 3 * unit


def _line(measured: MeasuredSteps, request: StepSpec) -> Outcome:
    """Return the bytes at a batch size on the line through the peaks at the smallest and the largest measured.

    Raises:
        KerasmemError: If the parabola through all three peaks lies too far off.
    """
    small, _, large = measured.runs
    target, spread = request.batch_size, SPREAD[measured.execution]
    sizes = ", ".join(str(run.batch_size) for run in measured.runs)

    def on_line(at_small: float, at_large: float) -> int:
        slope = (at_large - at_small) / (large.batch_size - small.batch_size)
        return round(at_large + slope * (target - large.batch_size))

    total = on_line(small.mean, large.mean)
    parabola = np.polyfit([run.batch_size for run in measured.runs], [run.mean for run in measured.runs], 2)
    bent = round(float(np.polyval(parabola, target)))
    if bent > (1 + MOST_BENT) * total:
        raise KerasmemError(
            f"probe of {request.label}: the peaks at batches {sizes} "
            f"({', '.join(f'{run.mean:,} B' for run in measured.runs)}; {measured.execution} mode) do not "
            f"grow in proportion to the batch; measure batch {target} itself, or use another method"
        )
    least = on_line(max(small.peaks), min(large.peaks))
    most = on_line(min(small.peaks), max(large.peaks))
    return _outcome(
        measured,
        total,
        min(least, int(total * (1 - spread)), bent),
        max(most, int(total * (1 + spread)), bent),
        on_line(small.inputs, large.inputs),
        f"run at batches {sizes} on {measured.device}; a line through their peaks gives batch {target}",
    )


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
