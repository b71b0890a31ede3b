"""`kerasmem.max_batch_size`: how large the batch, a layer or a model can get on a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kerasmem import checks
from kerasmem.checks import Method
from kerasmem.devices.catalogue import DeviceTarget, available_bytes, resolve_device
from kerasmem.devices.host import host_memory
from kerasmem.devices.live import list_devices, read_machine
from kerasmem.errors import UsageError
from kerasmem.estimation.arguments import DEFAULT_BATCH_SIZE, EstimateArguments
from kerasmem.estimation.facade import estimate, kept_open
from kerasmem.estimation.probe.running import DEFAULT_TIMEOUT, try_batch
from kerasmem.estimation.report import Bytes, DeviceVerdict, MemoryReport
from kerasmem.estimation.search import MOST_EVALUATIONS, TOLERANCE, Found, SearchResult, search
from kerasmem.estimation.verdict import DOES_NOT_FIT, FITS
from kerasmem.estimation.verification import Trial, largest_that_ran
from kerasmem.models.backend import require_tensorflow
from kerasmem.models.opening import OBJECT_SOURCE
from kerasmem.models.variation import reshaping
from kerasmem.processes.children import child_environment

BATCH = "batch_size"
_GUESSES = {BATCH: 32}
_OTHER_GUESS = 8
DEFAULT_STEPS = 3  # that are run to confirm a size

Ask = Callable[[int, Any], MemoryReport]  # by a size and a method


@checks.former_names(verify="confirm")
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
    method: Method = "auto",
    margin: float = 0.0,
    confirm: bool = False,
    samples: int | None = None,
    steps: int = DEFAULT_STEPS,
    timeout: float = DEFAULT_TIMEOUT,
    **options: Any,
) -> SearchResult:
    """Return the largest batch that fits a device, or the largest size of something else.

    The estimator is asked for a few sizes only, each once, and the answer is the largest whose whole interval fits.
    With `confirm`, real steps are then run there, and at a few sizes around it, each in a process of its own under the
    device's limit: training, the smaller last batch of an epoch, and evaluation. The answer is then the largest that
    ran.

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
        margin: the share of what the device has that is to stay free, from 0 to below 1.
        confirm: run real steps; the batch size only. Where the machine has no GPU they run on the CPU, with the GPUs'
            allocator and the device's limit.
        samples: of the data, for the size of the last batch; None: half a batch.
        steps: training steps at each size that is tried.
        timeout: seconds for each size that is tried.
        **options: the other arguments of `kerasmem.estimate`.

    Returns:
        A `SearchResult`; all sizes in bytes.

    Raises:
        UsageError: an argument is wrong, or there is nothing of the name in `vary`.
        KerasmemError: as `kerasmem.estimate`.

    Examples:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
        >>> kerasmem.max_batch_size(model, device="64MB", method="formula").largest
        6244
    """
    target = _with_margin(resolve_device(str(device)), margin)
    sizes: dict[str, Any] = {"minimum": minimum, "maximum": maximum, "step": step}
    for name, size in {**sizes, "samples": samples, "steps": steps}.items():
        if size is not None or name not in ("maximum", "samples"):
            checks.whole(name, size)
    if not checks.number("timeout", timeout) > 0:
        raise UsageError(f"timeout {timeout!r}: give seconds, more than 0")
    if confirm:
        require_tensorflow("confirm", "leave it out: TensorFlow's allocator alone can be held to a limit")
    if confirm and vary != BATCH:
        raise UsageError(f"confirm: real steps are run for the batch size only, not for {vary!r}")
    asked = _Asked(_asker(model, vary, batch_size, str(device), options), vary, method)
    with kept_open():
        found = search(
            asked.need, target.available_bytes, **sizes, guess=_GUESSES.get(vary, _OTHER_GUESS) + minimum - 1,
            tolerance=0 if exact else TOLERANCE,
        )  # fmt: skip
    tries = {"steps": steps, "samples": samples, "timeout": timeout}
    verified = _verified(model, target, found, sizes, options, **tries) if confirm else None
    return _result(asked, target, found, maximum, verified)


class _Asked:
    """Estimates one size after another, all by the method that answered first."""

    def __init__(self, ask: Ask, vary: str, method: str) -> None:
        self.vary, self._ask, self._method = vary, ask, method
        self.reports: dict[int, MemoryReport] = {}

    def need(self, size: int) -> Bytes:
        """Return what one size needs."""
        report = self.reports[size] = self._ask(size, self._method)
        self._method = report.settings.method
        if self.vary == BATCH and report.settings.batch_size != size:
            raise UsageError(
                f"the model's input fixes the batch at {report.settings.batch_size}: give it an open batch, or vary "
                "something else"
            )
        return report.bytes


def _result(
    asked: _Asked,
    target: DeviceTarget,
    found: Found,
    maximum: int | None,
    verified: tuple[int | None, tuple[Trial, ...]] | None,
) -> SearchResult:
    """Return the answer: of real steps where they were run, and otherwise the estimator's."""
    largest, fits, notes = found.largest, found.verdict, list(_notes(found, asked.vary, maximum))
    trials: tuple[Trial, ...] = ()
    if verified is not None:
        largest, trials = verified
        fits = DOES_NOT_FIT if largest is None else FITS
        if largest is not None and largest not in asked.reports:
            asked.need(largest)
        notes += _trial_notes(found, largest, trials)
    return SearchResult(
        vary=asked.vary,
        largest=largest,
        fails_from=found.fails_from,
        device=DeviceVerdict(target.name, target.memory_bytes, target.available_bytes, fits, target.note),
        evaluations=found.evaluations,
        report=asked.reports[found.evaluations[0].size if largest is None else largest],
        notes=tuple(notes),
        trials=trials,
    )


