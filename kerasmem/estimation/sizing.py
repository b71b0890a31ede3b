"""`kerasmem.max_batch_size`: the largest batch that fits a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from typing_extensions import Unpack

from kerasmem import checks
from kerasmem.devices.catalogue import DeviceTarget, resolve_device
from kerasmem.devices.machine import list_devices
from kerasmem.errors import UsageError
from kerasmem.estimation.estimating import EstimateSession
from kerasmem.estimation.probing import DEFAULT_TIMEOUT, try_batch
from kerasmem.estimation.report import DOES_NOT_FIT, FITS, DeviceVerdict, MemoryReport
from kerasmem.estimation.search import Evaluations, SearchResult, Trial, largest_that_ran, search
from kerasmem.models.backend import require_tensorflow
from kerasmem.models.spec import StepSettings, StepSpec, shows_settings
from kerasmem.processes.children import child_environment

_STEPS = 3  # of training, at each confirmed size


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
    """Return the largest batch size that fits a device.

    Estimates a few sizes, each once, and returns the largest whose whole interval fits, to within 1 %. With `confirm`,
    real steps then run at that size, and at a few sizes around it: three of training, half a batch as an epoch's last,
    and evaluation. Each size has a subprocess under the device's limit. The result is then the largest that ran.

    Args:
        model: as for `kerasmem.estimate`.
        device: a card of the catalogue ("t4") or a size ("16GB", or bytes).
        maximum: the largest size. Defaults to the largest that fits.
        margin: share of the device's memory to keep free, from 0 to below 1. Defaults to 0.
        confirm: run real steps. Without a GPU they run on the CPU, with the GPUs' allocator. Defaults to False.
        timeout: seconds for each confirmed size. Defaults to 600.
        **settings: as for `kerasmem.estimate`, but for `batch_size`. Method "auto" uses the method of the first
            estimate for all others.

    Returns:
        A `SearchResult`; all sizes in bytes. `largest` is None if not even one sample fits, or ran.

    Raises:
        UsageError: If an argument is wrong, or `confirm` is set and the model cannot be sent to another
            process.
        KerasmemError: As `kerasmem.estimate`; or if a step failed for another reason than memory.

    Examples:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
        >>> kerasmem.max_batch_size(model, device="64MB", method="formula").largest
        6281
    """
    if maximum is not None:
        checks.whole("maximum", maximum)
    if not checks.number("timeout", timeout) > 0:
        raise UsageError(f"timeout {timeout!r}: give seconds, more than 0")
    spec = StepSpec(model, device=device, **settings)
    target = _with_margin(resolve_device(str(spec.device)), margin)
    if confirm:
        require_tensorflow("confirm", "leave it out: TensorFlow's allocator alone can be held to a limit")
    with EstimateSession(spec) as session:
        reports = {1: session.estimate(batch_size=1)}
        method = reports[1].settings.method

        def report_of(size: int) -> MemoryReport:
            if size not in reports:
                reports[size] = session.estimate(batch_size=size, method=method)
            if (batch := reports[size].settings.batch_size) != -(-size // spec.replicas):
                raise UsageError(f"the model's input fixes the batch at {batch}: give it an open batch")
            return reports[size]

        asked = search(lambda size: report_of(size).bytes, target.available_bytes, maximum=maximum)
        largest, fits, notes = asked.largest, asked.verdict, list(_notes(asked, maximum))
        trials: tuple[Trial, ...] = ()
        if confirm:
            largest, trials = _confirmed(spec, target, asked, maximum, timeout)
            fits = DOES_NOT_FIT if largest is None else FITS
            notes += _trial_notes(asked.largest, largest, trials)
        report = report_of(largest or 1)
    device_verdict = DeviceVerdict(target.name, target.memory_bytes, target.available_bytes, fits, target.note)
    return SearchResult(largest, asked.fails_from, device_verdict, asked.rows, report, tuple(notes), trials)


def _with_margin(target: DeviceTarget, margin: float) -> DeviceTarget:
    if checks.number("margin", margin) >= 1:
        raise UsageError(f"margin {margin!r}: give the share that is to stay free, from 0 to below 1")
    if not margin:
        return target
    note = f"{margin:.0%} of it is to stay free".replace("%", " %")
    available = int(target.available_bytes * (1 - margin))
    return replace(target, available_bytes=available, note=f"{target.note}; {note}" if target.note else note)


def _confirmed(
    spec: StepSpec, target: DeviceTarget, asked: Evaluations, maximum: int | None, timeout: float
) -> tuple[int | None, tuple[Trial, ...]]:
    """Run real steps around the estimated size; with several replicas, those of one."""
    fails_from = maximum + 1 if asked.fails_from is None and maximum is not None else asked.fails_from
    request = spec.portable(batch_size=1)

    def try_size(size: int) -> Trial:
        share = -(-size // spec.replicas)
        trial = try_batch(request, share, target.available_bytes, steps=_STEPS, last=share // 2, timeout=timeout)
        return replace(trial, size=size)

    return largest_that_ran(try_size, asked.largest or 1, fails_from)


def _trial_notes(estimated: int | None, largest: int | None, trials: tuple[Trial, ...]) -> Iterator[str]:
    if all(device.cuda_index is None for device in list_devices(environ=child_environment())):
        yield "ran on the CPU, with the GPUs' allocator and the device's limit; a GPU's kernels may take other scratch"
    if largest is None:
        yield f"not even batch size {trials[-1].size:,} ran"
    elif estimated is not None and largest < estimated:
        yield f"the estimate was too low: batch size {estimated:,} should have fitted and ran out of memory"


def _notes(asked: Evaluations, maximum: int | None) -> Iterator[str]:
    largest, above = asked.largest, asked.above
    if any(row.high is None for row in asked.rows):
        yield "the method knows no upper end of what this model needs, so nothing surely fits"
    if largest is None:
        return
    if not above and maximum is not None:
        yield f"everything up to the maximum fits (batch size {largest:,})"
    elif not above:
        yield f"the search ended at batch size {largest:,}, which still fits"
    elif above[0].size > largest + 1:
        yield f"to within 1 %: {above[0].size:,}, the next size that was asked, does not surely fit"
