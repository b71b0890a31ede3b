"""Charts as inline SVG, for light and dark, and for any width without a script.

Lengths across are shares of the width and lengths down are pixels, so text keeps its size on a phone. A line or bar
names its colour by a class of the style sheet. Names come from files: everything is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kerasmem.monitoring.curves import OF_THE_HOST, Curve, Curves
from kerasmem.rendering.escape import html_attribute, html_text, short_name, svg_text
from kerasmem.units import GIB, KIB, MIB, TIB, format_size

# size -> the name of its line, and the class of its colour
_LINES = {
    "peak_bytes": ("peak of the batch", "peak"),
    "in_use_bytes": ("in use after the batch", "in-use"),
    "reserved_bytes": ("reserved by the allocator", "reserved"),
    "driver_used_bytes": ("in use on the card", "driver"),
    "rss_bytes": ("host process", "host"),
    "swap_bytes": ("host process, in swap", "swap"),
}
_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
_COLOURS = 8  # of parts, as the style sheet has them
_BAR = 16  # pixels
_FAR = 3  # times the largest value: a limit beyond stands at the edge and does not flatten the rest
_MOST_MARKS, _MOST_LABELS = 60, 6  # of epochs


class Limit(NamedTuple):
    """Memory available, in bytes, and of what: "card", or a device's name."""

    bytes: int
    name: str


@dataclass(frozen=True)
class Bar:
    """A bar: bytes, the interval claimed, and whether a measured size missed that."""

    bytes: int | None
    low: int | None = None
    high: int | None = None
    missed: bool = False


