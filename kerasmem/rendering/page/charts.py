"""Each chart as plain data in the form that plotly.js takes; the page's script adds the colours of its theme.

A trace names its colour by a role in `meta.role`; labels from files go through `escape.chart_label`. Heights are in
CSS pixels, widths are the window's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kerasmem.monitoring.curves import Curve, Curves
from kerasmem.rendering.escape import chart_label
from kerasmem.units import GIB, KIB, MIB, TIB

# size -> (what a line of it is called, the role of its colour)
LINES = {
    "peak_bytes": ("peak of the batch", "peak"),
    "in_use_bytes": ("in use after the batch", "in_use"),
    "reserved_bytes": ("reserved by the allocator", "reserved"),
    "driver_used_bytes": ("in use on the card", "driver"),
    "rss_bytes": ("host process", "host"),
    "swap_bytes": ("host process, in swap", "swap"),
}
_OF_THE_HOST = ("rss_bytes", "swap_bytes")
_DASHES = ("solid", "dash", "dot", "dashdot")
_MOST_MARKS = 60
_MOST_SPANS = 200
_LABELLED = 12


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: its place in the page, unique.
        caption: what it shows, for those who do not see it.
        height: in CSS pixels.
        traces, layout: as plotly.js takes them.
    """

    name: str
    caption: str
    height: int
    traces: list[dict[str, Any]]
    layout: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return what the page's script draws."""
        return {"name": self.name, "traces": self.traces, "layout": self.layout}


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


def panels_of(stretch: Curves) -> tuple[list[Curve], list[Curve]]:
    """Return the lines of the devices and those of the host."""
    of_host = [line for line in stretch.lines if line.size in _OF_THE_HOST]
    return [line for line in stretch.lines if line.size not in _OF_THE_HOST], of_host


def over_time(name: str, caption: str, stretch: Curves) -> Chart:
    """Return a chart of a stretch: a line for each size and device, epochs and phases marked.

    Host memory has a panel of its own below: beside it an allocator's changes would be too small to see.
    """
    devices = list(dict.fromkeys(line.device for line in stretch.lines if line.device is not None))
    panels = [lines for lines in panels_of(stretch) if lines]
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "xaxis": {"title": {"text": "seconds"}, "hoverformat": ",.4~r", "unifiedhovertitle": {"text": "%{x} s"}},
        "shapes": _shapes(stretch),
        "annotations": _epoch_labels(stretch),
        "margin": {"t": 28},
        "meta": {"legend": True},
    }
    for place, lines in enumerate(panels):
        unit, factor = unit_for(max(max(line.values) for line in lines))
        axis = "y" if place == 0 else "y2"
        traces += [_trace(line, devices, axis, unit, factor) for line in lines]
        title = f"host, {unit}" if lines[0].size in _OF_THE_HOST else f"device, {unit}"
        domain = [0, 1] if len(panels) == 1 else [0.4, 1] if place == 0 else [0, 0.3]
        layout[axis.replace("y", "yaxis")] = {
            "title": {"text": title}, "rangemode": "tozero", "tickformat": ",~r", "domain": domain, "nticks": 5,
        }  # fmt: skip
    if len(panels) > 1:
        layout["xaxis"]["anchor"] = "y2"
    layout.setdefault("yaxis", {})
    return Chart(name, caption, 360 if len(panels) == 1 else 480, traces, layout)


def _trace(line: Curve, devices: list[str], axis: str, unit: str, factor: int) -> dict[str, Any]:
    place = devices.index(line.device) if line.device in devices else 0
    device = f", {chart_label(line.device, 24)}" if line.device is not None and len(devices) > 1 else ""
    title = LINES[line.size][0] + device
    return {
        "type": "scatter",
        "mode": "lines" if len(line.values) > 1 else "markers",
        "name": title,
        "x": list(line.seconds),
        "y": [_scaled(value, factor) for value in line.values],
        "yaxis": axis,
        "line": {"width": 2 if line.size == "peak_bytes" else 1.6, "dash": _DASHES[place % len(_DASHES)]},
        "hovertemplate": f"%{{y:,.4~r}} {unit}<extra>{title}</extra>",
        "meta": {"role": LINES[line.size][1]},
    }


