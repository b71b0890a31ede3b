"""`kerasmem.max_batch_size`: the largest batch that fits a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from typing_extensions import Unpack

from kerasmem import checks
from kerasmem.devices.catalogue import DeviceTarget, resolve_device
from kerasmem.devices.machine import list_devices
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.estimating import EstimateSession
from kerasmem.estimation.probing import DEFAULT_TIMEOUT, try_batch
from kerasmem.estimation.report import DOES_NOT_FIT, FITS, MemoryReport, device_verdict
from kerasmem.estimation.search import Evaluations, SearchResult, Trial, largest_that_ran, search
from kerasmem.models.backend import require_tensorflow
from kerasmem.models.spec import StepSettings, StepSpec, shows_settings
from kerasmem.processes.children import child_environment

_STEPS = 3  # of training, at each confirmed size
_DIVISIBLE = 32, 60  # by 2, 4, 8, 16 and 32, and by 3, 5, 6, 10, 12, 15, 20 and 30


@shows_settings("batch_size")
def max_batch_size(
    model: Any,
    *,
    device: str | int,
    maximum: int | None = None,
    margin: float = 0.0,
    confirm: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    **settings: Unpack[StepSettings],
) -> SearchResult:
    """Search for the largest batch size that fits a device.

    Estimates a few sizes and returns the largest that surely fits, to within 1 %. With `confirm`, real steps
    then run at that size and at a few around it: three of training, half a batch as an epoch's last one, and
    evaluation. Each size runs in a subprocess under the device's limit, and the result is the largest that ran.

    Args:
        model: as for `kerasmem.estimate`.
        device: a card of the catalogue ("t4") or a size ("16GB", or bytes).
        maximum: upper limit of the search. Defaults to no limit.
        margin: share of the device's memory to keep free, from 0 to below 1. Defaults to 0.
        confirm: whether to run real steps; without a GPU they run on the CPU. Defaults to False.
        timeout: seconds for each confirmed size. Defaults to 600.
        **settings: as for `kerasmem.estimate`, except `batch_size`. With method "auto" all sizes are estimated by the
            method that was chosen for the first.

    Returns:
        A `SearchResult`; all sizes in bytes. `largest` is None if not even one sample fits, or ran.

    Raises:
        UsageError: If an argument is wrong, or `confirm` is set and the model cannot be sent to a subprocess.
        KerasmemError: As `kerasmem.estimate`, or if a step failed for another reason than memory.

    Examples:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
        >>> kerasmem.max_batch_size(model, device="64MB", method="formula").largest
        6281
    """
    if maximum is not None:
        checks.whole("maximum", maximum)
    if not checks.number("timeout", timeout) > 0:
        raise UsageError(f"timeout must be more than 0 seconds; got {timeout!r}")
    spec = StepSpec(model, device=device, **settings)
    target = _reserve_margin(resolve_device(str(spec.device)), margin)
    if confirm:
        require_tensorflow("confirm", "leave it out: only TensorFlow's allocator can be limited")
    available, highest = target.limits
    with EstimateSession(spec) as session:
        first, unit, why = _first_report(session, maximum)
        reports, method = {unit: first}, first.settings.method

        def report_of(size: int) -> MemoryReport:
            if size not in reports:
                reports[size] = session.estimate(batch_size=size, method=method)
            if (batch := reports[size].settings.batch_size) != -(-size // spec.replicas):
                raise UsageError(f"the model's input fixes the batch at {batch}; build it with batch_size=None")
            return reports[size]

        evaluations = search(
            lambda size: report_of(size).bytes, available,
            highest=highest, maximum=maximum, unit=unit, grows_from_below=not first.settings.stands_in,
        )  # fmt: skip
        largest, fits = evaluations.largest, evaluations.verdict
        notes = [*why, *_notes(evaluations, maximum, unit)]
        trials: tuple[Trial, ...] = ()
        if confirm:
            largest, trials = _run_trials(spec, target, evaluations, maximum, timeout, unit)
            fits = DOES_NOT_FIT if largest is None else FITS
            notes += _trial_notes(evaluations.largest, largest, trials)
        report = report_of(largest or unit)
    judged = device_verdict(target, fits)
    return SearchResult(largest, evaluations.fails_from, judged, evaluations.rows, report, tuple(notes), trials)


def _first_report(session: EstimateSession, maximum: int | None) -> tuple[MemoryReport, int, tuple[str, ...]]:
    """Return the estimate of the smallest batch, its size, and notes.

    A model may split its batch into equal parts. Then one sample cannot be estimated, or only by the formula, and the
    smallest batch divides every other.

    Raises:
        KerasmemError: If no batch can be estimated.
    """
    reports: dict[int, MemoryReport | KerasmemError] = {}

    def is_estimated(size: int) -> bool:
        try:
            reports[size] = session.estimate(batch_size=size)
        except UsageError:
            raise
        except KerasmemError as error:
            reports[size] = error
        report = reports[size]
        return isinstance(report, MemoryReport) and report.fallback is None

    divisible = 1 if is_estimated(1) else next(filter(is_estimated, _DIVISIBLE), 1)
    divisors = (size for size in range(2, divisible) if divisible % size == 0)
    unit = 1 if divisible == 1 else next(filter(is_estimated, divisors), divisible)
    if maximum is not None and unit > maximum:
        unit = 1
    single, report = reports[1], reports[unit]
    if isinstance(report, KerasmemError):
        raise report
    if unit == 1:
        return report, 1, ()
    reason = single.fallback if isinstance(single, MemoryReport) else single
    return report, unit, (f"only multiples of {unit} are searched, as batch size 1 cannot be estimated: {reason}",)


def _reserve_margin(target: DeviceTarget, margin: float) -> DeviceTarget:
    if checks.number("margin", margin) >= 1:
        raise UsageError(f"margin must be a share from 0 to below 1; got {margin!r}")
    if not margin:
        return target
    note = f"{margin:.0%} of it stays free".replace("%", " %")
    target = target.with_available(lambda limit: int(limit * (1 - margin)))
    return replace(target, note=f"{target.note}; {note}" if target.note else note)


def _run_trials(
    spec: StepSpec, target: DeviceTarget, evaluations: Evaluations, maximum: int | None, timeout: float, unit: int
) -> tuple[int | None, tuple[Trial, ...]]:
    """Run real steps around the estimated size, with several replicas those of one."""
    fails_from = maximum + 1 if evaluations.fails_from is None and maximum is not None else evaluations.fails_from
    request = spec.portable(batch_size=unit)

    def try_units(units: int) -> Trial:
        share = -(-units * unit // spec.replicas)
        last = share // 2 // unit * unit
        trial = try_batch(request, share, target.available_bytes, steps=_STEPS, last=last, timeout=timeout)
        return replace(trial, size=units * unit)

    fails = None if fails_from is None else -(-fails_from // unit)
    largest, trials = largest_that_ran(try_units, (evaluations.largest or unit) // unit, fails)
    return None if largest is None else largest * unit, trials


def _trial_notes(estimated: int | None, largest: int | None, trials: tuple[Trial, ...]) -> Iterator[str]:
    if all(device.cuda_index is None for device in list_devices(environ=child_environment())):
        yield "ran on the CPU, with the GPUs' allocator and the device's limit; a GPU's kernels may need more or less"
    if largest is None:
        yield f"not even batch size {trials[-1].size:,} ran"
    elif estimated is not None and largest < estimated:
        yield f"the estimate was too low: batch size {estimated:,} ran out of memory"


def _notes(evaluations: Evaluations, maximum: int | None, unit: int) -> Iterator[str]:
    largest, above = evaluations.largest, evaluations.above
    if any(row.high is None for row in evaluations.rows):
        yield "the method knows no upper end for this model, so no size surely fits"
    if largest is None:
        return
    if not above and maximum is not None:
        yield f"every batch size up to the maximum of {largest:,} fits"
    elif not above:
        yield f"the search ended at batch size {largest:,}, which still fits"
    elif above[0].size > largest + unit:
        yield f"to within 1 %: the next estimated batch size, {above[0].size:,}, does not surely fit"
