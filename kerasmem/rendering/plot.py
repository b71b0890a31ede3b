"""Results as one picture, PNG or SVG, through matplotlib."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np

from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.monitoring.curves import Curve, Curves
from kerasmem.rendering.contents import Composition, PageContents
from kerasmem.rendering.escape import short_name
from kerasmem.rendering.page.charts import LINES, panels_of, unit_for

_COLOURS = {
    "peak_bytes": "#c8501e", "in_use_bytes": "#2364aa", "reserved_bytes": "#8e6bbf",
    "driver_used_bytes": "#7a828e", "rss_bytes": "#1d8a6b", "swap_bytes": "#b8336a",
}  # fmt: skip
_PARTS = ("#2364aa", "#e08a1e", "#1d8a6b", "#b8336a", "#6f5bb5", "#5aa6d6", "#8a9099", "#a8742a")
_DASHES = ("-", "--", ":", "-.")
_MOST_STRETCHES = 6
_MOST_LAYERS = 15
_MOST_MARKS = 60


def render_plot(contents: PageContents, format: str) -> bytes:
    """Return a picture: each run over time (the first six), peaks by category, the largest layers.

    Args:
        contents: what to draw.
        format: "png" (144 dots an inch) or "svg".

    Raises:
        UsageError: there is nothing to draw, or the format is another.
        MissingExtraError: matplotlib is not installed.
    """
    if format not in ("png", "svg"):
        raise UsageError(f"--plot: {format!r} is neither png nor svg; name the file .png or .svg")
    try:
        import matplotlib
        from matplotlib.figure import Figure  # not pyplot: no display, nothing kept between calls
    except ImportError as error:
        raise MissingExtraError("--plot", "plot") from error
    curves = [(log.name, stretch) for log in contents.logs for stretch in log.curves if stretch.lines][:_MOST_STRETCHES]
    panels = [(name, stretch, lines) for name, stretch in curves for lines in panels_of(stretch) if lines]
    divided = [each for each in contents.compositions if any(part for _, part in each.categories)][:12]
    layered = [each for each in contents.compositions if each.largest_layers][:4]
    layer_rows = [min(_MOST_LAYERS, len(each.largest_layers)) for each in layered]
    heights = [2.7] * len(panels) + [1.6 + 0.4 * len(divided)] * bool(divided) + [1.1 + 0.24 * n for n in layer_rows]
    if not heights:
        raise UsageError("--plot: there is nothing to draw: no readings and no categories in the files given")
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "kerasmem", "font.size": 9}):
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        figure = Figure(figsize=(10, sum(heights)), layout="constrained")
        axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        rest = iter(axes)
        for name, stretch, lines in panels:
            _draw_stretch(next(rest), name, stretch, lines)
        _legend_of_lines(figure)
        if divided:
            _draw_categories(next(rest), divided)
        for each in layered:
            _draw_layers(next(rest), each)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=format, dpi=144, metadata={"Date": None} if format == "svg" else None)
    return buffer.getvalue()


def _plain(text: Any) -> None:
    """Have a text drawn as it is: a name with two dollars is no formula."""
    text.set_parse_math(False)


def _title(axes: Any, text: str) -> None:
    _plain(axes.set_title(text, loc="left", fontsize=10))


def _frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#e6e9ee", linewidth=0.8)
    axes.set_axisbelow(True)


def _legend(axes: Any, *entries: Any, **where: Any) -> None:
    for text in axes.legend(*entries, frameon=False, fontsize=8, **where).get_texts():
        _plain(text)


def _legend_of_lines(figure: Any) -> None:
    """Name each kind of line and shade once, above all panels."""
    drawn = [axes.get_legend_handles_labels() for axes in figure.axes]
    named = {label: handle for handles, labels in drawn for handle, label in zip(handles, labels, strict=True)}
    if named:
        _legend(figure, named.values(), named.keys(), loc="outside upper left", ncols=4)


def _draw_stretch(axes: Any, name: str, stretch: Curves, lines: list[Curve]) -> None:
    unit, factor = unit_for(max(max(line.values) for line in lines))
    devices = list(dict.fromkeys(line.device for line in stretch.lines if line.device is not None))
    for span in stretch.phases:
        axes.axvspan(span.start, span.end, color="#6f5bb5", alpha=0.13, linewidth=0, label=short_name(span.phase, 24))
    for line in lines:
        place = devices.index(line.device) if line.device in devices else 0
        title = LINES[line.size][0]
        if line.device is not None and len(devices) > 1:
            title += f", {short_name(line.device, 24)}"
        # a NaN before each phase: nothing was read between two of them, so no line leads from one to the next
        seconds = np.insert(np.array(line.seconds), line.starts, np.nan)
        values = np.insert(np.array(line.values) / factor, line.starts, np.nan)
        (drawn,) = axes.plot(seconds, values, _DASHES[place % len(_DASHES)])
        alone = np.flatnonzero(np.convolve(~np.isnan(values), [1, 1, 1], "same") == 1)
        drawn.set(color=_COLOURS[line.size], linewidth=1.4, label=title, marker="o", markersize=3)
        drawn.set_markevery([int(place) for place in alone if not np.isnan(values[place])])
    for mark in stretch.epochs[:: -(-len(stretch.epochs) // _MOST_MARKS) or 1]:
        axes.axvline(mark.seconds, color="#98a2b0", linewidth=0.8, linestyle=":")
    where = "device" if lines == panels_of(stretch)[0] else "host"
    _title(axes, f"{short_name(name)}: {where} memory over time (dotted: epochs begin)")
    axes.set_xlabel("seconds")
    axes.set_ylabel(unit)
    axes.set_ylim(0, 1.06 * max(1e-9, *(max(line.values) / factor for line in lines)))
    _frame(axes)


def _draw_categories(axes: Any, compositions: list[Composition]) -> None:
    unit, factor = unit_for(max(sum(part for _, part in each.categories) for each in compositions))
    names = list(dict.fromkeys(name for each in compositions for name, part in each.categories if part))[:16]
    left = [0.0] * len(compositions)
    for place, name in enumerate(names):
        parts = [dict(each.categories).get(name, 0) / factor for each in compositions]
        bars = axes.barh(range(len(compositions)), parts, left=left, height=0.6, color=_PARTS[place % len(_PARTS)])
        bars.set_label("\u200b" + short_name(name, 30))  # matplotlib leaves out labels that begin with "_"
        left = [before + part for before, part in zip(left, parts, strict=True)]
    _rows(axes, [each.source for each in compositions], unit, "The peak by category")
    _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_layers(axes: Any, composition: Composition) -> None:
    top = composition.largest_layers[:_MOST_LAYERS]
    unit, factor = unit_for(top[0].bytes or 0)
    axes.barh(range(len(top)), [(layer.bytes or 0) / factor for layer in top], height=0.65, color=_PARTS[0])
    kind = "at the peak" if composition.is_at_peak else "share of the total"
    _rows(axes, [layer.name for layer in top], unit, f"{short_name(composition.source)}: layers, {kind}")


def _rows(axes: Any, names: list[str], unit: str, title: str) -> None:
    axes.set_yticks(range(len(names)), [short_name(name, 34) for name in names])
    for label in axes.get_yticklabels():
        _plain(label)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(unit)
    _title(axes, title)
    _frame(axes)
