"""Results as one picture, PNG or SVG: the page's charts, drawn by matplotlib."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.rendering.contents import PageContents
from kerasmem.rendering.escape import short_name
from kerasmem.rendering.page.charts import by_category, by_layer, over_time

_COLOURS = {
    "peak": "#c8501e", "in_use": "#2364aa", "reserved": "#8e6bbf", "driver": "#7a828e", "host": "#1d8a6b",
    "swap": "#b8336a",
}  # fmt: skip
_PARTS = ("#2364aa", "#e08a1e", "#1d8a6b", "#b8336a", "#6f5bb5", "#5aa6d6", "#8a9099", "#a8742a")
_DASHES = ("-", "--", ":", "-.")
_MOST_STRETCHES = 6
_MOST_REPORTS, _MOST_DIVIDED = 12, 4  # by category, and by layer
_MOST_LAYERS = 15


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
    drawings = list(_drawings(contents))
    if not drawings:
        raise UsageError("--plot: there is nothing to draw: no readings and no categories in the files given")
    heights = [height for height, _ in drawings]
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "kerasmem", "font.size": 9}):
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        figure = Figure(figsize=(10, sum(heights)), layout="constrained")
        rows = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for axes, (_, draw) in zip(rows, drawings, strict=True):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="both", color="#e6e9ee", linewidth=0.8)
            axes.set_axisbelow(True)
            draw(axes)
        _legend_of_lines(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=format, dpi=144, metadata={"Date": None} if format == "svg" else None)
    return buffer.getvalue()


def _drawings(contents: PageContents) -> Iterator[tuple[float, Callable[[Any], None]]]:
    """Yield for each part its height in inches, and what draws it."""
    curves = [(log.name, stretch) for log in contents.logs for stretch in log.curves if stretch.lines]
    for name, stretch in curves[:_MOST_STRETCHES]:
        data = over_time("", "", stretch).data
        for panel in data["panels"]:
            yield 2.7, partial(_draw_panel, name=name, data=data, panel=panel)
    divided = [each for each in contents.compositions if any(part for _, part in each.categories)][:_MOST_REPORTS]
    if divided:
        chart = by_category("", divided)
        yield 1.6 + 0.4 * len(divided), partial(_draw_bars, title=chart.caption, data=chart.data)
    for each in [each for each in contents.compositions if each.largest_layers][:_MOST_DIVIDED]:
        chart = by_layer("", each, _MOST_LAYERS)
        title = f"{short_name(each.source)}: {chart.caption}"
        yield 1.1 + 0.24 * len(chart.data["rows"]), partial(_draw_bars, title=title, data=chart.data)


def _plain(text: Any) -> None:
    """Have a text drawn as it is: a name with two dollars is no formula."""
    text.set_parse_math(False)


def _legend(axes: Any, *entries: Any, **where: Any) -> None:
    for text in axes.legend(*entries, frameon=False, fontsize=8, **where).get_texts():
        _plain(text)


def _legend_of_lines(figure: Any) -> None:
    """Name each kind of line and shade once, above all panels."""
    drawn = [axes.get_legend_handles_labels() for axes in figure.axes if axes.get_legend() is None]
    named = {label: handle for handles, labels in drawn for handle, label in zip(handles, labels, strict=True)}
    if named:
        _legend(figure, named.values(), named.keys(), loc="outside upper left", ncols=4)


def _draw_panel(axes: Any, name: str, data: dict[str, Any], panel: dict[str, Any]) -> None:
    for start, end, phase in data["phases"]:
        axes.axvspan(start, end, color="#6f5bb5", alpha=0.13, linewidth=0, label=phase)
    for line in panel["lines"]:
        # a NaN before each phase: nothing was read between two of them, so no line leads from one to the next
        seconds, values = (np.insert(np.array(line[axis], float), line["starts"], np.nan) for axis in ("x", "y"))
        (drawn,) = axes.plot(seconds, values, _DASHES[line["dash"] % len(_DASHES)])
        alone = np.flatnonzero(np.convolve(~np.isnan(values), [1, 1, 1], "same") == 1)
        drawn.set(color=_COLOURS[line["role"]], linewidth=1.4, label=line["label"], marker="o", markersize=3)
        drawn.set_markevery([int(place) for place in alone if not np.isnan(values[place])])
    for seconds, _ in data["epochs"]:
        axes.axvline(seconds, color="#98a2b0", linewidth=0.8, linestyle=":")
    where = panel["title"].partition(",")[0]
    _plain(
        axes.set_title(f"{short_name(name)}: {where} memory over time (dotted: epochs begin)", loc="left", fontsize=10)
    )
    axes.set_xlabel("seconds")
    axes.set_ylabel(panel["unit"])
    axes.set_ylim(0, 1.06 * max(1e-9, *(max(line["y"]) for line in panel["lines"])))


def _draw_bars(axes: Any, title: str, data: dict[str, Any]) -> None:
    places = range(len(data["rows"]))
    left = np.zeros(len(places))
    for number, series in enumerate(data["series"]):
        sizes = np.array([0.0 if bar is None else bar["value"] for bar in series["bars"]])
        # matplotlib leaves out labels that begin with "_"
        label = "\u200b" + short_name(series["label"], 30) if data["stacked"] else None
        axes.barh(places, sizes, left=left, height=0.6, color=_PARTS[number % len(_PARTS)], label=label)
        left += sizes
    axes.set_yticks(places, [short_name(name, 34) for name in data["rows"]])
    for label in axes.get_yticklabels():
        _plain(label)
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.set_xlabel(data["unit"])
    _plain(axes.set_title(title, loc="left", fontsize=10))
    if data["stacked"]:
        _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))
