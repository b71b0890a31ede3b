"""Reads the contents of `kerasmem report`, and lists runs and saved estimates in tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Column, Table

from kerasmem.errors import InputError
from kerasmem.estimation.report import MemoryReport, check_sizes
from kerasmem.monitoring.log_summary import LogSummary, RunSummary
from kerasmem.profiling.results import StepProfile
from kerasmem.rendering.formatting import figures, known_size, short_name, signed_size, table
from kerasmem.units import format_count, printable


@dataclass(frozen=True)
class SavedReport:
    """An estimate, measurement or profile, and the file it comes from."""

    source: str
    report: MemoryReport | StepProfile

    @property
    def is_measured(self) -> bool:
        """Whether a step was run, rather than estimated."""
        return self.report.settings.method in ("measure", "profile")

    @property
    def low(self) -> int | None:
        """Lower end of the interval of a step, or None if unknown."""
        return None if getattr(self.report.settings, "stands_in", False) else self.report.bytes.low


@dataclass(frozen=True)
class PageContents:
    """Results for one page.

    Attributes:
        logs: summaries of logs.
        reports: estimates and profiles.
        title: heading of the page.
    """

    logs: tuple[LogSummary, ...]
    reports: tuple[SavedReport, ...]
    title: str = "Memory report"


def read_report(data: Mapping[str, Any], source: str) -> SavedReport:
    """Read the JSON of an estimate or a profile.

    Args:
        data: object in the file.
        source: name of the file, for the page and for errors.

    Raises:
        InputError: If a field is missing or of the wrong type, or a size is impossible.
    """
    kind: type[MemoryReport | StepProfile] = StepProfile if data.get("measured") is True else MemoryReport
    try:
        report = kind.from_dict(data)
        check_sizes(report)
    except InputError as error:
        raise InputError(
            f"{source}: not a kerasmem estimate or profile: {error}; "
            "write it again: kerasmem estimate MODEL --json > estimate.json"
        ) from error
    return SavedReport(source, report)


RUN_COLUMNS = ("Run", "Peak", "Peak in", "Mean in use", "Growth", "Host", "Growth", "Card", "Batches", "Time")
_ON_A_TERMINAL = 7  # columns
_MOST_ROWS = 200


def run_rows(logs: Iterable[LogSummary]) -> tuple[list[tuple[str, ...]], int]:
    """Return the cells of the first runs in the order of `RUN_COLUMNS`, and the number of runs left out."""
    runs = [(log, run) for log in logs for run in log.runs]
    return [_run_row(log, run) for log, run in runs[:_MOST_ROWS]], max(0, len(runs) - _MOST_ROWS)


def _run_row(log: LogSummary, run: RunSummary) -> tuple[str, ...]:
    return (
        run_name(log, run),
        known_size(run.peak_bytes),
        _peak_position(run),
        known_size(run.mean_in_use_bytes),
        signed_size(run.in_use_growth_bytes),
        known_size(run.rss_bytes),
        signed_size(run.rss_growth_bytes),
        known_size(run.driver_used_bytes),
        format_count(run.batches),
        f"{run.seconds:,.1f} s",
    )


def runs_table(logs: Sequence[LogSummary], terminal: int | None = None) -> Table:
    """Return a row for each run: peak, its position, means and growth."""
    columns = [Column(name) if name in ("Run", "Peak in") else figures(name) for name in RUN_COLUMNS]
    runs = table(terminal, *columns[:_ON_A_TERMINAL], title="Runs")
    rows, left_out = run_rows(logs)
    for name, peak, position, *sizes in rows:
        runs.add(short_name(name), peak, printable(position, 40), *sizes[: _ON_A_TERMINAL - 3])
    if left_out:
        runs.add(f"and {left_out} more")
    return runs


def reports_table(reports: Sequence[SavedReport], terminal: int | None = None) -> Table:
    """Return a row for each estimate or profile: its peak and interval."""
    rows = table(terminal, "File", *map(figures, ("Peak", "from", "to")), "by", title="Estimates and profiles")
    for saved in reports:
        need, method = saved.report.bytes, printable(saved.report.settings.method, 20)
        rows.add(short_name(saved.source), need.total, saved.low, need.high, method)
    return rows


def run_name(log: LogSummary, run: RunSummary) -> str:
    """Return the name of a run: its log, and its number if the log has several."""
    return f"{log.name}, run {run.run + 1} ({run.kind})" if len(log.runs) > 1 else log.name


def _peak_position(run: RunSummary) -> str:
    """Return epoch and batch of a run's peak. Epochs count from 1, batches from 0 as in Keras."""
    if run.peak_bytes is None:
        return ""
    epoch = "" if run.peak_epoch is None else f"epoch {run.peak_epoch + 1}, "
    if run.peak_batch is None:
        return f"{epoch}between logged batches"
    phase = "" if run.peak_phase in (None, "train") else f"{run.peak_phase} "
    return f"{epoch}{phase}batch {run.peak_batch}"
