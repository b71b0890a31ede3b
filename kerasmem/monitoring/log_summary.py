"""A log in brief, for tables and charts: each run's peaks, means and growth, and its curves thinned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kerasmem.monitoring.columns import Table, growth, largest, mean
from kerasmem.monitoring.curves import Curves, curves
from kerasmem.monitoring.phases import PhasePeaks, largest_known, over_epochs
from kerasmem.monitoring.timeline import BATCH_PHASES, Timeline
from kerasmem.records import Record

FORMAT_VERSION = 1
MOST_STRETCHES = 16


@dataclass(frozen=True)
class RunSummary(Record, what="run"):
    """One fit, evaluate or predict in brief; sizes in bytes, over all devices, None where not known.

    Attributes:
        run: its number in the log.
        kind: "fit", "evaluate", "predict" or what the log calls its rows.
        seconds: from the first row to the last.
        epochs: how many have rows; 0 outside `fit`.
        batches: logged batches that were trained (evaluated, predicted), each device's counted once.
        devices: the devices' names.
        peak_bytes: the allocator's largest, the time between batches included.
        peak_device, peak_phase, peak_epoch, peak_batch: where that was; batch None where it was between logged ones.
        mean_in_use_bytes: in use after a batch, on the device with the largest peak.
        reserved_bytes, driver_used_bytes, rss_bytes, swap_bytes: the largest of each, background readings included.
        driver_total_bytes: the card's memory.
        mean_rss_bytes: of the host process, over batches.
        in_use_growth_bytes, rss_growth_bytes: growth over the batches, warm-up left out (see `table.growth`).
    """

    run: int
    kind: str
    seconds: float
    epochs: int
    batches: int
    devices: tuple[str, ...]
    peak_bytes: int | None
    peak_device: str | None
    peak_phase: str | None
    peak_epoch: int | None
    peak_batch: int | None
    mean_in_use_bytes: int | None
    reserved_bytes: int | None
    driver_used_bytes: int | None
    driver_total_bytes: int | None
    rss_bytes: int | None
    mean_rss_bytes: int | None
    swap_bytes: int | None
    in_use_growth_bytes: int | None
    rss_growth_bytes: int | None


@dataclass(frozen=True)
class EpochSummary:
    """One epoch's largest sizes in bytes, over all devices; `batches` are those logged."""

    run: int
    epoch: int
    batches: int
    seconds: float
    peak_bytes: int | None
    in_use_bytes: int | None
    driver_used_bytes: int | None
    rss_bytes: int | None


@dataclass(frozen=True)
class LogSummary(Record, what="log"):
    """One log file in brief.

    Attributes:
        name: how people know it (its path as given).
        rank: of the process that wrote it, where it is one of several.
        rows: readings in the log.
        runs: each run in brief.
        epochs: each epoch's largest sizes.
        curves: sizes over time, thinned, one `Curves` for each stretch of continuous time; the first 16.
        phases: the largest sizes that background readings found in each phase, over all epochs.
        notes: what could not be read, and why.
    """

    name: str
    rank: int | None
    rows: int
    runs: tuple[RunSummary, ...]
    epochs: tuple[EpochSummary, ...]
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


def summarise(timeline: Timeline, name: str, rank: int | None = None, points: int = 2000) -> LogSummary:
    """Return a log in brief.

    Args:
        timeline: as `read_timeline` gave it; a million rows take some seconds.
        name: how people know it.
        rank: of the process that wrote it.
        points: for each curve, at most.

    Example:
        >>> log = Timeline.from_dict({"format_version": 1, "columns": ["run", "time", "phase", "peak_bytes"],
        ...                           "rows": [[0, 0.5, "train", 900], [0, 0.75, "train", 700]]})
        >>> summarise(log, "run.csv").runs[0].peak_bytes
        900
    """
    table = Table(timeline)
    curve_list, left_out = curves(table, points, MOST_STRETCHES)
    notes = list(timeline.notes)
    background: dict[int, PhasePeaks] = {}
    for peaks in timeline.phases:
        background[peaks.run] = background[peaks.run].joined(peaks) if peaks.run in background else peaks
    if left_out:
        notes.append(
            f"charts: {left_out} more stretches of time (the logger was started again) are in the tables alone"
        )
    return LogSummary(
        name=name,
        rank=rank,
        rows=len(table),
        runs=tuple(_run(table, rows, background) for rows in groups(table.numbers["run"])),
        epochs=tuple(_epochs(table)),
        curves=curve_list,
        phases=over_epochs(timeline.phases),
        notes=tuple(notes),
    )


