"""A row of the data set: a step that was trained and what it took, beside what was predicted of it."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerasmem.devices.kernels import EIGEN, ONEDNN
from kerasmem.files import package_data, replacing

KERNELS = (ONEDNN, EIGEN)  # of a CPU, the first named in no key
LICENSE: str = package_data("kerasmem.estimation", "truth")["license"]

StoredRow = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One configuration that is estimated and trained; `kernels` says on which, which XLA does without."""

    model: str
    batch_size: int
    optimizer: str
    mode: str
    dtype: str
    metrics: bool
    held_out: bool
    heavy: bool
    kernels: str = KERNELS[0]

    @property
    def key(self) -> str:
        """The row's stable name."""
        tail = ("/metrics" if self.metrics else "") + ("" if self.kernels == KERNELS[0] else f"/{self.kernels}")
        return f"{self.model}/b{self.batch_size}/{self.optimizer}/{self.mode}/{self.dtype}{tail}"


class Rows:
    """Rows of measurements by their key, one JSON line each, in a file that is written whole or not at all."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def read(self) -> dict[str, StoredRow]:
        """Return key → row; a line that was damaged is left out."""
        if not self.path.exists():
            return {}
        rows = {}
        for line in self.path.read_text("utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                rows[row["key"]] = row
        return rows

    def put(self, key: str, facts: Mapping[str, Any], part: str, value: Any) -> None:
        """Set one part of one row, on top of what the file holds by now."""
        rows = self.read()
        rows[key] = {**rows.get(key, {}), "key": key, **facts, part: value}
        with replacing(str(self.path)) as file:
            file.writelines((json.dumps(row, allow_nan=False) + "\n").encode() for row in rows.values())


def measured(row: StoredRow) -> float | None:
    """Return the row's need: the median over its processes of the median over the steps, in bytes."""
    runs = row.get("truth", {}).get("runs")
    return statistics.median(statistics.median(run["peak_bytes"]) for run in runs) if runs else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by linear interpolation between the nearest two.

    Examples:
        >>> percentile([0, 10], 95)
        9.5
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def kernels_of(row: StoredRow) -> str:
    """Return whose kernels a row was measured on, as its fields say."""
    return "XLA's own" if row["mode"] == "xla" else str(row.get("kernels", "not recorded"))


@dataclass(frozen=True)
class Errors:
    """How far a method's predictions are from what was measured, in per cent of that.

    Attributes:
        method: of the estimates.
        kernels: that the steps ran on.
        rows: with both figures.
        percentiles: of the signed errors: the 5th, 25th, 50th, 75th and 95th.
        covered: rows whose largest step lies within `high`.
        with_high: rows where the method claims one.
    """

    method: str
    kernels: str
    rows: int
    percentiles: tuple[float, ...]
    covered: int
    with_high: int


Finding = tuple[tuple[str, str], float, bool | None]


def findings(row: StoredRow) -> Iterator[Finding]:
    """Yield of each estimate of a row that has figures: (method, kernels), its error in per cent of what was measured,
    and whether the largest step lies within its `high`, None where it claims none."""
    need = measured(row)
    if not need:
        return
    most = max(peak for run in row["truth"]["runs"] for peak in run["peak_bytes"])
    for method, answer in row.get("estimates", {}).items():
        total, high = answer.get("total"), answer.get("high")
        if total is not None:
            yield (method, kernels_of(row)), 100 * (total / need - 1), None if high is None else most <= high


def distribution(found: Iterable[Finding]) -> tuple[Errors, ...]:
    """Return the errors of each method on each kind of kernels."""
    groups: dict[tuple[str, str], list[tuple[float, bool | None]]] = {}
    for names, error, is_within in found:
        groups.setdefault(names, []).append((error, is_within))
    return tuple(
        Errors(
            *names,
            len(each),
            tuple(round(percentile([error for error, _ in each], part), 1) + 0.0 for part in (5, 25, 50, 75, 95)),
            sum(is_within is True for _, is_within in each),
            sum(is_within is not None for _, is_within in each),
        )
        for names, each in sorted(groups.items())
    )
