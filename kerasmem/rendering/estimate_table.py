"""A MemoryReport as a table of all layers, and as the short answer; plain aligned text in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.estimation.report import Bytes, LayerMemory, MemoryReport
from kerasmem.rendering.escape import printable
from kerasmem.rendering.layout import category_name, figures, model_heading, note_lines, percent, table, verdict_heading
from kerasmem.rendering.peak_text import (
    asked_line,
    claim,
    formula_terms,
    missing_line,
    peak,
    reference_line,
    settings_line,
    verdict_line,
)
from kerasmem.units import format_count, format_size


@dataclass(frozen=True)
class _Line:
    """One line of the table, ready to print."""

    name: str
    shape: str
    parameters: int
    activations: int | None
    note: str
    bytes: int | None


def estimate_table(
    report: MemoryReport, terminal: int | None = None, *, sort: str = "order", top: int | None = None
) -> RenderableType:
    """Return the layers, the peak, the formula and the verdict; as plain text with exact bytes and nothing cut.

    Args:
        report: an estimate.
        terminal: columns of one, None for plain text.
        sort: "order" (as the model calls its layers) or "size" (largest first).
        top: how many layers to list; the others are added up in one line. None lists all.
    """
    heading = model_heading(report.model, f"{settings_line(report.settings)} · method: {report.settings.method}")
    parts: list[RenderableType] = [heading, "", layers_table(report, sort, top, terminal), ""]
    if not _is_formula(report):
        parts += [*peak(report), ""]
    return Group(*parts, formula_terms(report), "", *_remarks(report))


def _is_formula(report: MemoryReport) -> bool:
    return report.settings.method == "formula"


def layers_table(
    report: MemoryReport, sort: str, top: int | None, terminal: int | None, *, brief: bool = False
) -> Table:
    """Return a row for each layer, or for the `top` largest, and the total; with memory alone where it is brief."""
    total = report.bytes.total
    whole: dict[str, Any] = {"overflow": "fold", "no_wrap": terminal is None}
    divides = any(row.bytes is not None for row in report.layers)  # the method divides the total by layer
    activations = figures("Activations", format_count(report.formula.activation_elements_per_sample))
    exact = figures("Bytes", format_count(total)) if terminal is None and not brief else None
    size = figures("Memory" if _is_formula(report) else "At peak", format_size(total))
    rows = table(
        terminal,
        Column("Layer (class)", "Total", **whole),
        Column("Output shape", **whole),
        figures("Parameters", format_count(report.model.parameters)),
        None if brief and divides else activations,
        exact if divides else None,
        size if divides else None,
        figures("Share", "100 %") if divides else None,
        show_footer=True,
        footer_style="bold",
        collapse_padding=True,
    )
    for line in _lines(report, sort, top):
        rows.add(
            line.name,
            Text(line.shape, style="" if terminal is None else "dim"),
            format_count(line.parameters),
            line.note or format_count(line.activations),
            format_count(line.bytes),
            format_size(line.bytes),
            percent(line.bytes, total) if line.bytes else "–",
            style="dim" if terminal is not None and not line.bytes else None,
        )
    return rows


def _lines(report: MemoryReport, sort: str, top: int | None) -> list[_Line]:
    rows = list(report.layers)
    if sort == "size" or (top and top < len(rows)):
        rows.sort(key=lambda row: -(row.bytes or 0))
    shown = rows[:top] if top else rows
    lines = [_line(row) for row in shown]
    rest = rows[len(shown) :]
    if rest:
        counts = (sum(row.parameters for row in rest), sum(row.activation_elements or 0 for row in rest))
        lines.append(_Line(f"{len(rest)} smaller layers", "", *counts, "", sum(row.bytes or 0 for row in rest)))
    unattributed = report.bytes.total - sum(row.bytes or 0 for row in rows)
    if unattributed and not _is_formula(report) and any(row.bytes is not None for row in rows):
        lines.append(_Line("no single layer", "", 0, 0, "", unattributed))
    return lines


def _line(row: LayerMemory) -> _Line:
    name = f"{printable(row.name, 80)} ({printable(row.class_name, 40)})"
    if row.uses != 1:
        name += " – not called" if row.uses == 0 else f" × {row.uses}"
    shape = "?" if row.output_shape is None else format_shape(row.output_shape)
    return _Line(name, shape, row.parameters, row.activation_elements, "view" if row.kind == "view" else "", row.bytes)


def format_shape(shape: Iterable[int | None]) -> str:
    """Return a shape as Keras prints it: "(None, 28, 28, 1)"."""
    return str(tuple(shape))


def _remarks(report: MemoryReport) -> Iterable[Text]:
    twice = "each value has a gradient (× 2), each" if report.formula.copies == 2 else "each value"
    yield Text(
        f"In the formula, activations are output elements for one sample; {twice} takes 4 bytes (× 4).", style="dim"
    )
    if any(row.kind == "view" for row in report.layers):
        yield Text(
            "A view adds nothing: Flatten and Reshape give a buffer another shape, Dropout and noise are the identity "
            "outside training.",
            style="dim",
        )
    yield from note_lines(report.notes)
    if missing := missing_line(report):
        yield Text(missing)
    if _is_formula(report) and (spread := claim(report)):
        yield Text(f"What the method claims: {spread}.")
    yield Text(f"Among known networks: {reference_line(report)}.")
    if report.device is not None:
        yield Text("")
        yield verdict_line(report.device, report.bytes, stands_in=report.settings.stands_in)


_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "white")
_BAR = 60
_LAYERS = 8
_LEAST_SHARE = 0.005  # what is less is not named


def answer(
    report: MemoryReport,
    terminal: int | None = None,
    *,
    cards: Sequence[str] = (),
    sort: str = "size",
    top: int | None = None,
) -> RenderableType:
    """Return the answer first, then what it is made of, in at most 24 lines.

    Args:
        report: an estimate or a measurement.
        terminal: columns of one, None for plain text.
        cards: the known cards on which it fits, the smallest first; said where the report names no device.
        sort: "size" (the largest layers first) or "order" (as the model calls them).
        top: how many layers to list; 0 for all.
    """
    layers = layers_table(report, sort, _LAYERS if top is None else top, terminal, brief=True)
    apart: list[RenderableType] = [""] if terminal is None else []  # on a terminal a table has room around it
    head: list[RenderableType] = [_first_line(report, cards), Text(asked_line(report), style="dim"), ""]
    return Group(*head, *_made_of(report, terminal), *apart, layers, *apart, *_last_lines(report))


def _first_line(report: MemoryReport, cards: Sequence[str]) -> Text:
    device = report.device
    if device is None:
        where = f"fits {len(cards)} of the known cards, from {cards[0]} up" if cards else "fits no known card"
        return Text(f"{report.needs}{_in_place(report)}: {where}{report.if_free}", style="bold")
    line = verdict_heading(device.verdict, device.name)
    needs = f": {report.needs}, of {format_size(device.available_bytes)}{report.if_free}{_in_place(report)}"
    return line.append(needs, style="not bold default")


def _in_place(report: MemoryReport) -> str:
    """Return in brackets whose figure it is, if it takes the place of a better one."""
    if report.fallback is not None:
        return f" (by the formula alone, as {printable(report.fallback, 300)})"
    return " (a CPU's plan; --method gpu-target plans for the card)" if report.settings.stands_in else ""


def _made_of(report: MemoryReport, terminal: int | None) -> Iterator[Text]:
    """Yield a bar, on a terminal, and the shares of the peak, the largest first."""
    need, method = report.bytes, report.settings.method
    known = {category_name(name, method): size for name in Bytes.CATEGORIES if (size := getattr(need, name))}
    if rest := need.total - sum(known.values()):
        known["not divided further"] = rest
    shares = sorted(known.items(), key=lambda pair: -pair[1])
    bar, names = Text(), Text()
    for number, (name, size) in enumerate(shares):
        share = size / need.total if need.total else 0
        if share < _LEAST_SHARE:
            continue
        colour = _COLOURS[number % len(_COLOURS)]
        bar.append("█" * round(_BAR * share), style=colour)
        names.append(" · " if names.plain else "")
        names.append("■ " if terminal is not None else "", style=colour)
        names.append(f"{name} {format_size(size)}")
    if terminal is not None:
        yield bar
    yield names


def _last_lines(report: MemoryReport) -> Iterator[Text]:
    if missing := missing_line(report):
        yield Text(missing)
    notes = f", {len(report.notes)} notes" if report.notes else ""
    yield Text(f"-v shows the interval, bytes by category, the formula{notes}", style="dim")
