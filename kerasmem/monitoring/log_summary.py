"""Summarises a log for tables and charts: peaks, means and growth of each run, and its sizes over time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from kerasmem.monitoring.timeline import BATCH_PHASES, SIZES, PhasePeaks, Timeline, largest_known
from kerasmem.records import Record


@dataclass(frozen=True)
class RunSummary(Record, what="run"):
    """One fit, evaluate or predict in brief; sizes in bytes, over all devices, None where not known.

    Attributes:
        run: its number in the log.
        kind: "fit", "evaluate", "predict" or what the log calls its rows.
        seconds: from the first row to the last.
        batches: logged batches that were trained (evaluated, predicted), each device's counted once.
        peak_bytes: the allocator's largest, the time between batches included.
        peak_phase, peak_epoch, peak_batch: where that was; batch None where it was between logged ones.
        mean_in_use_bytes: in use after a batch, on the device with the largest peak.
        driver_used_bytes, rss_bytes: the largest of each, background readings included.
        driver_total_bytes: the card's memory.
        in_use_growth_bytes, rss_growth_bytes: growth over the batches, warm-up left out (see `growth`).
    """

    run: int
    kind: str
    seconds: float
    batches: int
    peak_bytes: int | None
    peak_phase: str | None
    peak_epoch: int | None
    peak_batch: int | None
    mean_in_use_bytes: int | None
    driver_used_bytes: int | None
    driver_total_bytes: int | None
    rss_bytes: int | None
    in_use_growth_bytes: int | None
    rss_growth_bytes: int | None


@dataclass(frozen=True)
class LogSummary(Record, what="log"):
    """One log file in brief.

    Attributes:
        name: how people know it (its path as given).
        rows: readings in the log.
        runs: each run in brief.
        curves: sizes over time, thinned, one `Curves` for each stretch of continuous time.
        phases: the largest sizes that background readings found in each phase, over all epochs.
        notes: what could not be read, and why.
    """

    name: str
    rows: int
    runs: tuple[RunSummary, ...]
    curves: tuple[Curves, ...]
    phases: tuple[PhasePeaks, ...]
    notes: tuple[str, ...]

    @property
    def peak_bytes(self) -> int | None:
        """The largest peak of all runs."""
        return largest_known(run.peak_bytes for run in self.runs)

    @property
    def rss_bytes(self) -> int | None:
        """The largest host memory of all runs."""
        return largest_known(run.rss_bytes for run in self.runs)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain data, the curves left out."""
        data = super(LogSummary, replace(self, curves=())).to_dict()
        del data["curves"]
        return data


def summarise(timeline: Timeline, name: str, points: int = 1000) -> LogSummary:
    """Return a log in brief.

    Args:
        timeline: as `read_timeline` gave it; a million rows take some seconds.
        name: how people know it.
        points: for each curve, at most.

    Examples:
        >>> from kerasmem.monitoring import Sample
        >>> log = Timeline([Sample(0, 0.5, "train", 0, 7, 1, "GPU:0", 100, 900, *[None] * 6)])
        >>> summarise(log, "run.csv").runs[0].peak_bytes
        900
    """
    column = timeline.columns()
    for size in SIZES:
        column[size][column[size] < 0] = np.nan
    column["time"][~np.isfinite(column["time"])] = np.nan
    column[HIGHEST] = np.fmax(column["peak_bytes"], column["between_peak_bytes"])
    background: dict[float, list[PhasePeaks]] = {}
    for peaks in timeline.phases:
        background.setdefault(peaks.run, []).append(peaks)
    return LogSummary(
        name=name,
        rows=len(timeline),
        runs=tuple(_run(rows, background.get(rows["run"][0], ())) for rows in _runs(column)),
        curves=curves(column, points),
        phases=over_epochs(timeline.phases),
        notes=timeline.notes,
    )


def _runs(column: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Return the rows of each run, in the order in which they begin."""
    numbers, first = np.unique(column["run"], return_index=True)
    parts = [np.flatnonzero(column["run"] == number) for number in numbers[np.argsort(first)]]
    return [{name: values[rows] for name, values in column.items()} for rows in parts]


def _run(column: Mapping[str, Array], background: Sequence[PhasePeaks]) -> RunSummary:
    top = _top(column)
    device = column["device"][top or 0]
    own = (column["device"] == device) & (column["phase"] != "epoch")  # batches, as the fullest device saw them
    kind = _kind(set(column["phase"]))
    counted = own & (column["phase"] == ("train" if kind == "fit" else kind))

    sizes = {
        size: largest_known([largest(column[size]), *(getattr(each, size, None) for each in background)])
        for size in ("driver_used_bytes", "driver_total_bytes", "rss_bytes")
    }
    return RunSummary(
        run=int(column["run"][0]),
        kind=kind,
        seconds=_seconds(column["time"]),
        batches=_count(column["steps"][counted]),
        peak_bytes=largest(column[HIGHEST]),
        peak_phase=None if top is None else column["phase"][top],
        peak_epoch=_whole(column["epoch"], top),
        peak_batch=_whole(column["batch"], top),
        mean_in_use_bytes=mean(column["in_use_bytes"][own]),
        in_use_growth_bytes=growth(column["in_use_bytes"][own]),
        rss_growth_bytes=growth(column["rss_bytes"][own]),
        **sizes,
    )


def over_epochs(peaks: Iterable[PhasePeaks]) -> tuple[PhasePeaks, ...]:
    """Return the largest sizes of each phase, whatever the epoch."""
    found: dict[str | None, PhasePeaks] = {}
    for each in peaks:
        held = found.get(each.phase)
        found[each.phase] = replace(each, epoch=None) if held is None else held.joined(each)
    return tuple(found.values())


def _top(column: Mapping[str, Array]) -> int | None:
    """Return the row with the largest peak, a batch's own before the time between batches."""
    peaks = column[HIGHEST]
    if np.isnan(peaks).all():
        return None
    most = np.nanmax(peaks)
    batches = np.flatnonzero((column["peak_bytes"] == most) & ~np.isnan(column["batch"]))
    return int(batches[0]) if len(batches) else int(np.flatnonzero(peaks == most)[0])


def _whole(values: Array, place: int | None) -> int | None:
    return None if place is None or np.isnan(values[place]) else int(values[place])


def _kind(phases: Collection[str | None]) -> str:
    if "train" in phases:
        return "fit"
    return next((phase for phase in BATCH_PHASES if phase in phases), "fit")


def _count(steps: Array) -> int:
    return int(np.where(np.isnan(steps), 1, steps).sum())


def _seconds(times: Array) -> float:
    known = times[~np.isnan(times)]
    return round(float(np.ptp(known)), 6) if len(known) else 0.0


def largest(values: Array) -> int | None:
    """Return the largest known value, or None if all are unknown."""
    known = values[~np.isnan(values)]
    return int(known.max()) if len(known) else None


def mean(values: Array) -> int | None:
    """Return the mean of the known values in whole bytes, or None if all are unknown."""
    known = values[~np.isnan(values)]
    return round(float(known.mean())) if len(known) else None


def growth(values: Array) -> int | None:
    """Return by how much values grew once warmed up: the last fifth's median less the second fifth's.

    The first fifth (first batches, tracing, growing pools) does not count, and medians pass over single peaks.
    None where fewer than ten values are known.

    Examples:
        >>> growth(np.array([0.0] * 10 + [100.0] * 30 + [160.0] * 10))
        60
    """
    known = values[~np.isnan(values)]
    if len(known) < 10:
        return None
    fifth = len(known) // 5
    return round(float(np.median(known[-fifth:]) - np.median(known[fifth : 2 * fifth])))


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
