"""What tracked actions cost, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from kerasmem.monitoring.tracking import Span, Use
from kerasmem.rendering.escape import printable
from kerasmem.units import format_size

_COLUMNS = ("Action", "Calls", "Seconds", "Allocator", "kept", "Card", "kept", "Host", "kept")


def track_table(spans: Sequence[Span], *, rich_look: bool) -> Table:
    """Return a row for each action, below the one that it ran in; calls of the same action share one.

    Sizes are peaks (the largest of the calls), and beside them what was kept: after less before, over all calls.

    Args:
        spans: in any order.
        rich_look: rules and colours, for a terminal.
    """
    table = Table(
        title=Text("Memory of tracked actions: peak, and what was kept", style="bold") if rich_look else None,
        box=box.SIMPLE_HEAD if rich_look else None,
        header_style="bold",
        padding=(0, 1) if rich_look else (0, 2, 0, 0),
        pad_edge=rich_look,
    )
    for place, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if place == 0 else "right", no_wrap=True)
    for path, calls in _in_order(spans):
        failed = sum(1 for span in calls if span.error is not None)
        label = "  " * (len(path) - 1) + printable(path[-1], 60) + (f" ({failed} failed)" if failed else "")
        table.add_row(
            Text(label),
            str(len(calls)),
            f"{sum(span.seconds for span in calls):.3g}",
            *_cells(use for span in calls for use in span.allocator.values()),
            *_cells(span.driver for span in calls),
            *_cells(span.host for span in calls),
        )
    return table


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
    peak = max((use.peak_bytes for use in known if use.peak_bytes is not None), default=None)
    kept = [use.kept_bytes for use in known if use.kept_bytes is not None]
    total = sum(kept)
    return (
        "–" if peak is None else format_size(peak),
        "–" if not kept else ("+" if total > 0 else "") + format_size(total),
    )
