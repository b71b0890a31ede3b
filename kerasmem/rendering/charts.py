"""Draws charts as inline SVG, for light and dark colours and any width, without a script.

Horizontal lengths are percentages and vertical lengths are pixels, so text keeps its size on a phone. Colours of lines
and bars are classes of the style sheet. Names come from untrusted files, so all text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kerasmem.monitoring.curves import OF_THE_HOST, Curve, Curves
from kerasmem.rendering.formatting import html_attribute, html_text, short_name, svg_text
from kerasmem.units import GIB, KIB, MIB, TIB, format_size

_NAMES = {
    "peak_bytes": "peak of the batch",
    "in_use_bytes": "in use after the batch",
    "reserved_bytes": "reserved by the allocator",
    "driver_used_bytes": "in use on the card",
    "rss_bytes": "host process",
    "swap_bytes": "host process, in swap",
}
_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
_COLOURS = 8  # in the style sheet
_FAR = 3  # times the largest value; a limit beyond that would flatten the lines, and is not drawn
_MOST_EPOCHS = 6  # marked in a chart


class Limit(NamedTuple):
    """Memory of a device in bytes, and its name, or "card"."""

    bytes: int
    name: str

    def label(self) -> str:
        """Return the label of the limit's line."""
        return svg_text(f"{short_name(self.name, 24)}: {format_size(self.bytes)}")


def over_time(stretch: Curves, caption: str, limit: Limit | None = None) -> str:
    """Return a chart with a line for each size and device, and marks at epochs.

    Host memory has its own panel, because it is much larger than the allocator's changes.
    """
    devices = {line.device for line in stretch.lines if line.device is not None}
    colours: dict[str, str] = {}
    panels: list[str] = []
    for title, height in (("device", 220), ("host", 110)):
        lines = []
        for line in stretch.lines:
            if (line.size in OF_THE_HOST) is (title == "host"):
                of = f", {line.device}" if len(devices) > 1 and line.device is not None else ""
                name = _NAMES[line.size] + of
                lines.append((colours.setdefault(name, f"c{len(colours) % _COLOURS}"), line))
        if lines:
            panels += _panel(title, height, lines, stretch, limit if title == "device" else None)
    return _figure(caption, "".join(panels), colours, "time")


def _panel(
    title: str, height: int, lines: Sequence[tuple[str, Curve]], stretch: Curves, limit: Limit | None
) -> Iterator[str]:
    start = min(line.seconds[0] for line in stretch.lines)
    end = max(start + 0.001, *(line.seconds[-1] for line in stretch.lines))
    largest = max(1, *(max(line.values) for _, line in lines))
    if limit is not None and limit.bytes > _FAR * largest:
        limit = None
    top = 1.06 * max(largest, limit.bytes if limit else 0)
    unit, factor = next((unit, size) for unit, size in _UNITS if largest >= size)

    def across(seconds: float) -> float:
        return 1000 * (seconds - start) / (end - start)

    def down(size: float) -> str:
        return f"{height * (1 - size / top):.1f}"

    yield f'<svg height="{height}" role="img" aria-label="{title} memory over time">'
    yield f'<text x="0" y="-22" dx="-40" class="title">{title}, {unit}</text>'
    for value in _ticks(0, top / factor):
        y = down(value * factor)
        yield f'<line x1="0" x2="100%" y1="{y}" y2="{y}" class="grid"/>'
        yield f'<text x="0" y="{y}" dx="-6" dy="4" class="end">{value:g}</text>'
    yield f'<svg viewBox="0 0 1000 {height}" preserveAspectRatio="none" width="100%" height="{height}">'
    marks = stretch.epochs[:: math.ceil(len(stretch.epochs) / _MOST_EPOCHS) or 1]
    yield from (f'<path d="M{across(mark.seconds):.1f} 0V{height}" class="epoch"/>' for mark in marks)
    for colour, line in lines:
        pairs = zip(line.seconds, line.values, strict=True)
        path = "L".join(f"{across(seconds):.1f} {down(value)}" for seconds, value in pairs)
        yield f'<path d="M{path}h0" class="{colour} line"/>'
    yield "</svg>"
    for mark in marks:
        if across(mark.seconds) < 930:
            yield f'<text x="{across(mark.seconds) / 10:.2f}%" y="-6" dx="2">epoch {mark.epoch + 1}</text>'
    for second in _ticks(start, end):
        yield f'<text x="{across(second) / 10:.2f}%" y="{height + 16}" class="middle">{second:g} s</text>'
    if limit is not None:
        y = down(limit.bytes)
        yield f'<line x1="0" x2="100%" y1="{y}" y2="{y}" class="limit"/>'
        yield f'<text x="100%" y="{y}" dx="-4" dy="14" class="limit-label end">{limit.label()}</text>'
    yield "</svg>"


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    raw = (high - low) / count
    ten = 10 ** math.floor(math.log10(raw))
    step = next(factor * ten for factor in (1, 2, 5, 10) if factor * ten >= 0.999 * raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def bars(caption: str, rows: Mapping[str, Mapping[str, int]], limit: Limit | None = None) -> str:
    """Return a stacked bar for each row, with its total.

    Args:
        caption: text above the chart.
        rows: name of each row, and the bytes of its parts.
        limit: memory of the device, or None.
    """
    names = dict.fromkeys(name for parts in rows.values() for name in parts)
    colours = {name: f"c{number % _COLOURS}" for number, name in enumerate(names)}
    largest = max(1, *(sum(parts.values()) for parts in rows.values()))
    if limit is not None and limit.bytes > _FAR * largest:
        limit = None
    end = 1.06 * max(largest, limit.bytes if limit else 0)
    drawn = []
    for number, (row, parts) in enumerate(rows.items()):
        y = 40 * number + 18
        drawn.append(f'<text x="0" y="{y - 5}" class="label">{svg_text(row, 44)}</text>')
        start = 0.0
        for name, size in parts.items():
            across = f'x="{100 * start:.3f}%" width="{100 * size / end:.3f}%"'
            tip = svg_text(f"{name} {format_size(size)}", 200)
            drawn.append(f'<rect {across} y="{y}" height="14" class="{colours[name]} bar"><title>{tip}</title></rect>')
            start += size / end
        total = format_size(sum(parts.values()))
        drawn.append(f'<text x="{100 * start:.2f}%" y="{y + 11}" dx="6" class="value">{total}</text>')
    height = 40 * len(rows)
    if limit is not None:
        x = f"{100 * limit.bytes / end:.2f}%"
        drawn.append(f'<line x1="{x}" x2="{x}" y1="-4" y2="{height}" class="limit"/>')
        drawn.append(f'<text x="{x}" y="-8" class="limit-label end">{limit.label()}</text>')
    chart = f'<svg height="{height}" role="img" aria-label="bars">{"".join(drawn)}</svg>'
    return _figure(caption, chart, colours, "bars")


def _figure(caption: str, drawn: str, colours: Mapping[str, str], kind: str) -> str:
    keys = "".join(f'<span class="key {colour}">{html_text(name, 60)}</span>' for name, colour in colours.items())
    legend = f'<p class="legend">{keys}</p>' if len(colours) > 1 else ""
    head = f"<figcaption>{html_text(caption)}</figcaption>"
    return f'<figure aria-label="{html_attribute(caption)}">{head}<div class="{kind}">{drawn}</div>{legend}</figure>'