def _shapes(stretch: Curves) -> list[dict[str, Any]]:
    def shape(kind: str, start: float, end: float, role: str, line: dict[str, Any]) -> dict[str, Any]:
        place = {"xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": 0, "y1": 1, "layer": "below"}
        return {"type": kind, **place, "line": line, "role": role}

    spans = stretch.phases if len(stretch.phases) <= _MOST_SPANS else ()
    marks = stretch.epochs[:: -(-len(stretch.epochs) // _MOST_MARKS) or 1]
    dotted = {"width": 1, "dash": "dot"}
    return [
        *(shape("rect", span.start, span.end, "phase", {"width": 0}) for span in spans),
        *(shape("line", mark.seconds, mark.seconds, "mark", dotted) for mark in marks),
    ]


def _epoch_labels(stretch: Curves) -> list[dict[str, Any]]:
    step = -(-len(stretch.epochs) // _LABELLED) or 1
    return [
        {"x": mark.seconds, "y": 1, "xref": "x", "yref": "paper", "yanchor": "bottom", "xanchor": "left",
         "showarrow": False, "text": f"epoch {mark.epoch + 1}" if place == 0 else str(mark.epoch + 1),
         "font": {"size": 11}, "role": "mark"}
        for place, mark in enumerate(stretch.epochs[::step])
    ]  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """One bar, or one part of a stacked one: bytes, and the interval claimed where there is one."""

    bytes: int | None
    low: int | None = None
    high: int | None = None


def bars(
    name: str, caption: str, rows: Sequence[str], series: Sequence[tuple[str, str, Sequence[Bar]]], *,
    stacked: bool = False,
) -> Chart:  # fmt: skip
    """Return horizontal bars, the first row at the top.

    Args:
        name, caption: as in `Chart`.
        rows: names of the rows; may come from files.
        series: for each series its name, the role of its colour and a bar for each row.
        stacked: parts of one bar, rather than bars side by side.
    """
    tops = [value for _, _, column in series for bar in column for value in (bar.bytes, bar.high) if value is not None]
    sums = [sum(column[place].bytes or 0 for _, _, column in series) for place in range(len(rows))] if stacked else []
    unit, factor = unit_for(max([*tops, *sums], default=0))
    places = list(range(len(rows)))
    traces = []
    for title, role, column in series:
        shown = chart_label(title, 40)
        trace: dict[str, Any] = {
            "type": "bar",
            "orientation": "h",
            "name": shown,
            "y": places,
            "x": [None if bar.bytes is None else _scaled(bar.bytes, factor) for bar in column],
            "customdata": [chart_label(row, 80) for row in rows],
            "hovertemplate": f"%{{customdata}}<br>%{{x:,.4~r}} {unit}<extra>{shown}</extra>",
            "meta": {"role": role},
        }
        if any(bar.low is not None and bar.high is not None and bar.bytes is not None for bar in column):
            trace["error_x"] = _interval(column, factor)
        traces.append(trace)
    each = 26 if stacked or len(series) == 1 else 18 * len(series)
    layout = {
        "barmode": "stack" if stacked else "group",
        "bargap": 0.3,
        "hovermode": "closest",
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero", "tickformat": ",~r"},
        "yaxis": {
            "tickmode": "array",
            "tickvals": places,
            "ticktext": [chart_label(row, 34) for row in rows],
            "range": [len(rows) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
            "ticks": "",
        },
        "meta": {"legend": len(series) > 1, "narrow": [chart_label(row, 16) for row in rows]},
    }
    return Chart(name, caption, 110 + each * len(rows) + (24 if len(series) > 1 else 0), traces, layout)


def _interval(column: Sequence[Bar], factor: int) -> dict[str, Any]:
    above, below = [], []
    for bar in column:
        known = bar.bytes is not None and bar.low is not None and bar.high is not None
        above.append(_scaled(max(0, (bar.high or 0) - (bar.bytes or 0)), factor) if known else 0)
        below.append(_scaled(max(0, (bar.bytes or 0) - (bar.low or 0)), factor) if known else 0)
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.2, "width": 4}


def _scaled(value: int, factor: int) -> float:
    return float(f"{value / factor:.6g}")
