"""`kerasmem.compare`: differences between two estimates by category and layer, and limits on them."""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from typing_extensions import Unpack

from kerasmem.errors import InputError, UsageError
from kerasmem.estimation.estimating import estimate_spec
from kerasmem.estimation.report import TOO_CLOSE, VERDICTS, Bytes, LayerMemory, MemoryReport, judge
from kerasmem.files import json_object
from kerasmem.models.spec import EstimateSettings, StepSpec, shows_settings
from kerasmem.records import Record, renamed
from kerasmem.units import format_size, parse_size

WITHIN, EXCEEDED = "within the limit", "exceeds the limit"
_WORDS = dict(zip(VERDICTS, (WITHIN, TOO_CLOSE, EXCEEDED), strict=True))


@dataclass(frozen=True, kw_only=True)
class Difference(Record, what="difference", also=("change",)):
    """A category or a layer in both estimates; None if one does not have it, or does not know its bytes.

    Attributes:
        name: the category, or the layer's name in the second model ("a → b" where the names differ).
        class_name: the layer's class; "" for a category.
        before: bytes in the first.
        after: bytes in the second.
        is_in: "both", "first" or "second".
    """

    name: str
    class_name: str = renamed("class")
    before: int | None
    after: int | None
    is_in: str = "both"

    @property
    def change(self) -> int | None:
        """Bytes that the second takes more; what only one has counts in full, what is unknown gives None."""
        before = 0 if self.is_in == "second" else self.before
        after = 0 if self.is_in == "first" else self.after
        return None if before is None or after is None else after - before