class _Scale:
    """A scale from 0 to a bit more than the largest value, in the unit that suits it.

    Attributes:
        note: the limit's label.
        limit: its place on the scale as a share, or None.
    """

    def __init__(self, largest: int, limit: Limit | None) -> None:
        self.unit, factor = next((unit, size) for unit, size in _UNITS if largest >= size or size == 1)
        is_beyond = limit is not None and limit.bytes > _FAR * largest
        top = max(largest, 1 if limit is None or is_beyond else limit.bytes)
        self._end = 1.06 * top
        self.limit, self.note = None, ""
        if limit is not None:
            self.limit = 1.0 if is_beyond else limit.bytes / self._end
            beyond = ", beyond this chart" if is_beyond else ""
            self.note = f"{short_name(limit.name, 24)}: {format_size(limit.bytes)}{beyond}"
        self.ticks = [(f"{value:g}", value * factor / self._end) for value in _ticks(0, self._end / factor)]

    def __call__(self, size: int) -> float:
        """Return a size as a share of the scale."""
        return size / self._end


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers from `low` to `high`, at most about `count`."""
    raw = (high - low) / count
    ten = 10 ** math.floor(math.log10(raw))
    step = next(factor * ten for factor in (1, 2, 5, 10) if factor * ten >= 0.999 * raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def over_time(stretch: Curves, caption: str, limit: Limit | None = None) -> str:
    """Return a chart of a stretch of time: a line for each size and device, epochs marked.

    Host memory has a panel of its own, since an allocator's changes are too small beside it.
    """
    moments = [second for line in stretch.lines for second in (line.seconds[0], line.seconds[-1])]
    start, end = min(moments), max(moments)
    span = (start, end) if end > start else (start - 0.5, end + 0.5)
    devices = list(dict.fromkeys(line.device for line in stretch.lines if line.device is not None))
    names, panels = {}, []
    for title, height in (("device", 220), ("host", 110)):
        lines = [line for line in stretch.lines if (line.size in OF_THE_HOST) is (title == "host")]
        if lines:
            panels += list(_panel(title, height, lines, devices, stretch, span, limit if title == "device" else None))
        for line in lines:
            name, role = _LINES[line.size]
            of = f", {line.device}" if len(devices) > 1 and line.device is not None else ""
            names[f"{name}{of}"] = f"{role} line {_dash(line, devices)}"
    return _figure(caption, "".join(panels), names, "time")


def _panel(
    title: str, height: int, lines: Sequence[Curve], devices: list[str], stretch: Curves,
    span: tuple[float, float], limit: Limit | None,
) -> Iterator[str]:  # fmt: skip
    start, end = span

    def across(seconds: float) -> float:
        return 1000 * (seconds - start) / (end - start)

    scale = _Scale(max(max(line.values) for line in lines), limit)
    yield f'<svg height="{height}" role="img" aria-label="{title} memory over time">'
    yield f'<text x="0" y="-22" dx="-40" class="title">{title}, {scale.unit}</text>'
    for text, share in scale.ticks:
        y = height * (1 - share)
        yield f'<line x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        yield f'<text x="0" y="{y:.1f}" dx="-6" dy="4" class="end">{text}</text>'
    yield f'<svg viewBox="0 0 1000 {height}" preserveAspectRatio="none" width="100%" height="{height}">'
    marks = stretch.epochs[:: -(-len(stretch.epochs) // _MOST_MARKS) or 1]
    yield from (f'<path d="M{across(mark.seconds):.1f} 0V{height}" class="epoch"/>' for mark in marks)
    for line in lines:
        points = [
            f"{across(seconds):.1f} {height * (1 - scale(value)):.1f}"
            for seconds, value in zip(line.seconds, line.values, strict=True)
        ]
        parts = (points[first:last] for first, last in pairwise([0, *line.starts, len(points)]))
        path = "".join(f"M{'L'.join(part)}" + ("h0" if len(part) == 1 else "") for part in parts)
        yield f'<path d="{path}" class="{_LINES[line.size][1]} line {_dash(line, devices)}"/>'
    yield "</svg>"
    for mark in stretch.epochs[:: -(-len(stretch.epochs) // _MOST_LABELS) or 1]:
        if across(mark.seconds) < 930:
            yield f'<text x="{across(mark.seconds) / 10:.2f}%" y="-6" dx="2">epoch {mark.epoch + 1}</text>'
    for second in _ticks(start, end):
        yield f'<text x="{across(second) / 10:.2f}%" y="{height + 16}" class="middle">{second:g} s</text>'
    if scale.limit is not None:
        y = height * (1 - scale.limit)
        yield f'<line x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}" class="limit"/>'
        yield f'<text x="100%" y="{y + 14:.1f}" dx="-4" class="limit-label end">{svg_text(scale.note)}</text>'
    yield "</svg>"


def _dash(line: Curve, devices: list[str]) -> str:
    return f"dash{devices.index(line.device) % 4}" if line.device in devices else "dash0"


def bars(
    caption: str, rows: Sequence[str], series: Mapping[str, Sequence[Bar]], *, limit: Limit | None = None,
    roles: Sequence[str] = ("peak", "host"),
) -> str:  # fmt: skip
    """Return horizontal bars, one below the other, the first row at the top; a bar of nothing takes no room.

    Args:
        caption: what the chart shows.
        rows: names of the rows.
        series: for each series a bar for each row.
        limit: of the device.
        roles: the class of each series' colour.
    """
    every = [bar for column in series.values() for bar in column]
    scale = _Scale(max((size or 0 for bar in every for size in (bar.bytes, bar.high)), default=0), limit)
    parts: list[str] = []
    y = 0
    for place, row in enumerate(rows):
        y += 18
        parts.append(f'<text x="0" y="{y - 5}" class="label">{svg_text(row, 44)}</text>')
        for (name, column), role in zip(series.items(), roles, strict=False):
            bar = column[place]
            if bar.bytes:
                parts += _bar(row, name, bar, role, y, scale)
                y += _BAR
        y += 6
    return _figure(caption, _frame(y, scale, parts), dict(zip(series, roles, strict=False)), "bars")


def _bar(row: str, name: str, bar: Bar, role: str, y: int, scale: _Scale) -> Iterator[str]:
    size, end, missed = bar.bytes or 0, scale(bar.bytes or 0), " missed" if bar.missed else ""
    tip = svg_text(f"{row}: {name} {format_size(size)}", 200)
    yield _rect(0, end, y, role, tip)
    if bar.low is not None and bar.high is not None:
        low, high = 100 * scale(bar.low), 100 * scale(bar.high)
        middle = y + _BAR // 2 - 1
        yield f'<line x1="{low:.2f}%" x2="{high:.2f}%" y1="{middle}" y2="{middle}" class="interval{missed}"/>'
        for x in (low, high):
            yield f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="{middle - 4}" y2="{middle + 4}" class="interval{missed}"/>'
        end = max(end, high / 100)
    mark = " ✘" if bar.missed else ""
    yield f'<text x="{100 * end:.2f}%" y="{y + 11}" dx="6" class="value{missed}">{format_size(size)}{mark}</text>'


def stacked(caption: str, rows: Mapping[str, Mapping[str, int]], limit: Limit | None = None) -> str:
    """Return a bar for each row, in parts, with its sum beside it.

    Args:
        caption: what the chart shows.
        rows: for each row the bytes of its parts.
        limit: of the device.
    """
    part_names = dict.fromkeys(name for parts in rows.values() for name in parts)
    names = {name: f"c{number % _COLOURS}" for number, name in enumerate(part_names)}
    scale = _Scale(max((sum(parts.values()) for parts in rows.values()), default=0), limit)
    drawn: list[str] = []
    y = 0
    for row, parts in rows.items():
        y += 18
        drawn.append(f'<text x="0" y="{y - 5}" class="label">{svg_text(row, 44)}</text>')
        start = 0.0
        for name, size in parts.items():
            drawn.append(_rect(start, scale(size), y, names[name], svg_text(f"{name} {format_size(size)}", 200)))
            start += scale(size)
        total = format_size(sum(parts.values()))
        drawn.append(f'<text x="{100 * start:.2f}%" y="{y + 11}" dx="6" class="value">{total}</text>')
        y += _BAR + 6
    return _figure(caption, _frame(y, scale, drawn), names, "bars")


def _rect(start: float, width: float, y: int, role: str, tip: str) -> str:
    size = f'x="{100 * start:.3f}%" width="{100 * width:.3f}%" y="{y}" height="{_BAR - 2}"'
    return f'<rect {size} class="{role} bar"><title>{tip}</title></rect>'


def _frame(height: int, scale: _Scale, drawn: Iterable[str]) -> str:
    """Return bars in front of a grid, with ticks below and the limit."""
    grid = []
    for text, share in scale.ticks:
        x = f"{100 * share:.2f}%"
        grid.append(f'<line x1="{x}" x2="{x}" y1="0" y2="{height}" class="grid"/>')
        grid.append(f'<text x="{x}" y="{height + 14}" class="middle">{text}</text>')
    grid.append(f'<text x="100%" y="{height + 14}" dx="12">{scale.unit}</text>')
    if scale.limit is not None:
        x = f"{100 * scale.limit:.2f}%"
        grid.append(f'<line x1="{x}" x2="{x}" y1="-4" y2="{height}" class="limit"/>')
        grid.append(f'<text x="{x}" y="-8" class="limit-label end">{svg_text(scale.note)}</text>')
    return f'<svg height="{height}" role="img" aria-label="bars">{"".join(grid)}{"".join(drawn)}</svg>'


def _figure(caption: str, drawn: str, names: Mapping[str, str], kind: str) -> str:
    keys = "".join(f'<span class="key {role}">{html_text(name, 60)}</span>' for name, role in names.items())
    legend = f'<p class="legend">{keys}</p>' if len(names) > 1 else ""
    head = f"<figcaption>{html_text(caption)}</figcaption>"
    return f'<figure aria-label="{html_attribute(caption)}">{head}<div class="{kind}">{drawn}</div>{legend}</figure>'
