"""Sizes over time, thinned for a chart, with the beginnings of epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# what a chart draws, in this order
DRAWN = ("peak_bytes", "in_use_bytes", "reserved_bytes", "driver_used_bytes", "rss_bytes", "swap_bytes")
OF_THE_HOST = ("rss_bytes", "swap_bytes")
HIGHEST = "highest"  # the column of peaks that counts the time between batches


@dataclass(frozen=True)
class Curve:
    """One size over time.

    Attributes:
        size: which: one of `DRAWN`.
        device: whose; None for the host, and where the backend names no device.
        seconds: shape (n,), ascending.
        values: shape (n,), bytes.
    """

    size: str
    device: str | None
    seconds: tuple[float, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class EpochStart:
    """When an epoch began: its run, Keras's number from 0, seconds."""

    run: int
    epoch: int
    seconds: float


@dataclass(frozen=True)
class Curves:
    """One stretch of continuous time of a log: lines and beginnings of epochs."""

    runs: tuple[int, int]
    lines: tuple[Curve, ...]
    epochs: tuple[EpochStart, ...]


def curves(column: Mapping[str, Array], points: int) -> tuple[Curves, ...]:
    """Return the curves of each stretch of continuous time.

    A process that appends to a log starts its clock from 0, so a step back in time begins another stretch.

    Args:
        column: the columns of a timeline, and `HIGHEST`; not known are NaN.
        points: of each curve, at most.
    """
    usable = np.flatnonzero(~np.isnan(column["time"]))
    if not len(usable):
        return ()
    cuts = np.flatnonzero(np.diff(column["time"][usable]) < -1e-3) + 1
    stretches = [{name: values[rows] for name, values in column.items()} for rows in np.split(usable, cuts)]
    return tuple(_stretch(stretch, points) for stretch in stretches)


def _stretch(column: Mapping[str, Array], points: int) -> Curves:
    is_epoch = column["phase"] == "epoch"
    is_drawn = is_epoch if is_epoch.all() else ~is_epoch
    devices = list(dict.fromkeys(column["device"][is_drawn].tolist()))
    lines: list[Curve] = []
    for size in DRAWN:
        sizes = column[HIGHEST if size == "peak_bytes" else size]
        of_host = size in OF_THE_HOST
        for device in devices[:1] if of_host else devices:
            known = is_drawn & (column["device"] == device) & ~np.isnan(sizes)
            values = sizes[known]
            if not len(values) or (size == "swap_bytes" and not values.any()):
                continue  # a line at zero says less than its absence
            kept = thin(values, points)
            seconds = tuple(np.round(column["time"][known][kept], 4).tolist())
            lines.append(Curve(size, None if of_host else device, seconds, tuple(map(int, values[kept]))))
    runs = (int(column["run"].min()), int(column["run"].max()))
    return Curves(runs, tuple(lines), _epoch_starts(column))


def _epoch_starts(column: Mapping[str, Array]) -> tuple[EpochStart, ...]:
    inside = ~np.isnan(column["epoch"])
    run, epoch, seconds = (column[name][inside] for name in ("run", "epoch", "time"))
    begins = np.r_[True, (np.diff(run) != 0) | (np.diff(epoch) != 0)][: len(run)]
    starts = zip(run[begins].tolist(), epoch[begins].tolist(), seconds[begins].tolist(), strict=True)
    return tuple(EpochStart(int(run), int(epoch), round(second, 4)) for run, epoch, second in starts)


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
