"""A timeline's rows as numpy columns, for sums over a million of them."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import numpy as np

from kerasmem.monitoring.timeline import COLUMNS, SIZES, Timeline

_CHUNK = 50_000
_TEXTS = ("phase", "device")


class Table:
    """Columns of a timeline.

    Attributes:
        numbers: for run, time, epoch, batch, steps and each size a float64 array of one value a row; NaN where
            it is not known (a size below zero or a time that is no number counts as not known).
        texts: for phase and device an array of places in `names`.
        names: the values of phase and device.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.names: dict[str, list[str | None]] = {name: [] for name in _TEXTS}
        numbers: dict[str, list[Any]] = {name: [] for name in COLUMNS if name not in _TEXTS}
        texts: dict[str, list[Any]] = {name: [] for name in _TEXTS}
        codes: dict[str, dict[str | None, int]] = {name: {} for name in _TEXTS}
        rows = iter(timeline)
        while chunk := list(islice(rows, _CHUNK)):
            for name, values in zip(COLUMNS, zip(*chunk, strict=True), strict=True):
                if name in _TEXTS:
                    known = codes[name]
                    texts[name].append(np.array([known.setdefault(value, len(known)) for value in values]))
                else:
                    numbers[name].append(np.array(values, dtype=float))
        self.numbers = {name: np.concatenate(parts) if parts else np.empty(0) for name, parts in numbers.items()}
        self.texts = {name: np.concatenate(parts) if parts else np.empty(0, dtype=int) for name, parts in texts.items()}
        for name in _TEXTS:
            self.names[name] = list(codes[name])
        for name in SIZES:
            self.numbers[name][self.numbers[name] < 0] = np.nan
        self.numbers["time"][~np.isfinite(self.numbers["time"])] = np.nan

    def __len__(self) -> int:
        return len(self.numbers["run"])

    def is_phase(self, phase: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return for each of the rows whether it is of this phase."""
        names = self.names["phase"]
        return self.texts["phase"][rows] == (names.index(phase) if phase in names else -1)

    def device(self, row: int) -> str | None:
        """Return a row's device."""
        return self.names["device"][int(self.texts["device"][row])]


def largest(values: np.ndarray[Any, Any]) -> int | None:
    """Return the largest of the known values, or None where none is known."""
    known = values[~np.isnan(values)]
    return int(known.max()) if len(known) else None


def mean(values: np.ndarray[Any, Any]) -> int | None:
    """Return the mean of the known values in whole bytes, or None where none is known."""
    known = values[~np.isnan(values)]
    return round(float(known.mean())) if len(known) else None


def growth(values: np.ndarray[Any, Any]) -> int | None:
    """Return by how much values grew once warmed up: the last fifth's median less the second fifth's.

    The first fifth (first batches, tracing, growing pools) does not count, and medians pass over single peaks.
    None where fewer than ten values are known.

    Example:
        >>> growth(np.array([0.0] * 10 + [100.0] * 30 + [160.0] * 10))
        60
    """
    known = values[~np.isnan(values)]
    if len(known) < 10:
        return None
    fifth = len(known) // 5
    return round(float(np.median(known[-fifth:]) - np.median(known[fifth : 2 * fifth])))


def thin(values: np.ndarray[Any, Any], limit: int) -> np.ndarray[Any, Any]:
    """Return the places of at most `limit` values that draw like all of them: each stretch's least and largest.

    Args:
        values: shape (n,), none of them NaN.
        limit: at least 4.

    Returns:
        Places in ascending order; the first, the last, the least and the largest value are among them.
    """
    count = len(values)
    if count <= limit:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, (limit - 2) // 2) + 1).astype(int)
    picked = {0, count - 1}
    for start, end in pairwise(edges):
        stretch = values[start:end]
        picked.add(int(start + stretch.argmin()))
        picked.add(int(start + stretch.argmax()))
    return np.array(sorted(picked))
