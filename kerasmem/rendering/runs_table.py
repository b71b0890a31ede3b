"""Runs beside one another, as a table for a terminal; and the words in which a run is spoken of."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from kerasmem.monitoring.digest import LogSummary, RunSummary
from kerasmem.monitoring.merging import Training
from kerasmem.rendering.composition import Composition
from kerasmem.rendering.escape import middle, printable
from kerasmem.units import format_size

_MOST_ROWS = 100


def runs_table(trainings: Sequence[Training], *, rich_look: bool) -> Table:
    """Return a row for each run: peak, where it was, means and growth; below each training of several ranks
    the largest of them.

    Args:
        trainings: in the order to show.
        rich_look: rules and colours, for a terminal.
    """
    table = _table("Runs", ("Run", "Peak", "where", "Mean in use", "growth", "Host", "growth"), rich_look)
    kept, left_out = kept_rows(trainings, _MOST_ROWS)
    for log, run in kept:
        table.add_row(
            Text(middle(printable(run_name(log, run)), 60)),
            _size(run.peak_bytes),
            Text(printable(peak_place(run), 40)),
            _size(run.mean_in_use_bytes),
            growth_text(run.in_use_growth_bytes),
            _size(run.rss_bytes),
            growth_text(run.rss_growth_bytes),
        )
    for training in trainings:
        peak, host = training.extreme("peak_bytes"), training.extreme("rss_bytes")
        if len(training.logs) > 1:
            table.add_row(
                Text(f"{middle(printable(training.name), 50)}: all {len(training.logs)} ranks"),
                _size(None if peak is None else peak.bytes),
                "" if peak is None else f"rank {peak.rank}",
                "",
                "",
                _size(None if host is None else host.bytes),
                "",
                style="bold" if rich_look else None,
            )
    if left_out:
        table.add_row(f"and {left_out} more with smaller peaks")
    return table


def compositions_table(compositions: Sequence[Composition], *, rich_look: bool) -> Table:
    """Return a row for each estimate or profile: its total and the interval claimed."""
    table = _table("Estimates and profiles", ("File", "Peak", "from", "to", "by"), rich_look)
    for each in compositions:
        how = "measured" if each.is_measured else each.method
        name = Text(middle(printable(each.source), 60))
        table.add_row(name, _size(each.total), _size(each.low), _size(each.high), Text(printable(how, 20)))
    return table


def kept_rows(trainings: Sequence[Training], most: int) -> tuple[list[tuple[LogSummary, RunSummary]], int]:
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


def growth_text(count: int | None) -> str:
    """Return a difference with its sign; a dash where not known."""
    return "–" if count is None else ("+" if count > 0 else "") + format_size(count)


def _size(count: int | None) -> str:
    return "–" if count is None else format_size(count)


def _table(title: str, columns: Sequence[str], rich_look: bool) -> Table:
    table = Table(
        title=Text(title, style="bold") if rich_look else None,
        box=box.SIMPLE_HEAD if rich_look else None,
        header_style="bold",
        padding=(0, 1) if rich_look else (0, 2, 0, 0),
        pad_edge=rich_look,
    )
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place == 0 or name in ("where", "by") else "right")
    return table
