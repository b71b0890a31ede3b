"""Runs beside one another, as a table for a terminal; and the words in which a run is spoken of."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table
from rich.text import Text

from kerasmem.monitoring.log_summary import LogSummary, RunSummary
from kerasmem.monitoring.rank_logs import TrainingLogs
from kerasmem.rendering.contents import Composition
from kerasmem.rendering.escape import printable, short_name
from kerasmem.rendering.layout import growth, known_size, table

_MOST_ROWS = 100


def runs_table(trainings: Sequence[TrainingLogs], terminal: int | None = None) -> Table:
    """Return a row for each run: peak, where it was, means and growth; below each training of several ranks
    the largest of them.
    """
    sizes = _right("Mean in use", "growth", "Host", "growth")
    rows = table(terminal, "Run", *_right("Peak"), "where", *sizes, title="Runs")
    kept, left_out = kept_rows(trainings, _MOST_ROWS)
    for log, run in kept:
        rows.add_row(
            Text(short_name(run_name(log, run))),
            known_size(run.peak_bytes),
            Text(printable(peak_place(run), 40)),
            known_size(run.mean_in_use_bytes),
            growth(run.in_use_growth_bytes),
            known_size(run.rss_bytes),
            growth(run.rss_growth_bytes),
        )
    for training in trainings:
        if len(training.logs) > 1:
            peak, host = training.largest("peak_bytes"), training.largest("rss_bytes")
            name = Text(f"{short_name(training.name, 50)}: all {len(training.logs)} ranks")
            sizes_of_all = [known_size(None if each is None else each.bytes) for each in (peak, host)]
            place = "" if peak is None else f"rank {peak.rank}"
            style = None if terminal is None else "bold"
            rows.add_row(name, sizes_of_all[0], place, "", "", sizes_of_all[1], "", style=style)
    if left_out:
        rows.add_row(f"and {left_out} more with smaller peaks")
    return rows


def compositions_table(compositions: Sequence[Composition], terminal: int | None = None) -> Table:
    """Return a row for each estimate or profile: its total and the interval claimed."""
    rows = table(terminal, "File", *_right("Peak", "from", "to"), "by", title="Estimates and profiles")
    for each in compositions:
        sizes = map(known_size, (each.total, each.lower_end, each.high))
        rows.add_row(Text(short_name(each.source)), *sizes, Text(printable(each.how, 20)))
    return rows


def _right(*headers: str) -> list[Column]:
    return [Column(header, justify="right") for header in headers]


def kept_rows(trainings: Sequence[TrainingLogs], most: int) -> tuple[list[tuple[LogSummary, RunSummary]], int]:
    """Return the runs with the largest peaks, in their own order, and how many others there are."""
    every = [(log, run) for training in trainings for log in training.logs for run in log.runs]
    ranked = sorted(range(len(every)), key=lambda place: -(every[place][1].peak_bytes or 0))
    return [every[place] for place in sorted(ranked[:most])], max(0, len(every) - most)


def run_name(log: LogSummary, run: RunSummary) -> str:
    """Return how a run is spoken of: its log, and which run of it where the log has several."""
    return f"{log.name}, run {run.run + 1} ({run.kind})" if len(log.runs) > 1 else log.name


def peak_place(run: RunSummary) -> str:
    """Return where a run's peak was, in words; epochs count from 1, batches from 0 as Keras does."""
    if run.peak_bytes is None:
        return ""
    parts = [] if run.peak_epoch is None else [f"epoch {run.peak_epoch + 1}"]
    if run.peak_batch is None:
        parts.append("between logged batches")
    else:
        phase = "" if run.peak_phase in (None, "train") else f"{run.peak_phase} "
        parts.append(f"{phase}batch {run.peak_batch}")
    return ", ".join(parts)
