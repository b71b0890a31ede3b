"""What tracked actions cost, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Column, Table

from kerasmem.monitoring.tracking import ActionTotals
from kerasmem.rendering.escape import printable
from kerasmem.rendering.layout import figures, growth, table

_FIGURES = ("Calls", "Seconds", "Allocator", "kept", "Card", "kept", "Host", "kept")


def track_table(actions: Mapping[tuple[str, ...], ActionTotals], terminal: int | None = None) -> Table:
    """Return a row for each action, below the one that it ran in; siblings as they first began.

    Sizes are peaks (the largest of the calls), and beside them what was kept: after less before, over all calls.
    """
    title = "Memory of tracked actions: peak, and what was kept"
    rows = table(terminal, Column("Action", no_wrap=True), *map(figures, _FIGURES), title=title)

    def place(path: tuple[str, ...]) -> list[tuple[float, str]]:
        above = [path[: depth + 1] for depth in range(len(path))]
        return [(actions.get(each, actions[path]).started, each[-1]) for each in above]

    for path in sorted(actions, key=place):
        found = actions[path]
        label = "  " * (len(path) - 1) + printable(path[-1], 60) + (f" ({found.failed} failed)" if found.failed else "")
        uses = (found.allocator, found.driver, found.host)
        cells = [cell for use in uses for cell in (use.peak_bytes, growth(use.kept_bytes))]
        rows.add(label, str(found.calls), f"{found.seconds:.3g}", *cells)
    return rows
