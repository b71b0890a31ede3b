"""Sizes over time, thinned for a chart, with the starts of epochs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
    """Start of an epoch: its run, Keras's number from 0, seconds."""

    run: int
    epoch: int
    seconds: float


@dataclass(frozen=True)
class Curves:
    """One stretch of continuous time of a log: first and last run, lines and starts of epochs."""

    runs: tuple[int, int]
    lines: tuple[Curve, ...]
    epochs: tuple[EpochStart, ...]


def selected(column: Columns, rows: Array) -> dict[str, Array]:
    """Return some rows of columns."""
    return {name: values[rows] for name, values in column.items()}


def continuous(column: Columns) -> Iterator[dict[str, Array]]:
    """Split rows at steps back in time: a process that appends to a log starts its clock from 0."""
    cuts = np.flatnonzero(np.diff(column["time"]) < -1e-3) + 1
    for rows in np.split(np.arange(len(column["time"])), cuts):
        if len(rows):
            yield selected(column, rows)


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
        self._lines: dict[tuple[bool, str, str | None], Array] = {}  # seconds and values by is_epoch, size and device
        self._has_batches = False

    def add(self, column: Columns) -> None:
        """Add rows."""
        self.end = column["time"][-1]
        first, last = self._runs
        self._runs = (min(first, column["run"].min()), max(last, column["run"].max()))
        run, epoch, seconds = (column[name][~np.isnan(column["epoch"])] for name in ("run", "epoch", "time"))
        for row in np.flatnonzero(np.r_[True, (np.diff(run) != 0) | (np.diff(epoch) != 0)][: len(run)]):
            self._epochs.setdefault((run[row], epoch[row]), seconds[row])
        is_epoch = column["phase"] == "epoch"
        self._has_batches |= not is_epoch.all()
        for size in DRAWN:
            sizes = column[HIGHEST if size == "peak_bytes" else size]
            for device in dict.fromkeys(column["device"].tolist()):
                known = (column["device"] == device) & ~np.isnan(sizes)
                for of_epoch, rows in ((True, known & is_epoch), (False, known & ~is_epoch)):
                    self._add_points((of_epoch, size, device), np.stack([column["time"][rows], sizes[rows]]))

    def _add_points(self, key: tuple[bool, str, str | None], points: Array) -> None:
        if not points.size:
            return
        line = np.concatenate([self._lines[key], points], axis=1) if key in self._lines else points
        if line.shape[1] > _BUFFER * self._points:
            line = line[:, thin(*line, _BUFFER // 8 * self._points)]
        self._lines[key] = line

    def curves(self) -> Curves:
        """Return the lines, of the epochs' rows if there are no others."""
        lines = []
        host: dict[str, str | None] = {}  # the device whose rows give a size of the host
        for (of_epoch, size, device), line in sorted(self._lines.items(), key=lambda item: DRAWN.index(item[0][1])):
            is_zero = size == "swap_bytes" and not line[1].any()
            of_host = size in OF_THE_HOST
            if of_epoch is self._has_batches or is_zero or (of_host and host.setdefault(size, device) != device):
                continue
            seconds, values = line[:, thin(*line, self._points)]
            points = (tuple(np.round(seconds, 4).tolist()), tuple(map(int, values)))
            lines.append(Curve(size, None if of_host else device, *points))
        starts = ((int(run), int(epoch), round(start, 4)) for (run, epoch), start in self._epochs.items())
        first, last = self._runs
        return Curves((int(first), int(last)), tuple(lines), tuple(EpochStart(*start) for start in starts))


def thin(seconds: Array, values: Array, limit: int) -> Array:
    """Choose points that draw like all of them: the smallest and the largest of each stretch of time.

    Args:
        seconds: shape (n,), ascending.
        values: shape (n,), none of them NaN.
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
