"""`kerasmem.advise`: what to do so that training fits a device, or takes less."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kerasmem.devices.catalogue import resolve_device
from kerasmem.errors import KerasmemError
from kerasmem.estimation.arguments import DEFAULT_BATCH_SIZE
from kerasmem.estimation.report import Bytes
from kerasmem.recovery.advice import Advice, Considered, Remedy, ranked
from kerasmem.recovery.asking import Asker, check_budget
from kerasmem.recovery.building import Origin
from kerasmem.recovery.inspecting import Facts, inspect_model
from kerasmem.recovery.planning import find_plans
from kerasmem.recovery.reviewing import review
from kerasmem.units import format_size

DEFAULT_BUDGET_SECONDS = 300.0
_FOR_COMBINATIONS = 0.3  # of the time, where one remedy may not be enough


def advise(
    model: Any,
    *,
    device: str | int,
    batch_size: int = DEFAULT_BATCH_SIZE,
    method: str = "auto",
    optimizer: str | None = None,
    loss: str | None = None,
    dtype_policy: str | None = None,
    jit_compile: bool | str = "auto",
    mode: str = "train",
    input_shape: Any = None,
    factory: str | None = None,
    factory_args: Mapping[str, Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    trust: bool = False,
    cache: bool = False,
    budget_seconds: float | None = DEFAULT_BUDGET_SECONDS,
    progress: Callable[[str], object] | None = None,
) -> Advice:
    """Return what to do so that training a model fits a device: remedies, each with the saving that is predicted.

    Every remedy is estimated anew, on the changed model or step; what cannot be estimated is not offered, and
    `considered` says why. Where no single one is enough, combinations are searched for, the least harmful first.

    Args:
        model: as for `kerasmem.estimate`.
        device: a card of the catalogue ("t4") or a size ("16GB", or bytes).
        batch_size: samples in a batch.
        method: as for `kerasmem.estimate`; "auto" keeps to the method that answers first.
        optimizer, loss, dtype_policy, jit_compile, mode, input_shape, factory, factory_args, custom_objects, trust:
            as for `kerasmem.estimate`.
        cache: keep estimates of model files in the user's cache folder, and use them.
        budget_seconds: time for estimates, after which no further one is begun; None: as long as it takes.
        progress: called with a few words before each estimate.

    Returns:
        An `Advice`: a sequence of `Remedy`, by bytes saved for each unit of arithmetic; all sizes in bytes.

    Raises:
        UsageError: an argument is wrong.
        KerasmemError: as `kerasmem.estimate`, of the step as it is.

    Example:
        >>> import kerasmem
        >>> advice = kerasmem.advise("keras.applications:ResNet50", device="4GB", batch_size=64)  # doctest: +SKIP
        >>> print(advice.plans[0].code)  # doctest: +SKIP
    """
    check_budget(budget_seconds)
    target = resolve_device(str(device))
    options = {
        "factory": factory, "factory_args": factory_args, "custom_objects": custom_objects, "trust": trust,
        "dtype_policy": dtype_policy,
    }  # fmt: skip
    origin = Origin(model, options, optimizer, loss, input_shape)
    asker = Asker(
        origin, target, batch_size=batch_size, mode=mode, jit_compile=jit_compile, method=method, cache=cache,
        budget_seconds=budget_seconds, progress=progress,
    )  # fmt: skip
    base = asker.first()
    notes = list(base.notes)
    remedies: list[Remedy] = []
    plans: list[Remedy] = []
    considered: list[Considered] = []
    try:
        facts: Facts | None = inspect_model(origin, base.settings.batch_size, jit_compile, mode)
    except KerasmemError as error:
        facts = None
        notes.append(f"no remedy can be estimated: {error}")
    if facts is not None:
        if base.device is not None and base.device.verdict != "fits" and budget_seconds is not None:
            asker.reserved = _FOR_COMBINATIONS * budget_seconds
        found = review(asker, facts)
        asker.reserved = 0.0
        remedies, considered = found.remedies, found.considered
        plans = find_plans(asker, facts, found)
        notes += found.notes
    assert base.device is not None  # one was named
    if unsure := [each.name for each in ranked(remedies) if _may_save_nothing(each, base.bytes)]:
        notes.append(f"the interval overlaps that of the step as it is, so the saving is not sure: {', '.join(unsure)}")
    if base.device.verdict != "fits" and not any(each.verdict == "fits" for each in (*remedies, *plans)):
        room = f"{format_size(target.available_bytes)} of {target.name}"
        notes.append(f"nothing that was estimated surely fits the {room}")
    return Advice(
        base.model, base.settings, base.bytes, base.device, ranked(remedies), tuple(plans), tuple(considered),
        tuple(notes),
    )  # fmt: skip


def _may_save_nothing(remedy: Remedy, now: Bytes) -> bool:
    return now.low is not None and (remedy.high is None or remedy.high >= now.low)
