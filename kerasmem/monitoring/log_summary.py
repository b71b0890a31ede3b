"""Summarises a log for tables and charts: peaks, means and growth of each run, and its sizes over time.

The rows pass through in tables of some thousand, so that a log of gigabytes does not have to fit in memory.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kerasmem.monitoring.curves import HIGHEST, Array, Columns, Curves, Stretch, add_to_stretches, select_rows
from kerasmem.monitoring.logfile import read_tables
from kerasmem.monitoring.sampler import PhaseMaxima
from kerasmem.monitoring.timeline import BATCH_PHASES, SIZES, PhasePeaks, Table, Timeline, known_int, largest_known
from kerasmem.records import Record

_LARGEST = ("driver_used_bytes", "driver_total_bytes", "rss_bytes")  # summarized by their maximum
_SERIES = ("in_use_bytes", "rss_bytes")  # summarized by their growth


@dataclass(frozen=True)
class RunSummary(Record, what="run"):
    """Summary of one fit, evaluate or predict. Sizes are in bytes, over all devices, and None if unknown.

    Attributes:
        run: number in the log.
        kind: "fit", "evaluate" or "predict"; "validation" if the log has nothing else.
        seconds: from the first row to the last.
        batches: logged batches that were trained (evaluated, predicted), each device's counted once.
        peak_bytes: the allocator's largest peak, including the time between batches.
        peak_phase, peak_epoch, peak_batch: when the peak was reached; batch None if between logged ones.
        mean_in_use_bytes: in use after a batch, on the device with the largest peak.
        driver_used_bytes, rss_bytes: the largest of each, including background readings.
        driver_total_bytes: the card's memory.
        in_use_growth_bytes, rss_growth_bytes: growth over the batches after the warm-up (see `growth`).
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
    """Summary of one log file.

    Attributes:
        name: name for people, such as its path.
        rows: number of readings in the log.
        runs: summary of each run.
        curves: sizes over time, thinned, one `Curves` for each stretch of continuous time.
        phases: the largest sizes of background readings in each phase, over all epochs.
        notes: failed readings and their reasons.
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
        """Return the summary as plain data, without the curves."""
        data = super(LogSummary, replace(self, curves=())).to_dict()
        del data["curves"]
        return data


def summarise(timeline: Timeline, name: str, points: int = 1000) -> LogSummary:
    """Summarise the readings of a timeline.

    Args:
        timeline: the readings.
        name: name of the log for people.
        points: maximum number of points of each curve.

    Examples:
        >>> from kerasmem.monitoring import Sample
        >>> log = Timeline([Sample(0, 0.5, "train", 0, 7, 1, "GPU:0", 100, 900, *[None] * 6)])
        >>> summarise(log, "run.csv").runs[0].peak_bytes
        900
    """
    return _summary(timeline.tables(), timeline.phases, timeline.notes, name, points)


def summarise_file(path: str | os.PathLike[str], points: int = 1000) -> LogSummary:
    """Summarise a log file of any size. Takes the arguments of `read_timeline` and raises its errors."""
    phases: list[PhasePeaks] = []
    notes: dict[str, None] = {}
    return _summary(read_tables(path, notes, phases), phases, notes, os.fspath(path), points)


def _summary(
    tables: Iterable[Table], phases: Collection[PhasePeaks], notes: Iterable[str], name: str, points: int
) -> LogSummary:
    """Summarise tables, and then the phases and notes, which may only be complete after the last table."""
    totals: dict[float, _RunTotals] = defaultdict(_RunTotals)
    stretches: list[Stretch] = []
    rows = 0
    for table in tables:
        column = {name: table[name].copy() for name in table.dtype.names or ()}
        for size in SIZES:
            column[size][column[size] < 0] = np.nan
        column["time"][~np.isfinite(column["time"])] = np.nan
        column[HIGHEST] = np.fmax(column["peak_bytes"], column["between_peak_bytes"])
        rows += len(table)
        for run in dict.fromkeys(column["run"].tolist()):
            totals[run].add(select_rows(column, column["run"] == run))
        add_to_stretches(stretches, select_rows(column, ~np.isnan(column["time"])), points)
    background: dict[float, list[PhasePeaks]] = defaultdict(list)
    maxima = PhaseMaxima()
    for peaks in phases:
        background[peaks.run].append(peaks)
        maxima.put(peaks)
    return LogSummary(
        name=name,
        rows=rows,
        runs=tuple(added.summary(int(run), background[run]) for run, added in totals.items()),
        curves=tuple(stretch.curves() for stretch in stretches),
        phases=tuple(maxima.cut(0, None)),
        notes=tuple(notes),
    )


class _Peak(NamedTuple):
    bytes: float
    is_of_batch: bool  # rather than of the time between batches
    phase: str | None = None
    epoch: float = math.nan
    batch: float = math.nan
    device: str | None = None


class _RunTotals:
    """Adds up the rows of one run."""

    def __init__(self) -> None:
        self.phases: set[str | None] = set()
        self.start, self.end = math.inf, -math.inf
        self.peak = _Peak(-1, False)
        self.largest = dict.fromkeys(_LARGEST, math.nan)
        self.batches: Counter[tuple[str | None, str | None]] = Counter()  # by device and phase
        self.series: dict[tuple[str | None, str], list[Array]] = defaultdict(list)  # by device and size, known values

    def add(self, column: Columns) -> None:
        """Add rows of the run."""
        phases = dict.fromkeys(column["phase"].tolist())
        self.phases |= phases.keys()
        self.start = np.fmin(self.start, np.fmin.reduce(column["time"]))
        self.end = np.fmax(self.end, np.fmax.reduce(column["time"]))
        if not self.batches:
            self.peak = self.peak._replace(device=column["device"][0])
        self.peak = max((self.peak, *_peaks(column)), key=lambda peak: peak[:2])
        for size in _LARGEST:
            self.largest[size] = np.fmax(self.largest[size], np.fmax.reduce(column[size]))
        for device in dict.fromkeys(column["device"].tolist()):
            is_of_device = column["device"] == device
            for phase in phases:
                steps = column["steps"][is_of_device & (column["phase"] == phase)]
                self.batches[device, phase] += int(np.where(np.isnan(steps), 1, steps).sum())
            for size in _SERIES:
                values = column[size][is_of_device & (column["phase"] != "epoch")]
                self.series[device, size].append(values[~np.isnan(values)])

    def summary(self, run: int, background: Sequence[PhasePeaks]) -> RunSummary:
        """Return the summary, with the background readings of the run."""
        kind = next((phase for phase in BATCH_PHASES if phase in self.phases), "train")
        peak, device = self.peak, self.peak.device
        is_known = peak.bytes >= 0
        in_use, rss = (np.concatenate(self.series[device, size]) for size in _SERIES)
        sizes = {
            size: largest_known([known_int(largest), *(getattr(peaks, size, None) for peaks in background)])
            for size, largest in self.largest.items()
        }
        return RunSummary(
            run=run,
            kind="fit" if kind == "train" else kind,
            seconds=round(float(self.end - self.start), 6) if self.end >= self.start else 0.0,
            batches=self.batches[device, kind],
            peak_bytes=int(peak.bytes) if is_known else None,
            peak_phase=peak.phase,
            peak_epoch=known_int(peak.epoch),
            peak_batch=known_int(peak.batch),
            mean_in_use_bytes=round(float(in_use.mean())) if len(in_use) else None,
            in_use_growth_bytes=growth(in_use),
            rss_growth_bytes=growth(rss),
            **sizes,
        )


def _peaks(column: Columns) -> Iterator[_Peak]:
    """Yield the row with the largest peak of a batch, and the row with the largest peak of all."""
    for size, is_of_batch in (("peak_bytes", True), (HIGHEST, False)):
        usable = ~np.isnan(column[size]) & (~np.isnan(column["batch"]) if is_of_batch else True)
        if usable.any():
            row = int(np.where(usable, column[size], -1).argmax())
            phase, epoch, batch, device = (column[name][row] for name in ("phase", "epoch", "batch", "device"))
            yield _Peak(column[size][row], is_of_batch, phase, epoch, batch if is_of_batch else math.nan, device)


def growth(values: Array) -> int | None:
    """Return the growth after the warm-up: the median of the last fifth minus that of the second fifth.

    The first fifth is the warm-up (first batches, tracing, growing pools). Medians ignore single peaks.

    Args:
        values: shape (n,), without NaN.

    Returns:
        Growth in the unit of the values, or None if there are fewer than ten.

    Examples:
        >>> growth(np.array([0.0] * 10 + [100.0] * 30 + [160.0] * 10))
        60
    """
    if len(values) < 10:
        return None
    fifth = len(values) // 5
    return round(float(np.median(values[-fifth:]) - np.median(values[fifth : 2 * fifth])))