def groups(*keys: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return for each value of the keys the places that have it, in the order in which values first occur."""
    if not len(keys[0]):
        return []
    order = np.lexsort(keys[::-1])
    differs = np.any([np.diff(key[order]) != 0 for key in keys], axis=0)
    found = np.split(order, np.flatnonzero(differs) + 1)
    return sorted((np.sort(rows) for rows in found), key=lambda rows: int(rows[0]))


def _run(table: Table, rows: np.ndarray[Any, Any], background: Mapping[int, PhasePeaks]) -> RunSummary:
    column = {name: values[rows] for name, values in table.numbers.items()}
    is_epoch = table.is_phase("epoch", rows)
    phases = [table.names["phase"][code] or "" for code in np.unique(table.texts["phase"][rows])]
    top = _top(column)
    place = None if top is None else rows[top]
    device = table.texts["device"][rows[0] if place is None else place]
    own = (table.texts["device"][rows] == device) & ~is_epoch  # batches, as the fullest device saw them
    in_epochs = column["epoch"][~np.isnan(column["epoch"])]
    kind = _kind(phases)
    counted = own & table.is_phase("train" if kind == "fit" else kind, rows)
    times = column["time"][~np.isnan(column["time"])]
    batch = None if top is None else column["batch"][top]
    epoch = None if top is None else column["epoch"][top]
    between = background.get(int(column["run"][0]))
    host = (None, None, None) if between is None else (between.driver_used_bytes, between.rss_bytes, between.swap_bytes)
    return RunSummary(
        run=int(column["run"][0]),
        kind=kind,
        seconds=round(float(np.ptp(times)), 6) if len(times) else 0.0,
        epochs=len(np.unique(in_epochs)),
        batches=_count(column["steps"][counted]),
        devices=tuple(name for code in _in_order(table.texts["device"][rows]) if (name := table.names["device"][code])),
        peak_bytes=largest_known([largest(column["peak_bytes"]), largest(column["between_peak_bytes"])]),
        peak_device=None if place is None else table.device(place),
        peak_phase=None if place is None else table.names["phase"][int(table.texts["phase"][place])],
        peak_epoch=None if epoch is None or np.isnan(epoch) else int(epoch),
        peak_batch=None if batch is None or np.isnan(batch) else int(batch),
        mean_in_use_bytes=mean(column["in_use_bytes"][own]),
        reserved_bytes=largest(column["reserved_bytes"]),
        driver_used_bytes=largest_known([largest(column["driver_used_bytes"]), host[0]]),
        driver_total_bytes=largest(column["driver_total_bytes"]),
        rss_bytes=largest_known([largest(column["rss_bytes"]), host[1]]),
        mean_rss_bytes=mean(column["rss_bytes"][own]),
        swap_bytes=largest_known([largest(column["swap_bytes"]), host[2]]),
        in_use_growth_bytes=growth(column["in_use_bytes"][own]),
        rss_growth_bytes=growth(column["rss_bytes"][own]),
    )


def _top(column: dict[str, np.ndarray[Any, Any]]) -> int | None:
    """Return the row with the largest peak, a batch's own before the time between batches."""
    peaks = np.fmax(column["peak_bytes"], column["between_peak_bytes"])
    if np.isnan(peaks).all():
        return None
    most = np.nanmax(peaks)
    batches = np.flatnonzero((column["peak_bytes"] == most) & ~np.isnan(column["batch"]))
    return int(batches[0]) if len(batches) else int(np.flatnonzero(peaks == most)[0])


def _kind(phases: Sequence[str]) -> str:
    if "train" in phases:
        return "fit"
    return next((phase for phase in BATCH_PHASES if phase in phases), "fit")


def _count(steps: np.ndarray[Any, Any]) -> int:
    return int(np.where(np.isnan(steps), 1, steps).sum())


def _in_order(codes: np.ndarray[Any, Any]) -> list[int]:
    return [int(code) for code in dict.fromkeys(codes.tolist())]


def _epochs(table: Table) -> list[EpochSummary]:
    inside = np.flatnonzero(~np.isnan(table.numbers["epoch"]))
    found = []
    for rows in groups(table.numbers["run"][inside], table.numbers["epoch"][inside]):
        rows = inside[rows]
        column = {name: values[rows] for name, values in table.numbers.items()}
        first = table.texts["device"][rows] == table.texts["device"][rows[0]]
        times = column["time"][~np.isnan(column["time"])]
        found.append(
            EpochSummary(
                run=int(column["run"][0]),
                epoch=int(column["epoch"][0]),
                batches=_count(column["steps"][first & table.is_phase("train", rows)]),
                seconds=round(float(np.ptp(times)), 6) if len(times) else 0.0,
                peak_bytes=largest_known([largest(column["peak_bytes"]), largest(column["between_peak_bytes"])]),
                in_use_bytes=largest(column["in_use_bytes"]),
                driver_used_bytes=largest(column["driver_used_bytes"]),
                rss_bytes=largest(column["rss_bytes"]),
            )
        )
    return found
