"""Sizes over time, thinned to what a chart can show, with the epochs and phases beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kerasmem.monitoring.columns import Table, thin

# what a chart draws, in this order; `peak` counts the time between batches
DRAWN = ("peak_bytes", "in_use_bytes", "reserved_bytes", "driver_used_bytes", "rss_bytes", "swap_bytes")
_OF_THE_HOST = ("rss_bytes", "swap_bytes")
_MOST_LINES = 24  # in one chart
_MOST_STARTS = 1000


@dataclass(frozen=True)
class Curve:
    """One size over time.

    Attributes:
        size: which: one of `DRAWN`.
        device: whose; None for the host, and where the backend names no device.
        seconds: shape (n,), ascending.
        values: shape (n,), bytes.
        readings: how many there were before thinning.
    """

    size: str
    device: str | None
    seconds: tuple[float, ...]
    values: tuple[int, ...]
    readings: int


@dataclass(frozen=True)
class EpochStart:
    """When an epoch began: its run, Keras's number from 0, seconds."""

    run: int
    epoch: int
    seconds: float


@dataclass(frozen=True)
class PhaseSpan:
    """A stretch of batches of another phase than training, from and to in seconds."""

    phase: str
    start: float
    end: float


@dataclass(frozen=True)
class Curves:
    """One stretch of continuous time of a log: lines, beginnings of epochs, phases."""

    runs: tuple[int, int]
    lines: tuple[Curve, ...]
    epochs: tuple[EpochStart, ...]
    phases: tuple[PhaseSpan, ...]


def curves(table: Table, points: int, most: int) -> tuple[tuple[Curves, ...], int]:
    """Return the curves of each stretch of continuous time, and how many stretches beyond `most` were left out.

    A process that appends to a log starts its clock from 0, so a step back in time begins another stretch.
    """
    times = table.numbers["time"]
    usable = np.flatnonzero(~np.isnan(times))
    if not len(usable):
        return (), 0
    cuts = np.flatnonzero(np.diff(times[usable]) < -1e-3) + 1
    stretches = np.split(usable, cuts)
    return tuple(_stretch(table, rows, points) for rows in stretches[:most]), max(0, len(stretches) - most)


def _stretch(table: Table, rows: np.ndarray[Any, Any], points: int) -> Curves:
    runs = table.numbers["run"][rows]
    is_epoch = table.is_phase("epoch", rows)
    drawn = rows if is_epoch.all() else rows[~is_epoch]
    lines: list[Curve] = []
    devices = np.unique(table.texts["device"][drawn])
    for size in DRAWN:
        of_host = size in _OF_THE_HOST
        for code in devices[:1] if of_host else devices:
            own = drawn[table.texts["device"][drawn] == code]
            values = table.numbers[size][own]
            if size == "peak_bytes":
                values = np.fmax(values, table.numbers["between_peak_bytes"][own])
            known = ~np.isnan(values)
            if not known.any() or (size == "swap_bytes" and not values[known].any()):
                continue  # a line at zero says less than its absence
            seconds, values = table.numbers["time"][own][known], values[known]
            kept = thin(values, points)
            lines.append(
                Curve(
                    size=size,
                    device=None if of_host else table.names["device"][int(code)],
                    seconds=tuple(np.round(seconds[kept], 4).tolist()),
                    values=tuple(int(value) for value in values[kept]),
                    readings=int(known.sum()),
                )
            )
    return Curves(
        (int(runs.min()), int(runs.max())), tuple(lines[:_MOST_LINES]), _epoch_starts(table, rows), _spans(table, rows)
    )


def _epoch_starts(table: Table, rows: np.ndarray[Any, Any]) -> tuple[EpochStart, ...]:
    inside = rows[~np.isnan(table.numbers["epoch"][rows])]
    if not len(inside):
        return ()
    run, epoch = table.numbers["run"][inside], table.numbers["epoch"][inside]
    begins = np.flatnonzero(np.r_[True, (np.diff(run) != 0) | (np.diff(epoch) != 0)])
    every = -(-len(begins) // _MOST_STARTS)
    return tuple(
        EpochStart(int(run[place]), int(epoch[place]), round(float(table.numbers["time"][inside[place]]), 4))
        for place in begins[::every]
    )


def _spans(table: Table, rows: np.ndarray[Any, Any]) -> tuple[PhaseSpan, ...]:
    codes = table.texts["phase"][rows]
    starts = np.flatnonzero(np.r_[True, np.diff(codes) != 0])
    ends = np.r_[starts[1:], len(rows)] - 1
    found = []
    for start, end in zip(starts, ends, strict=True):
        phase = table.names["phase"][int(codes[start])]
        if phase in ("train", "epoch", None):
            continue
        before = rows[max(start - 1, 0)]  # a row's time is its batch's end: the first began where the one before ended
        found.append(
            PhaseSpan(str(phase), *(round(float(table.numbers["time"][row]), 4) for row in (before, rows[end])))
        )
        if len(found) == _MOST_STARTS:
            break
    return tuple(found)
