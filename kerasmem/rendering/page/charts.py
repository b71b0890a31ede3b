"""Each chart as plain data, which the page's script draws.

A line or a bar names its colour by a role, which the page's style knows for light and dark. Names from files are
printable text; the script sets them as text, never as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kerasmem.monitoring.curves import OF_THE_HOST, Curve, Curves, thin
from kerasmem.rendering.contents import Composition
from kerasmem.rendering.escape import short_name
from kerasmem.units import GIB, KIB, MIB, TIB, format_size

# size -> (what a line of it is called, the role of its colour)
_LINES = {
    "peak_bytes": ("peak of the batch", "peak"),
    "in_use_bytes": ("in use after the batch", "in_use"),
    "reserved_bytes": ("reserved by the allocator", "reserved"),
    "driver_used_bytes": ("in use on the card", "driver"),
    "rss_bytes": ("host process", "host"),
    "swap_bytes": ("host process, in swap", "swap"),
}
_MOST_MARKS = 60
_MOST_SPANS = 200
_MOST_PARTS = 16  # of a bar


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: its place in the page, unique.
        caption: what it shows, for those who do not see it.
        data: as the page's script takes it.
    """

    name: str
    caption: str
    data: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return what the page's script draws."""
        return {"name": self.name, **self.data}


class Limit(NamedTuple):
    """How much there is, in bytes, and of what: "card", or a device's name."""

    bytes: int
    name: str


def unit_for(largest: int) -> tuple[str, int]:
    """Return the unit in which a chart up to `largest` bytes is drawn.

    Examples:
        >>> unit_for(3 * 2**30)
        ('GiB', 1073741824)
    """
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if largest >= size:
            return unit, size
    return "B", 1


def thinned(line: Curve, most: int) -> Curve:
    """Return a line of at most `most` points; the least and the largest stay."""
    if len(line.values) <= most:
        return line
    kept = thin(np.array(line.values), max(4, most))
    places = np.searchsorted(kept, line.starts)
    return replace(
        line,
        seconds=tuple(line.seconds[place] for place in kept),
        values=tuple(line.values[place] for place in kept),
        starts=tuple(sorted({int(place) for place in places if place < len(kept)})),
    )


def over_time(name: str, caption: str, stretch: Curves, limit: Limit | None = None, most: int = 3000) -> Chart:
    """Return a chart of a stretch: a line for each size and device, epochs and phases marked.

    Host memory has a panel of its own below: beside it an allocator's changes would be too small to see.

    Args:
        name, caption: as in `Chart`.
        stretch: what to draw.
        limit: of the device.
        most: points of a line.
    """
    devices = list(dict.fromkeys(line.device for line in stretch.lines if line.device is not None))
    panels = []
    for of_host in (False, True):
        if lines := [line for line in stretch.lines if (line.size in OF_THE_HOST) is of_host]:
            unit, factor = unit_for(max(max(line.values) for line in lines))
            panels.append(
                {
                    "title": f"{'host' if of_host else 'device'}, {unit}",
                    "unit": unit,
                    "lines": [_line(thinned(line, most), devices, factor) for line in lines],
                    "limit": None if of_host else _limit(limit, factor),
                }
            )
    marks = stretch.epochs[:: -(-len(stretch.epochs) // _MOST_MARKS) or 1]
    spans = stretch.phases if len(stretch.phases) <= _MOST_SPANS else ()
    data = {
        "kind": "time",
        "panels": panels,
        "epochs": [[mark.seconds, mark.epoch + 1] for mark in marks],
        "phases": [[span.start, span.end, short_name(span.phase, 24)] for span in spans],
    }
    return Chart(name, caption, data)


def _line(line: Curve, devices: list[str], factor: int) -> dict[str, Any]:
    device = f", {short_name(line.device, 24)}" if line.device is not None and len(devices) > 1 else ""
    title, role = _LINES[line.size]
    return {
        "label": title + device,
        "role": role,
        "dash": devices.index(line.device) if line.device in devices else 0,
        "x": list(line.seconds),
        "y": [_scaled(value, factor) for value in line.values],
        "starts": list(line.starts),
    }


def _limit(limit: Limit | None, factor: int) -> dict[str, Any] | None:
    if limit is None:
        return None
    return {"value": _scaled(limit.bytes, factor), "label": f"{short_name(limit.name, 24)}: {format_size(limit.bytes)}"}


@dataclass(frozen=True)
class Bar:
    """One bar, or one part of a stacked one: bytes, the interval claimed where there is one, and whether it missed."""

    bytes: int | None
    low: int | None = None
    high: int | None = None
    missed: bool = False


def bars(
    name: str, caption: str, rows: Sequence[str], series: Sequence[tuple[str, str, Sequence[Bar]]], *,
    stacked: bool = False, limit: Limit | None = None,
) -> Chart:  # fmt: skip
    """Return horizontal bars, the first row at the top. A bar of nothing takes no room.

    Args:
        name, caption: as in `Chart`.
        rows: names of the rows; may come from files.
        series: for each series its name, the role of its colour and a bar for each row.
        stacked: parts of one bar, rather than bars side by side.
        limit: of the device.
    """
    tops = [value for _, _, column in series for bar in column for value in (bar.bytes, bar.high) if value is not None]
    sums = [sum(column[place].bytes or 0 for _, _, column in series) for place in range(len(rows))] if stacked else []
    unit, factor = unit_for(max([*tops, *sums], default=0))
    data = {
        "kind": "bars",
        "unit": unit,
        "stacked": stacked,
        "rows": [short_name(row, 80) for row in rows],
        "limit": _limit(limit, factor),
        "series": [
            {"label": short_name(title, 40), "role": role, "bars": [_bar(bar, factor) for bar in column]}
            for title, role, column in series
        ],
    }
    return Chart(name, caption, data)


def by_category(name: str, compositions: Sequence[Composition], limit: Limit | None = None) -> Chart:
    """Return what some peaks are made of: a bar for each of them, in parts."""
    names = dict.fromkeys(name for each in compositions for name, part in each.categories if part)
    series = [
        (part, f"c{place % 8}", [Bar(dict(each.categories).get(part)) for each in compositions])
        for place, part in enumerate(islice(names, _MOST_PARTS))
    ]
    sources = [each.source for each in compositions]
    return bars(name, "The peak by category", sources, series, stacked=True, limit=limit)


def by_layer(name: str, composition: Composition, most: int) -> Chart:
    """Return a bar for each of the largest layers of a peak."""
    top = composition.largest_layers[:most]
    kind = "What each layer holds at the peak" if composition.is_at_peak else "Each layer’s share of the total"
    caption = f"{kind}, the largest {len(top)} of {len(composition.layers)} layers"
    role = "measured" if composition.is_measured else "estimated"
    return bars(name, caption, [layer.name for layer in top], [(role, role, [Bar(layer.bytes) for layer in top])])


def _bar(bar: Bar, factor: int) -> dict[str, Any] | None:
    if not bar.bytes:
        return None
    sizes = {"value": bar.bytes, "low": bar.low, "high": bar.high}
    drawn = {name: _scaled(size, factor) for name, size in sizes.items() if size is not None}
    return {**drawn, "text": format_size(bar.bytes), **({"missed": True} if bar.missed else {})}


def _scaled(value: int, factor: int) -> float:
    return float(f"{value / factor:.6g}")
