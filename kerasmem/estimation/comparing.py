"""`kerasmem.compare`: differences between two estimates by category and layer, and limits on them."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from typing_extensions import Unpack

from kerasmem.devices.catalogue import DeviceTarget, resolve_device
from kerasmem.errors import InputError, UsageError
from kerasmem.estimation.estimating import estimate_spec
from kerasmem.estimation.report import (
    TOO_CLOSE,
    VERDICTS,
    Bytes,
    LayerMemory,
    MemoryReport,
    check_sizes,
    device_verdict,
    interval_verdict,
)
from kerasmem.files import json_object
from kerasmem.models.spec import EstimateSettings, StepSpec, shows_settings
from kerasmem.records import Record, json_field
from kerasmem.units import format_size, parse_size

WITHIN, EXCEEDED = "within the limit", "exceeds the limit"
_WORDS = dict(zip(VERDICTS, (WITHIN, TOO_CLOSE, EXCEEDED), strict=True))


@dataclass(frozen=True, kw_only=True)
class Difference(Record, what="difference", also=("change",)):
    """A category or a layer in both estimates.

    Attributes:
        name: the category, or the layer's name in the second model ("a → b" if the names differ).
        class_name: the layer's class; "" for a category.
        before: bytes in the first estimate, or None if unknown or not in it.
        after: bytes in the second estimate, or None.
        is_in: "both", "first" or "second".
    """

    name: str
    class_name: str = json_field("class")
    before: int | None
    after: int | None
    is_in: str = "both"

    @property
    def change(self) -> int | None:
        """Change of the bytes, or None if unknown. A layer that one model lacks has 0 bytes there."""
        before = 0 if self.is_in == "second" else self.before
        after = 0 if self.is_in == "first" else self.after
        return None if before is None or after is None else after - before


@dataclass(frozen=True)
class LimitVerdict:
    """Whether the second estimate is within a limit.

    Attributes:
        what: "budget" or "increase".
        limit_bytes: maximum of the second estimate, or of its increase over the first.
        low: lower end of the bytes that the limit applies to.
        high: upper end of the bytes, or None if unknown.
        verdict: "within the limit", "exceeds the limit" or "too close to call".
    """

    what: str
    limit_bytes: int
    low: int
    high: int | None
    verdict: str


@dataclass(frozen=True)
class Comparison(Record, what="comparison", version=1, rows="categories"):
    """Two estimates and their differences.

    Attributes:
        before: the first estimate.
        after: the second.
        categories: weights, optimizer, …, and the total last.
        layers: the layers of both, the largest differences first.
        limits: verdicts on `budget` and `max_increase`.
        notes: settings in which the two differ, which explain a part of the differences.
    """

    before: MemoryReport
    after: MemoryReport
    categories: tuple[Difference, ...]
    layers: tuple[Difference, ...]
    limits: tuple[LimitVerdict, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """A summary: "a needs 2.00 GiB, b needs 2.10 GiB"."""
        reports = (self.before, self.after)
        return ", ".join(f"{report.model.name} needs {format_size(report.peak)}" for report in reports)


@shows_settings()
def compare(
    a: Any,
    b: Any,
    *,
    budget: int | str | None = None,
    max_increase: int | str | None = None,
    allow_different_settings: bool = False,
    **settings: Unpack[EstimateSettings],
) -> Comparison:
    """Compare the memory of two models or saved reports.

    Models are estimated with the same settings. If `a` or `b` is a report, the other one is estimated with the report's
    batch size, method, mode, device, replicas, kernels and threads, unless `settings` override them. So the result does
    not depend on the machine.

    Args:
        a: a model as for `kerasmem.estimate`, a `MemoryReport`, or the path of a report saved by
            `kerasmem estimate --json`.
        b: the same, after the change.
        budget: maximum for `b`: bytes, or a size such as "14GiB". Defaults to no limit.
        max_increase: maximum increase from `a` to `b`: bytes, a size such as "200MB", or a share of `a` such as "5%".
            Defaults to no limit.
        allow_different_settings: compare reports even if these settings differ. Defaults to False.
        **settings: as for `kerasmem.estimate`.

    Returns:
        A `Comparison`; all sizes in bytes. `categories`, `layers` and `limits` have the differences and verdicts.

    Raises:
        UsageError: If an argument is wrong, or the two were estimated with different settings.
        InputError: If a saved report is damaged.
        KerasmemError: As `kerasmem.estimate`.

    Examples:
        >>> import keras, kerasmem
        >>> small, large = (
        ...     keras.Sequential([keras.Input((8,)), keras.layers.Dense(units)]) for units in (4, 8)
        ... )
        >>> kerasmem.compare(small, large, method="formula").categories[-1].change
        1312
    """
    most = None if budget is None else parse_size(budget, field="budget")
    increase = None if max_increase is None else _read_increase(max_increase)
    saved = [_saved_report(model) for model in (a, b)]
    first_saved = next((report for report in saved if report is not None), None)
    spec = StepSpec(None, **{**({} if first_saved is None else _settings_of(first_saved)), **settings})
    reports = []
    for model, report in zip((a, b), saved, strict=True):
        if report is None:
            report = estimate_spec(replace(spec, model=model))
            spec = replace(spec, method=report.settings.method)  # the second uses the method chosen for the first
        elif settings.get("device") is not None:
            report = _judged(report, resolve_device(str(settings["device"])))
        reports.append(report)
    before, after = reports
    if None not in saved:
        _check_own_settings(before, settings)
    differences = list(_setting_differences(before, after, _OF_THE_ESTIMATE))
    if differences and not allow_different_settings:
        raise UsageError(
            f"a and b: {'; '.join(differences)}; estimate both with the same settings{_fix(before, after)}, or set "
            "allow_different_settings (--allow-different-settings)"
        )
    categories = [
        Difference(name=name, class_name="", before=getattr(before.bytes, name), after=getattr(after.bytes, name))
        for name in (*Bytes.CATEGORIES, "total")
    ]
    limits = [] if most is None else [("budget", most, after.bytes.bounds)]
    if increase is not None:
        share, size = increase
        limits.append(("increase", int(before.bytes.total * share) + size, _increase(before.bytes, after.bytes)))
    return Comparison(
        before,
        after,
        tuple(row for row in categories if (row.before, row.after) != (None, None)),
        tuple(sorted(_layers(before.layers, after.layers), key=lambda row: -abs(row.change or 0))),
        tuple(LimitVerdict(name, limit, *ends, _WORDS[interval_verdict(*ends, limit)]) for name, limit, ends in limits),
        tuple(_setting_differences(before, after, _OF_THE_ESTIMATE | _OF_THE_MODEL)),
    )


def _read_increase(value: int | str) -> tuple[float, int]:
    """Return a limit on the increase: a share of the first estimate, and bytes."""
    text = str(value).strip()
    if not text.endswith("%"):
        return 0.0, parse_size(value, field="max_increase")
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1000:
        raise UsageError(f"max_increase must be a share of a such as 5%, or a size such as 200MB; got {value!r}")
    return share, 0


def _saved_report(model: Any) -> MemoryReport | None:
    """Return a report, from its file if necessary, or None for a model."""
    if isinstance(model, MemoryReport):
        return model
    if not isinstance(model, (str, os.PathLike)):
        return None
    path = os.fspath(model)
    data = json_object(path)
    if data is None or "formula" not in data or "format_version" not in data:
        return None
    try:
        report = MemoryReport.from_dict(data)
        check_sizes(report)
    except InputError as error:
        raise InputError(f"{path}: {error}; to replace it, run kerasmem estimate MODEL --json > {path}") from error
    return report


def _settings_of(report: MemoryReport) -> dict[str, Any]:
    """Return the arguments of an estimate comparable to a report."""
    settings = report.settings
    arguments = {
        "batch_size": settings.batch_size * settings.replicas,
        **{name: getattr(settings, name) for name in ("mode", "device", "replicas", "kernels", "threads")},
    }
    is_run = settings.method in ("measure", "profile")
    return arguments if is_run else {**arguments, "method": settings.method}


def _judged(report: MemoryReport, target: DeviceTarget) -> MemoryReport:
    """Judge a saved report on another device, if its bytes do not depend on the device."""
    named = report.settings.device
    are_cards = [resolve_device(name).source == "catalogue" for name in (named, target.name) if name is not None]
    if any(are_cards) and named != target.name and report.settings.method != "formula":
        return report
    settings = replace(report.settings, device=target.name)
    return replace(report, settings=settings, device=device_verdict(target, report.bytes))


def _fix(before: MemoryReport, after: MemoryReport) -> str:
    """Return the options that give the second estimate the settings of the first."""
    second = _settings_of(after)
    options = [
        f"--{name.replace('_', '-')} {shlex.quote(str(value))}"
        for name, value in _settings_of(before).items()
        if value is not None and value != second.get(name)
    ]
    return f" (b with {' '.join(options)})" if options else ""


def _check_own_settings(report: MemoryReport, settings: Mapping[str, Any]) -> None:
    """Refuse settings that differ from those of a saved report, if no model is estimated with them."""
    for name in _OF_THE_ESTIMATE.keys() - {"device"}:  # `_judged` has a new verdict
        own, value = {**vars(report.settings), **_settings_of(report)}[name], settings.get(name)
        if value not in (None, "auto", own):
            raise UsageError(f"{name} must be {own}, as in the saved reports; got {value}. Estimate the models again")


def _increase(before: Bytes, after: Bytes) -> tuple[int, int | None]:
    """Return the interval of the increase.

    Equal ends are subtracted, since one method errs the same way on two variants of a model.
    """
    ends = [(before.total, after.total), (before.low, after.low), (before.high, after.high)]
    changes = [b - a for a, b in ends if a is not None and b is not None]
    return min(changes), None if (before.high is None) != (after.high is None) else max(changes)


def _layers(before: Iterable[LayerMemory], after: Iterable[LayerMemory]) -> list[Difference]:
    """Pair layers of equal class and name, at first with Keras's numbers and then without."""
    first, second, rows = list(before), list(after), []
    for key in (attrgetter("name", "class_name"), _stem):
        waiting: defaultdict[tuple[str, str], deque[LayerMemory]] = defaultdict(deque)
        for row in first:
            waiting[key(row)].append(row)
        unpaired = []
        for row in second:
            if waiting[key(row)]:
                rows.append(_difference(waiting[key(row)].popleft(), row))
            else:
                unpaired.append(row)
        first, second = list(itertools.chain.from_iterable(waiting.values())), unpaired
    return [*rows, *(_difference(row, None) for row in first), *(_difference(None, row) for row in second)]


