"""`kerasmem.advise`: remedies that make training fit a device or need less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kerasmem.checks import number, whole
from kerasmem.devices.catalogue import resolve_device
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.report import FITS, Bytes
from kerasmem.models.backend import import_keras
from kerasmem.models.spec import StepSettings, StepSpec, shows_settings
from kerasmem.recovery.advice import Advice, Remedy
from kerasmem.recovery.changed_model import traits_of, whole_arrays
from kerasmem.recovery.estimator import StepEstimator
from kerasmem.recovery.plans import confirm_plans, find_plans
from kerasmem.recovery.remedies import RemedySearch
from kerasmem.units import format_size

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_BUDGET_SECONDS = 300.0
_FOR_COMBINATIONS = 0.3  # of the time, if one remedy may not be enough


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

    Every remedy is estimated on the changed model or step. Remedies that cannot be estimated or save nothing are in
    `considered`, with the reason. If no single remedy is enough, combinations are searched, the least harmful first.

    Args:
        model: as for `kerasmem.estimate`.
        device: a card of the catalogue ("t4") or a size ("16GB", or bytes).
        budget_seconds: seconds after which no further estimate begins; None for no limit. Defaults to 300.
        samples: length of the arrays given to Keras whole. It copies them to the device, and `predict` keeps all
            outputs there, which leaves less for the steps. Defaults to data in batches.
        confirm: run three real steps of the first plan in a separate process under the device's limit; if memory runs
            out, the next plan is run. Without a GPU they run on the CPU. Defaults to False.
        progress: called with a few words before each estimate.
        **settings: as for `kerasmem.estimate`, except `replicas`. Method "auto" uses one method for all estimates.

    Returns:
        An `Advice`: a sequence of `Remedy`, those with the most bytes saved per unit of arithmetic first. All sizes are
        in bytes.

    Raises:
        UsageError: If an argument is wrong.
        KerasmemError: If `kerasmem.estimate` raises one for the current step.

    Examples:
        >>> import kerasmem
        >>> advice = kerasmem.advise("keras.applications:ResNet50", device="4GB", batch_size=64)  # doctest: +SKIP
        >>> print(advice.plans[0].code)  # doctest: +SKIP
    """
    if budget_seconds is not None:
        number("budget_seconds", budget_seconds)
    target = resolve_device(str(device))
    import_keras()  # refuses an unsupported backend
    spec = StepSpec(model, device=device, **settings)
    if spec.replicas != 1:
        raise UsageError("replicas must be 1, as advise estimates several devices as one of its remedies")
    arrays = None if samples is None else whole_arrays(spec, whole("samples", samples))
    estimator = StepEstimator(
        spec, target, spec.samples, spec.mode, spec.jit_compile, spec.method, budget_seconds, progress, arrays
    )
    current = estimator.estimate_current()
    data_bytes, joined = (0, None) if arrays is None else (arrays.most_bytes, estimator.joined)
    search = RemedySearch(estimator)
    plans: list[Remedy] = []
    if joined is not None:
        most = format_size(joined.high)
        search.notes.append(
            f"predict joins the outputs of all batches at the end: needs {format_size(joined.total)}, at most {most}"
        )
    if not estimator.target.available_bytes:
        search.notes.append("no remedy is estimated, as the arrays need more than the device has")
        return _advice(search, plans, data_bytes)
    try:
        search.traits = traits_of(spec, current.settings.batch_size)
    except KerasmemError as error:
        search.notes.append(f"no remedy can be estimated: {error}")
    else:
        plans = _search(search, budget_seconds, confirm)
    return _advice(search, plans, data_bytes)


def _search(search: RemedySearch, budget_seconds: float | None, confirms: bool) -> list[Remedy]:
    """Search remedies, and plans of them if the current step does not fit."""
    estimator = search.estimator
    if budget_seconds is not None and not estimator.fits_now:
        estimator.reserved = _FOR_COMBINATIONS * budget_seconds
    search.run()
    estimator.reserved = 0.0
    plans = find_plans(search)
    if confirms:
        plans = confirm_plans(estimator, plans, search.notes)
        by_name = {plan.name: plan for plan in plans}
        search.remedies = [by_name.get(remedy.name, remedy) for remedy in search.remedies]
    return plans


def _advice(search: RemedySearch, plans: list[Remedy], data_bytes: int) -> Advice:
    estimator = search.estimator
    current, target = estimator.current, estimator.target
    assert current.device is not None
    remedies = sorted(search.remedies, key=lambda remedy: -remedy.saving / remedy.compute)
    notes = [*current.notes, *search.notes]
    if unsure := [remedy.name for remedy in remedies if _may_save_nothing(remedy, current.bytes)]:
        notes.append(f"the interval overlaps that of the current step, so the saving is uncertain: {', '.join(unsure)}")
    if not estimator.fits_now and not any(remedy.verdict == FITS for remedy in (*remedies, *plans)):
        available = f"{format_size(target.available_bytes)} of {target.name}"
        notes.append(f"no estimated remedy surely fits the {available}")
    return Advice(
        current.model, current.settings, current.bytes, current.device, tuple(remedies), tuple(plans),
        tuple(search.considered), tuple(notes), data_bytes,
    )  # fmt: skip


def _may_save_nothing(remedy: Remedy, now: Bytes) -> bool:
    return now.low is not None and (remedy.high is None or remedy.high >= now.low)
