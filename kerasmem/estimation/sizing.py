"""`kerasmem.max_batch_size`: how large the batch, a layer or a model can get on a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kerasmem.devices.catalogue import DeviceTarget, resolve_device
from kerasmem.errors import UsageError
from kerasmem.estimation.cache import cached_estimate
from kerasmem.estimation.facade import DEFAULT_BATCH_SIZE, estimate
from kerasmem.estimation.report import Bytes, DeviceVerdict, MemoryReport
from kerasmem.estimation.search import MOST_EVALUATIONS, TOLERANCE, Found, SearchResult, search
from kerasmem.models.opening import OBJECT_SOURCE
from kerasmem.models.variation import reshaping

BATCH = "batch_size"
_GUESSES = {BATCH: 32}
_OTHER_GUESS = 8

Ask = Callable[[int, str], MemoryReport]


def max_batch_size(
    model: Any,
    *,
    device: str | int,
    vary: str = BATCH,
    batch_size: int = DEFAULT_BATCH_SIZE,
    minimum: int = 1,
    maximum: int | None = None,
    step: int = 1,
    exact: bool = False,
    method: str = "auto",
    cache: bool = False,
    **options: Any,
) -> SearchResult:
    """Return the largest batch that fits a device, or the largest size of something else.

    The estimator is asked for a few sizes only, each once, and the answer is the largest whose whole interval fits.

    Args:
        model: as for `kerasmem.estimate`.
        device: a card of the catalogue ("t4") or a size ("16GB", or bytes).
        vary: "batch_size"; "layer.units" for a whole number in the configuration of a layer ("dense_1.units",
            "tower/conv.filters"), with which the model is built again; or the name of an argument of the function that
            builds the model ("how deep can it get").
        batch_size: samples in a batch, where something else varies.
        minimum: the smallest size to ask for.
        maximum: the largest; None: as large as fits.
        step: ask for `minimum`, `minimum + step`, … only.
        exact: search to the last one; otherwise to within 1 %, with fewer estimates.
        method: as for `kerasmem.estimate`; "auto" keeps to the method that answers first.
        cache: keep estimates of model files in the user's cache folder, and use them.
        **options: the other arguments of `kerasmem.estimate`.

    Returns:
        A `SearchResult`; all sizes in bytes.

    Raises:
        UsageError: an argument is wrong, or there is nothing of the name in `vary`.
        KerasmemError: as `kerasmem.estimate`.

    Example:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
        >>> kerasmem.max_batch_size(model, device="64MB", method="formula").largest
        6244
    """
    target = resolve_device(str(device))
    for name, number in (("minimum", minimum), ("maximum", maximum), ("step", step)):
        if (name != "maximum" or number is not None) and (isinstance(number, bool) or not isinstance(number, int)):
            raise UsageError(f"{name} {number!r}: must be a whole number")
    asker = _asker(model, vary, batch_size, str(device), cache, options)
    reports: dict[int, MemoryReport] = {}
    first_method = method

    def ask(size: int) -> Bytes:
        nonlocal first_method
        report = asker(size, first_method)
        first_method = report.settings.method  # all sizes by the same one, and no other is asked beside it
        reports[size] = report
        if vary == BATCH and report.settings.batch_size != size:
            raise UsageError(
                f"the model's input fixes the batch at {report.settings.batch_size}: give it an open batch, or vary "
                "something else"
            )
        return report.bytes

    found = search(
        ask, target.available_bytes, minimum=minimum, maximum=maximum, step=step,
        guess=_GUESSES.get(vary, _OTHER_GUESS) + minimum - 1, tolerance=0 if exact else TOLERANCE,
    )  # fmt: skip
    shown = reports[found.evaluations[0].size if found.largest is None else found.largest]
    return SearchResult(
        vary=vary,
        largest=found.largest,
        fails_from=found.fails_from,
        device=_device(target, found),
        evaluations=found.evaluations,
        report=shown,
        notes=tuple(_notes(found, vary, maximum)),
    )


def _asker(model: Any, vary: str, batch_size: int, device: str, cache: bool, options: Mapping[str, Any]) -> Ask:
    """Return what estimates one size by a method."""
    ask = cached_estimate if cache else estimate
    common = {**options, "device": device}
    if vary == BATCH:
        return lambda size, method: ask(model, batch_size=size, method=method, **common)
    common["batch_size"] = batch_size
    if "." not in vary:
        if not vary.isidentifier():
            raise UsageError(f"vary {vary!r}: write batch_size, layer.units, or an argument of the model's function")
        given = dict(common.pop("factory_args", None) or {})
        return lambda size, method: ask(model, method=method, factory_args={**given, vary: size}, **common)
    names = ("factory", "factory_args", "custom_objects", "trust")
    reshaped = reshaping(model, vary, **{name: common[name] for name in names if name in common})
    for name in ("factory", "factory_args"):
        common.pop(name, None)

    def ask_reshaped(size: int, method: str) -> MemoryReport:
        with reshaped(size) as source:
            report = ask(source, method=method, **common)
        name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else OBJECT_SOURCE
        return replace(report, model=replace(report.model, source=name))

    return ask_reshaped


def _device(target: DeviceTarget, found: Found) -> DeviceVerdict:
    return DeviceVerdict(target.name, target.memory_bytes, target.available_bytes, found.verdict, target.note)


def _notes(found: Found, vary: str, maximum: int | None) -> Iterator[str]:
    asked = [each.size for each in found.evaluations]
    if found.largest is not None and found.largest == max(asked):
        yield (
            f"everything up to the maximum fits ({vary} {found.largest:,})"
            if maximum is not None
            else f"the search ended at {vary} {found.largest:,}, which still fits"
        )
    if not found.is_exact and len(asked) >= MOST_EVALUATIONS:
        yield f"the search stopped after {len(asked)} estimates: something larger may fit"
    elif not found.is_exact and found.next_asked is not None:
        yield f"to within 1 %: {found.next_asked:,}, the next size that was asked, does not surely fit"
    if not found.is_steady:
        small = next(each.size for each in found.evaluations if each.verdict != "fits")
        yield (
            f"memory does not grow steadily with {vary}: {small:,} does not surely fit, the larger {found.largest:,} "
            "does; only the sizes listed were asked"
        )
    if any(each.high is None for each in found.evaluations):
        yield "the method knows no upper end of what this model needs, so nothing surely fits"
