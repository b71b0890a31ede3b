"""Real steps of what would be recommended: it is run before it is, and the next one where it runs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kerasmem.errors import KerasmemError
from kerasmem.estimation.probe.running import DEFAULT_TIMEOUT, try_batch
from kerasmem.estimation.verdict import DOES_NOT_FIT, FITS
from kerasmem.recovery.advice import Remedy
from kerasmem.recovery.changes import change_of
from kerasmem.recovery.estimator import StepEstimator

STEPS = 3


def confirmed(estimator: StepEstimator, plans: Sequence[Remedy], notes: list[str]) -> list[Remedy]:
    """Return the plans with one that ran first, where one does; those that ran out stand at the end.

    Each is run in a process of its own: training steps on a batch of zeros and an evaluation, under the limit of the
    device less the copy of the data. A plan of which the estimate says that it does not fit is not run.

    Args:
        estimator: that estimated them.
        plans: the best first.
        notes: where to say why one could not be run.
    """
    waiting, failed = list(plans), []
    while waiting:
        if waiting[0].verdict == DOES_NOT_FIT:
            break
        try:
            first = _ran(estimator, waiting[0])
        except KerasmemError as error:
            notes.append(f"{waiting[0].name}: its steps were not run: {error}")
            break
        if first.verdict == FITS:
            waiting[0] = first
            break
        failed.append(first)
        del waiting[0]
    return [*waiting, *failed]


def _ran(estimator: StepEstimator, plan: Remedy) -> Remedy:
    """Return the plan with what its real steps took; the verdict is theirs."""
    with estimator.request([change_of(each) for each in plan.changes]) as request:
        limit = estimator.target.available_bytes - estimator.data_bytes
        trial = try_batch(request, request.batch_size, limit, steps=STEPS, last=0, timeout=DEFAULT_TIMEOUT)
    return replace(plan, trial=trial, verdict=FITS if trial.fits else DOES_NOT_FIT)
