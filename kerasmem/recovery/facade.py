"""`kerasmem.advise`: remedies so that training fits a device, or takes less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kerasmem.checks import number, whole
from kerasmem.devices.catalogue import resolve_device
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.report import FITS, SPREAD, Bytes
from kerasmem.models.backend import import_keras
from kerasmem.models.spec import StepSettings, StepSpec, shows_settings
from kerasmem.recovery.advice import Advice, Remedy
from kerasmem.recovery.estimator import StepEstimator
from kerasmem.recovery.plans import confirmed, find_plans
from kerasmem.recovery.remedies import RemedySearch
from kerasmem.recovery.traits import traits_of
from kerasmem.units import format_size

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_BUDGET_SECONDS = 300.0
_FOR_COMBINATIONS = 0.3  # of the time, where one remedy may not be enough


@shows_settings("replicas")
def advise(
    model: Any,
    *,
    device: str | int,
    budget_seconds: float | None = DEFAULT_BUDGET_SECONDS,
    samples: int | None = None,
    confirm: bool = False,
    progress: Callable[[str], object] | None = None,
    **settings: Unpack[StepSettings],
) -> Advice:
    """Estimate remedies that make the training of a model fit a device.

    Every remedy is estimated on the changed model or step; what cannot be estimated is not offered, and
    `considered` says why. Where no single one is enough, combinations are searched for, the least harmful first.

    Args:
        model: as for `kerasmem.estimate`.
        device: a card of the catalogue ("t4") or a size ("16GB", or bytes).
        budget_seconds: time for estimates, after which no further one is begun; None: as long as it takes.
        samples: number of samples in the arrays that Keras is given whole. `fit` and `evaluate` keep a copy of them on
            the device, `predict` a copy of the inputs and all outputs, twice at its end; all figures then count this.
            Defaults to data that comes in batches.
        confirm: run three real steps of the first plan, in a process of its own under the device's limit, before it
            is recommended; where memory runs out the next plan is run. On a machine without a GPU they run on the CPU.
        progress: called with a few words before each estimate.
        **settings: as for `kerasmem.estimate`, but for `replicas`. Method "auto" keeps to the method that answers
            first.

    Returns:
        An `Advice`: a sequence of `Remedy`, by bytes saved for each unit of arithmetic; all sizes in bytes.

    Raises:
        UsageError: an argument is wrong.
        KerasmemError: as `kerasmem.estimate`, of the step as it is.

    Examples:
        >>> import kerasmem
        >>> advice = kerasmem.advise("keras.applications:ResNet50", device="4GB", batch_size=64)  # doctest: +SKIP
        >>> print(advice.plans[0].code)  # doctest: +SKIP
    """
    if budget_seconds is not None:
        number("budget_seconds", budget_seconds)
    if samples is not None:
        whole("samples", samples)
    target = resolve_device(str(device))
    import_keras()  # refuses a backend for which no remedy is written
    spec = StepSpec(model, device=device, **settings)
    if spec.replicas != 1:
        raise UsageError("replicas: advise estimates several devices itself, as one of its remedies")
    estimator = StepEstimator(
        spec, target, spec.batch_size, spec.mode, spec.jit_compile, spec.method, budget_seconds, progress,
        samples=samples,
    )  # fmt: skip
    current = estimator.estimate_current()
    search, plans = RemedySearch(estimator), []
    try:
        search.traits = traits_of(spec, current.settings.batch_size)
    except KerasmemError as error:
        search.notes.append(f"no remedy can be estimated: {error}")
    else:
        if search.traits.sample is not None:
            estimator.count_arrays(search.traits.sample)
        plans = _search(search, budget_seconds, confirm)
    return _advice(search, plans)


def _search(search: RemedySearch, budget_seconds: float | None, confirms: bool) -> list[Remedy]:
    """Look for remedies, and for plans of them if the step as it is does not fit."""
    estimator = search.estimator
    if budget_seconds is not None and not estimator.fits_now:
        estimator.reserved = _FOR_COMBINATIONS * budget_seconds
    search.run()
    estimator.reserved = 0.0
    plans = find_plans(search)
    if confirms:
        plans = confirmed(estimator, plans, search.notes)
        by_name = {each.name: each for each in plans}
        search.remedies = [by_name.get(each.name, each) for each in search.remedies]
    return plans


def _advice(search: RemedySearch, plans: list[Remedy]) -> Advice:
    estimator = search.estimator
    current, target = estimator.current, estimator.target
    assert current.device is not None  # one was named
    remedies = sorted(search.remedies, key=lambda each: -each.saving / each.compute)
    notes = [*current.notes, *search.notes]
    if unsure := [each.name for each in remedies if _may_save_nothing(each, current.bytes)]:
        notes.append(f"the interval overlaps that of the step as it is, so the saving is not sure: {', '.join(unsure)}")
    notes += _on_other_kernels(estimator)
    if not estimator.fits_now and not any(each.verdict == FITS for each in (*remedies, *plans)):
        available = f"{format_size(target.available_bytes)} of {target.name}"
        notes.append(f"nothing that was estimated surely fits the {available}")
    return Advice(
        current.model, current.settings, current.bytes, current.device, tuple(remedies), tuple(plans),
        tuple(search.considered), tuple(notes), estimator.kernels(estimator.method),
        estimator.arrays_bytes,
    )  # fmt: skip


def _on_other_kernels(estimator: StepEstimator) -> Iterator[str]:
    """Note the need on oneDNN's kernels if it is less."""
    found = estimator.with_onednn()
    now = estimator.current.bytes.total
    if found is None or found.bytes.total > now * (1 - SPREAD["graph"]):
        return
    yield (
        f"TF_ENABLE_ONEDNN_OPTS=1 in the environment, before Python starts: {format_size(found.bytes.total)} in place "
        f"of {format_size(now)}, {found.verdict}, by the same simulation on oneDNN's kernels; TensorFlow runs its own "
        "on this CPU. What it does to the time of a step was not measured"
    )


def _may_save_nothing(remedy: Remedy, now: Bytes) -> bool:
    return now.low is not None and (remedy.high is None or remedy.high >= now.low)
