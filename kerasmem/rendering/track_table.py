"""What tracked actions cost, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Column, Table
from rich.text import Text

from kerasmem.monitoring.tracking import Span, Use
from kerasmem.rendering.escape import printable
from kerasmem.rendering.layout import figures, growth, known_size, table

_FIGURES = ("Calls", "Seconds", "Allocator", "kept", "Card", "kept", "Host", "kept")


def track_table(spans: Sequence[Span], terminal: int | None = None) -> Table:
    """Return a row for each action, below the one that it ran in; calls of the same action share one.

    Sizes are peaks (the largest of the calls), and beside them what was kept: after less before, over all calls.
    """
    title = "Memory of tracked actions: peak, and what was kept"
    rows = table(terminal, Column("Action", no_wrap=True), *map(figures, _FIGURES), title=title)
    for path, calls in _in_order(spans):
        failed = sum(1 for span in calls if span.error is not None)
        label = "  " * (len(path) - 1) + printable(path[-1], 60) + (f" ({failed} failed)" if failed else "")
        rows.add_row(
            Text(label),
            str(len(calls)),
            f"{sum(span.seconds for span in calls):.3g}",
            *_cells(use for span in calls for use in span.allocator.values()),
            *_cells(span.driver for span in calls),
            *_cells(span.host for span in calls),
        )
    return rows


def _in_order(spans: Sequence[Span]) -> list[tuple[tuple[str, ...], list[Span]]]:
    """Return the calls of each action, parents before children, siblings as they first began."""
    calls: dict[tuple[str, ...], list[Span]] = {}
    for span in spans:
        calls.setdefault(span.path, []).append(span)
    first = {path: min(span.started for span in group) for path, group in calls.items()}

    def place(path: tuple[str, ...]) -> list[tuple[float, str]]:
        return [(first.get(path[: n + 1], first[path]), path[n]) for n in range(len(path))]

    return sorted(calls.items(), key=lambda item: place(item[0]))


def _cells(uses: Iterable[Use]) -> tuple[str, str]:
    known = list(uses)
    kept = [use.kept_bytes for use in known if use.kept_bytes is not None]
    peak = max((use.peak_bytes for use in known if use.peak_bytes is not None), default=None)
    return known_size(peak), growth(sum(kept) if kept else None)