def find_batch_size(
    model: Any,
    *,
    device: str | int | None = None,
    margin: float = 0.05,
    floor: int = 1,
    ceiling: int | None = None,
    samples: int | None = None,
    steps: int = DEFAULT_STEPS,
    **options: Any,
) -> SearchResult:
    """Return the largest batch size at which real steps run within a device's memory.

    The estimator names a size; two or three real training steps, the smaller last batch of an epoch and evaluation are
    then run at it in a process of its own, under the device's limit, and at a few sizes around it. This process
    allocates nothing and cannot be damaged.

    Args:
        model: as for `kerasmem.estimate`; a function or class must be importable from another process.
        device: a card of the catalogue ("t4") or a size ("16GB", or bytes); None: what is free now on this machine's
            first GPU or, without one, in its memory.
        margin: the share of that which is to stay free.
        floor: the smallest size.
        ceiling: the largest; None: as large as fits.
        samples: of the data, for the size of the last batch; None: half a batch.
        steps: training steps at each size that is tried.
        **options: the other arguments of `kerasmem.max_batch_size`.

    Returns:
        A `SearchResult`: `largest` is None where not even `floor` ran; `trials` has what was run.

    Raises:
        UsageError: an argument is wrong, or the model exists in this process only.
        KerasmemError: as `kerasmem.max_batch_size`; or a step failed for another reason than memory.

    Examples:
        >>> import kerasmem
        >>> kerasmem.find_batch_size("keras.applications:MobileNetV2", device="2GB").largest  # doctest: +SKIP
        27
    """
    where = None
    if device is None:
        device, where = room_here()
    found = max_batch_size(
        model, device=device, margin=margin, minimum=floor, maximum=ceiling, samples=samples, steps=steps, confirm=True,
        **options,
    )  # fmt: skip
    return found if where is None else replace(found, device=replace(found.device, name=where))


def _with_margin(target: DeviceTarget, margin: float) -> DeviceTarget:
    if checks.number("margin", margin) >= 1:
        raise UsageError(f"margin {margin!r}: give the share that is to stay free, from 0 to below 1")
    if not margin:
        return target
    note = f"{margin:.0%} of it is to stay free".replace("%", " %")
    available = int(target.available_bytes * (1 - margin))
    return replace(target, available_bytes=available, note=f"{target.note}; {note}" if target.note else note)


def room_here() -> tuple[int, str]:
    """Return the bytes that TensorFlow can have on this machine now, and where: its first GPU, or else the host."""
    for device in read_machine().devices:
        if device.cuda_index == 0 and device.free_bytes is not None:
            return available_bytes(device.free_bytes, device.capability), device.name or "GPU:0"
    return host_memory().available_bytes, "this machine's memory"


def _verified(
    model: Any,
    target: DeviceTarget,
    found: Found,
    sizes: dict[str, Any],
    options: Mapping[str, Any],
    *,
    samples: Any,
    **tries: Any,
) -> tuple[int | None, tuple[Trial, ...]]:
    """Run real steps around what the estimator found."""
    arguments = EstimateArguments(model, **options)  # of several devices a step runs here as on one of them
    first = sizes["minimum"] if found.largest is None else found.largest
    with arguments.request(sizes["minimum"], arguments.jit_compile) as request:

        def try_size(size: int) -> Trial:
            last = samples % size if samples is not None else size // 2
            return try_batch(request, size, target.available_bytes, last=last, **tries)

        return largest_that_ran(try_size, first=first, fails_from=found.fails_from, **sizes)


def _trial_notes(found: Found, largest: int | None, trials: tuple[Trial, ...]) -> Iterator[str]:
    if all(each.cuda_index is None for each in list_devices(environ=child_environment())):
        yield "ran on the CPU, with the GPUs' allocator and the device's limit; a GPU's kernels may take other scratch"
    if largest is None:
        yield f"not even batch size {trials[-1].size:,} ran"
    elif found.largest is not None and largest < found.largest:
        yield f"the estimate was too low: batch size {found.largest:,} should have fitted and ran out of memory"


def _asker(model: Any, vary: str, batch_size: int, device: str, options: Mapping[str, Any]) -> Ask:
    """Return what estimates one size by a method."""
    common = {**options, "device": device}
    if vary == BATCH:
        return lambda size, method: estimate(model, batch_size=size, method=method, **common)
    common["batch_size"] = batch_size
    if "." not in vary:
        if not vary.isidentifier():
            raise UsageError(f"vary {vary!r}: write batch_size, layer.units, or an argument of the model's function")
        given = dict(common.pop("factory_args", None) or {})
        return lambda size, method: estimate(model, method=method, factory_args={**given, vary: size}, **common)
    reshaped = reshaped_ask(estimate, model, vary, common)
    return lambda size, method: reshaped(size, method=method)


def reshaped_ask(
    ask: Callable[..., MemoryReport], model: Any, vary: str, options: Mapping[str, Any]
) -> Callable[..., MemoryReport]:
    """Return what estimates a model with another number in one layer: by that number, and by further arguments.

    Args:
        ask: what estimates.
        model: as for `kerasmem.estimate`.
        vary: "layer.field".
        options: the other arguments of `ask`.

    Raises:
        UsageError: there is no such layer or field.
        KerasmemError: the model cannot be built.
    """
    names = ("factory", "factory_args", "custom_objects", "trust")
    reshaped = reshaping(model, vary, **{name: options[name] for name in names if name in options})
    common = {name: value for name, value in options.items() if name not in ("factory", "factory_args")}

    def ask_reshaped(size: int, **more: Any) -> MemoryReport:
        with reshaped(size) as source:
            report = ask(source, **common, **more)
        name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else OBJECT_SOURCE
        return replace(report, model=replace(report.model, source=name))

    return ask_reshaped


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
