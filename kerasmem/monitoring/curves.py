"""Sizes over time, thinned for a chart, with the starts of epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Columns = Mapping[str, Array]

# sizes in a chart, in this order
DRAWN = ("peak_bytes", "in_use_bytes", "reserved_bytes", "driver_used_bytes", "rss_bytes", "swap_bytes")
OF_THE_HOST = ("rss_bytes", "swap_bytes")
HIGHEST = "highest"  # column of the larger peak: during the batch, or between batches
_BUFFER = 32  # times the points of a line that it holds while rows are added


@dataclass(frozen=True)
class Curve:
    """One size over time.

    Attributes:
        size: one of `DRAWN`.
        device: device of the size, or None for the host or if the backend names no device.
        seconds: shape (n,), ascending.
        values: shape (n,), bytes.
    """

    size: str
    device: str | None
    seconds: tuple[float, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class EpochStart:
    """Start of an epoch: Keras's number from 0, and seconds."""

    epoch: int
    seconds: float


@dataclass(frozen=True)
class Curves:
    """One stretch of continuous time of a log: first and last run, lines and starts of epochs."""

    runs: tuple[int, int]
    lines: tuple[Curve, ...]
    epochs: tuple[EpochStart, ...]


def select_rows(column: Columns, rows: Array) -> dict[str, Array]:
    """Return some rows of columns."""
    return {name: values[rows] for name, values in column.items()}


class Stretch:
    """Collects the lines and epochs of one stretch of continuous time.

    Args:
        points: maximum number of points of each curve.
    """

    def __init__(self, points: int) -> None:
        self.end = -math.inf
        self._points = points
        self._runs = (math.inf, -math.inf)
        self._epochs: dict[tuple[float, float], float] = {}  # start by run and epoch
        self._lines: dict[tuple[str, str | None], Array] = {}  # seconds and values by size and device

    def add(self, column: Columns) -> None:
        """Add rows."""
        self.end = column["time"][-1]
        first, last = self._runs
        self._runs = (min(first, column["run"].min()), max(last, column["run"].max()))
        run, epoch, seconds = (column[name][~np.isnan(column["epoch"])] for name in ("run", "epoch", "time"))
        for row in np.flatnonzero(np.r_[True, (np.diff(run) != 0) | (np.diff(epoch) != 0)][: len(run)]):
            self._epochs.setdefault((run[row], epoch[row]), seconds[row])
        batches = select_rows(column, column["phase"] != "epoch")
        devices = dict.fromkeys(batches["device"].tolist())
        for size in DRAWN:
            sizes = batches[HIGHEST if size == "peak_bytes" else size]
            known = ~np.isnan(sizes)
            for device in [None] if size in OF_THE_HOST else devices:
                rows = known if size in OF_THE_HOST else known & (batches["device"] == device)
                if rows.any():
                    self._add_points(size, device, np.stack([batches["time"][rows], sizes[rows]]))

    def _add_points(self, size: str, device: str | None, points: Array) -> None:
        line = np.concatenate([self._lines.get((size, device), points[:, :0]), points], axis=1)
        if line.shape[1] > _BUFFER * self._points:
            line = line.take(thin(line[0], line[1], _BUFFER // 8 * self._points), axis=1)
        self._lines[size, device] = line

    def curves(self) -> Curves:
        """Return the lines and epochs so far."""
        lines = []
        for (size, device), line in sorted(self._lines.items(), key=lambda item: DRAWN.index(item[0][0])):
            if size == "swap_bytes" and not line[1].any():
                continue  # a line at zero tells less than no line
            seconds, values = line.take(thin(line[0], line[1], self._points), axis=1)
            lines.append(Curve(size, device, tuple(np.round(seconds, 4).tolist()), tuple(map(int, values))))
        first, last = self._runs
        starts = tuple(EpochStart(int(epoch), round(start, 4)) for (_, epoch), start in self._epochs.items())
        return Curves((int(first), int(last)), tuple(lines), starts)


def add_to_stretches(stretches: list[Stretch], column: Columns, points: int) -> None:
    """Add rows to the last stretch. A new one begins at each step back in time.

    A process that appends to a log starts its clock from 0.

    Args:
        stretches: stretches so far.
        column: columns of the rows.
        points: maximum number of points of each curve.
    """
    end = stretches[-1].end if stretches else math.inf
    cuts = np.flatnonzero(np.diff(column["time"], prepend=end) < -1e-3)
    continued, *others = np.split(np.arange(len(column["time"])), cuts)
    if len(continued):
        stretches[-1].add(select_rows(column, continued))
    for rows in others:
        stretches.append(Stretch(points))
        stretches[-1].add(select_rows(column, rows))


def thin(seconds: Array, values: Array, limit: int) -> Array:
    """Choose points that draw like the whole curve: each interval's smallest and largest.

    Args:
        seconds: shape (n,), ascending.
        values: shape (n,), without NaN.
        limit: maximum number of points, at least 4.

    Returns:
        Indices in ascending order, including the first, last, smallest and largest value.
    """
    count = len(values)
    if count <= limit:
        return np.arange(count)
    edges = np.searchsorted(seconds, np.linspace(seconds[0], seconds[-1], max(1, (limit - 2) // 2) + 1))
    edges[-1] = count
    chosen = {0, count - 1}
    for start, end in pairwise(edges):
        if start < end:
            chosen.add(int(start + values[start:end].argmin()))
            chosen.add(int(start + values[start:end].argmax()))
    return np.array(sorted(chosen))
