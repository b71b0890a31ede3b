"""A MemoryReport as a table: rich on a terminal, plain aligned text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasmem.estimation.report import LayerMemory, MemoryReport
from kerasmem.rendering.escape import printable
from kerasmem.rendering.peak_text import claim, formula_terms, peak, reference_line, settings_line, verdict_line
from kerasmem.units import format_count, format_size

SORTS = ("order", "size")
_WIDTH_FOR_BYTES = 134  # columns from which the exact bytes have room beside the rest
_WIDTH_FOR_BARS = 104
_WIDTH_FOR_SHAPES = 76
_WIDTH_FOR_SHARES = 62
_BAR = 10


@dataclass(frozen=True)
class _Line:
    """One line of the table, ready to print."""

    name: str
    shape: str
    parameters: int
    activations: int | None
    note: str
    bytes: int | None


def render_report(
    report: MemoryReport, *, sort: str = "order", top: int | None = None, width: int | None = None
) -> str:
    """Return the report as plain text: aligned columns, exact bytes, nothing cut.

    Args:
        report: an estimate.
        sort: "order" (as the model calls its layers) or "size" (largest first).
        top: how many layers to list; the others are added up in one line. None lists all.
        width: columns; None is as wide as the contents.
    """
    buffer = StringIO()
    console = Console(file=buffer, width=width or 400, color_system=None, emoji=False, markup=False, highlight=False)
    console.print(_contents(report, sort, top, terminal=None))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def print_report(report: MemoryReport, console: Console, *, sort: str = "order", top: int | None = None) -> None:
    """Print the report on a terminal, as wide as the terminal is."""
    console.print(_contents(report, sort, top, terminal=console.width))


def _contents(report: MemoryReport, sort: str, top: int | None, *, terminal: int | None) -> RenderableType:
    """Return the page; `terminal` is the columns of one, None for plain text."""
    parts: list[RenderableType] = [_heading(report), "", _table(report, sort, top, terminal), ""]
    if not _is_formula(report):
        parts += [*peak(report, terminal), ""]
    parts += [formula_terms(report, terminal is not None and terminal < _WIDTH_FOR_SHAPES), ""]
    parts += list(_remarks(report))
    return Group(*parts)


def _is_formula(report: MemoryReport) -> bool:
    return report.settings.method == "formula"


def _heading(report: MemoryReport) -> Text:
    model, settings = report.model, report.settings
    title = Text(printable(model.name, 60), style="bold")
    if model.source != model.name:
        title.append(f"  {printable(model.source, 120)}", style="dim")
    title.append(f"\n{settings_line(settings)} · method: {settings.method}")
    return title


def _table(report: MemoryReport, sort: str, top: int | None, terminal: int | None) -> Table:
    rich_look = terminal is not None
    width = terminal or sys.maxsize
    lines, total = _lines(report, sort, top), report.bytes.total
    largest = max((line.bytes or 0 for line in lines), default=0)
    is_divided = any(row.bytes is not None for row in report.layers)
    elements = report.formula.activation_elements_per_sample

    def share(line: _Line) -> str:
        return f"{line.bytes / total:.1%}".replace("%", " %") if line.bytes and total else "–"

    def bar(line: _Line) -> Text:
        length = min(_BAR, round(_BAR * (line.bytes or 0) / largest)) if largest else 0
        return Text("█" * length, style="cyan")

    # header, total, cell of a line, columns of a terminal from which there is room for it
    columns: list[tuple[str, str, Callable[[_Line], RenderableType], int]] = [
        ("Layer (class)", "Total", lambda line: Text(line.name), 0),
        ("Output shape", "", lambda line: Text(line.shape, style="dim" if rich_look else ""), _WIDTH_FOR_SHAPES),
        ("Parameters", format_count(report.model.parameters), lambda line: format_count(line.parameters), 0),
        ("Activations", format_count(elements), lambda line: line.note or format_count(line.activations), 0),
        ("Bytes", format_count(total), lambda line: format_count(line.bytes), _WIDTH_FOR_BYTES),
        ("Memory" if _is_formula(report) else "At peak", format_size(total), lambda line: format_size(line.bytes), 0),
        ("Share", "100 %", share, _WIDTH_FOR_SHARES),
        *([("", "", bar, _WIDTH_FOR_BARS)] if rich_look else []),
    ]
    columns = [column for column in columns if width >= column[3]]
    if not is_divided:  # the method does not divide the total by layer
        columns = [column for column in columns if column[0] not in ("Bytes", "At peak", "Share", "")]
    table = Table(
        box=box.SIMPLE_HEAD if rich_look else None,
        show_footer=True,
        header_style="bold",
        footer_style="bold",
        padding=(0, 1) if rich_look else (0, 2, 0, 0),
        pad_edge=rich_look,
        collapse_padding=True,
    )
    for number, (header, footer, _, _) in enumerate(columns):
        text = number == 0 or header == "Output shape"
        bars = header == ""
        table.add_column(
            header,
            footer,
            justify="left" if text or bars else "right",
            no_wrap=not (text and rich_look),
            overflow="fold",
            width=_BAR if bars else None,
        )
    for line in lines:
        cells = [cell(line) for _, _, cell, _ in columns]
        table.add_row(*cells, style="dim" if rich_look and not line.bytes else None)
    return table


def _lines(report: MemoryReport, sort: str, top: int | None) -> list[_Line]:
    rows = list(report.layers)
    if sort == "size" or (top and top < len(rows)):
        rows.sort(key=lambda row: -(row.bytes or 0))
    shown = rows[:top] if top else rows
    lines = [_line(row) for row in shown]
    rest = rows[len(shown) :]
    if rest:
        lines.append(
            _Line(
                f"{len(rest)} smaller layers",
                "",
                sum(row.parameters for row in rest),
                sum(row.activation_elements or 0 for row in rest),
                "",
                sum(row.bytes or 0 for row in rest),
            )
        )
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
    sizes = list(shape)
    return (
        "("
        + ", ".join("None" if size is None else str(size) for size in sizes)
        + ("," if len(sizes) == 1 else "")
        + ")"
    )


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
    for note in report.notes:
        yield Text(f"Note: {printable(note)}.")
    missing = [
        printable(each.what) + (f" ({format_size(each.bytes)})" if each.bytes is not None else "")
        for each in report.unmodelled
    ]
    if missing:
        yield Text("Not in the total: " + "; ".join(missing) + ".")
    if _is_formula(report) and (spread := claim(report)):
        yield Text(f"What the method claims: {spread}.")
    yield Text(f"Among known networks: {reference_line(report)}.")
    if report.device is not None:
        yield Text("")
        yield verdict_line(report.device, report.bytes)