@dataclass(frozen=True)
class LimitVerdict:
    """Whether the second keeps to a limit.

    Attributes:
        what: "budget" or "increase".
        limit_bytes: the most that the second may take, or take more than the first.
        low: the least that it does.
        high: the most; None where not known.
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
        layers: of both; those that differ most come first.
        limits: verdicts on the limits given.
        notes: in which settings the two differ, so that a reader does not take that for the models' doing.
    """

    before: MemoryReport
    after: MemoryReport
    categories: tuple[Difference, ...]
    layers: tuple[Difference, ...]
    limits: tuple[LimitVerdict, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """The answer: "a needs 2.00 GiB, b needs 2.10 GiB"."""
        return ", ".join(f"{each.model.name} needs {format_size(each.peak)}" for each in (self.before, self.after))


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
    batch size, method and mode, unless `settings` have them.

    Args:
        a: a model as for `kerasmem.estimate`, a `MemoryReport`, or the path of one that `kerasmem estimate --json`
            printed.
        b: the same, after the change.
        budget: maximum for `b`: bytes, or a size such as "14GiB". Defaults to no limit.
        max_increase: maximum that `b` may take more than `a`: bytes, a size such as "200MB", or a share of `a` such as
            "5%". Defaults to no limit.
        allow_different_settings: compare reports even if their batch sizes, methods or modes differ. Defaults to False.
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
    known = next((report for report in saved if report is not None), None)
    spec = StepSpec(None, **{**({} if known is None else _settings_of(known)), **settings})
    reports = []
    for model, report in zip((a, b), saved, strict=True):
        if report is None:
            report = estimate_spec(replace(spec, model=model))
            spec = replace(spec, method=report.settings.method)  # that answered for the first, also for the second
        reports.append(report)
    before, after = reports
    unlike = list(_differing(before, after, _ASKED))
    if unlike and not allow_different_settings:
        raise UsageError(
            f"a and b: {'; '.join(unlike)}; estimate both alike, or set allow_different_settings "
            "(--allow-different-settings)"
        )
    categories = [
        Difference(name=name, class_name="", before=getattr(before.bytes, name), after=getattr(after.bytes, name))
        for name in (*Bytes.CATEGORIES, "total")
    ]
    asked = [] if most is None else [("budget", most, after.bytes.bounds)]
    if increase is not None:
        share, size = increase
        asked.append(("increase", int(before.bytes.total * share) + size, _increase(before.bytes, after.bytes)))
    limits = [LimitVerdict(what, limit, *ends, _WORDS[judge(*ends, limit)]) for what, limit, ends in asked]
    return Comparison(
        before,
        after,
        tuple(each for each in categories if (each.before, each.after) != (None, None)),
        tuple(sorted(_layers(before.layers, after.layers), key=lambda each: -abs(each.change or 0))),
        tuple(limits),
        tuple(_differing(before, after, _ASKED | _OF_THE_MODEL)),
    )


def _read_increase(value: int | str) -> tuple[float, int]:
    """Return a limit on the increase: a share of the first estimate, and bytes beside it."""
    text = str(value).strip()
    if not text.endswith("%"):
        return 0.0, parse_size(value, field="max_increase")
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1000:
        raise UsageError(f"max_increase {value!r}: write a share of a such as 5%, or a size such as 200MB")
    return share, 0


def _saved_report(model: Any) -> MemoryReport | None:
    """Return a report, or the report in a file; None for a model."""
    if isinstance(model, MemoryReport):
        return model
    if not isinstance(model, (str, os.PathLike)):
        return None
    path = os.fspath(model)
    data = json_object(path)
    if data is None or "formula" not in data or "format_version" not in data:
        return None
    try:
        return MemoryReport.from_dict(data)
    except InputError as error:
        raise InputError(f"{path}: {error}; write it again: kerasmem estimate MODEL --json > {path}") from error


def _settings_of(report: MemoryReport) -> dict[str, Any]:
    """Return the arguments of `estimate` with which a report can be compared; steps that were run give no method."""
    settings = report.settings
    taken = {"batch_size": settings.batch_size, "mode": settings.mode}
    is_run = settings.method in ("measure", "profile")
    return taken if is_run else {**taken, "method": settings.method}


def _increase(before: Bytes, after: Bytes) -> tuple[int, int | None]:
    """Compare each end with the same end: one method errs the same way on two variants of a model."""
    ends = [(before.total, after.total), (before.low, after.low), (before.high, after.high)]
    changes = [b - a for a, b in ends if a is not None and b is not None]
    return min(changes), None if (before.high is None) != (after.high is None) else max(changes)


def _layers(before: Iterable[LayerMemory], after: Iterable[LayerMemory]) -> list[Difference]:
    """Pair layers of equal name and class, then, in order, those that differ only in Keras's number."""
    first, second, rows = list(before), list(after), []
    for key in (attrgetter("name", "class_name"), _stem):
        waiting: defaultdict[tuple[str, str], deque[LayerMemory]] = defaultdict(deque)
        for row in first:
            waiting[key(row)].append(row)
        left = []
        for row in second:
            if waiting[key(row)]:
                rows.append(_difference(waiting[key(row)].popleft(), row))
            else:
                left.append(row)
        first, second = list(itertools.chain.from_iterable(waiting.values())), left
    return [*rows, *(_difference(row, None) for row in first), *(_difference(None, row) for row in second)]


def _difference(before: LayerMemory | None, after: LayerMemory | None) -> Difference:
    shown = after or before
    assert shown is not None
    is_renamed = before is not None and before.name != shown.name
    return Difference(
        name=f"{before.name} → {shown.name}" if before is not None and is_renamed else shown.name,
        class_name=shown.class_name,
        before=None if before is None else before.bytes,
        after=None if after is None else after.bytes,
        is_in="second" if before is None else "first" if after is None else "both",
    )


def _stem(row: LayerMemory) -> tuple[str, str]:
    return re.sub(r"_\d+(?=/|$)", "", row.name), row.class_name


# What an estimate is asked for, and what a model may bring along.
_ASKED = {"method": "methods", "execution": "executions", "batch_size": "batch sizes", "mode": "modes"}
_OF_THE_MODEL = {"optimizer": "optimizers", "dtype_policy": "dtype policies"}


def _differing(before: MemoryReport, after: MemoryReport, names: Mapping[str, str]) -> Iterator[str]:
    for name, words in names.items():
        one, other = getattr(before.settings, name), getattr(after.settings, name)
        if one != other:
            yield f"the {words} differ: {one} and {other}"