def _difference(before: LayerMemory | None, after: LayerMemory | None) -> Difference:
    row = after or before
    assert row is not None
    is_in = "both"
    if before is None or after is None:
        is_in = "second" if before is None else "first"
    is_renamed = before is not None and before.name != row.name
    return Difference(
        name=f"{before.name} → {row.name}" if before is not None and is_renamed else row.name,
        class_name=row.class_name,
        before=None if before is None else before.bytes,
        after=None if after is None else after.bytes,
        is_in=is_in,
    )


def _stem(row: LayerMemory) -> tuple[str, str]:
    return re.sub(r"_\d+(?=/|$)", "", row.name), row.class_name


# Settings by plural name: those of the estimate, and those that a compiled model may have itself.
_OF_THE_ESTIMATE = {
    "method": "methods", "execution": "executions", "batch_size": "batch sizes", "mode": "modes", "device": "devices",
    "replicas": "numbers of replicas", "kernels": "kernels", "threads": "numbers of threads",
    "intra_op_threads": "numbers of threads of an operation", "stands_in": "uses of a CPU in place of the card",
}  # fmt: skip
_OF_THE_MODEL = {"optimizer": "optimizers", "dtype_policy": "dtype policies"}


def _setting_differences(before: MemoryReport, after: MemoryReport, names: Mapping[str, str]) -> Iterator[str]:
    for name, words in names.items():
        first, second = getattr(before.settings, name), getattr(after.settings, name)
        if first != second:
            yield f"the {words} differ: {_word(first)} and {_word(second)}"


def _word(value: Any) -> str:
    return "none" if value is None else str(value)
