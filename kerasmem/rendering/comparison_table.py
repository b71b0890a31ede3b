"""A Comparison as text: the total, categories and layers side by side, and the verdicts on limits."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasmem.estimation.comparing import Comparison, Difference, LimitVerdict
from kerasmem.estimation.report import MemoryReport
from kerasmem.rendering.escape import printable
from kerasmem.rendering.peak_text import VERDICT_STYLES, claim, how, settings_line, verdict_line
from kerasmem.units import format_size

_WIDTH_FOR_PERCENT = 72
_WORDS = {"allocator": "allocator waste", "total": "total in use at the peak"}


def render_comparison(comparison: Comparison, *, top: int | None = None) -> str:
    """Return the comparison as plain text.

    Args:
        comparison: of two estimates.
        top: how many layers to list; None lists all that differ.
    """
    buffer = StringIO()
    console = Console(file=buffer, width=400, color_system=None, emoji=False, markup=False, highlight=False)
    console.print(_contents(comparison, top, terminal=None))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def print_comparison(comparison: Comparison, console: Console, *, top: int | None = None) -> None:
    """Print the comparison on a terminal."""
    console.print(_contents(comparison, top, terminal=console.width))


def signed_size(count: int | None) -> str:
    """Return a change in bytes with its sign: "+1.50 MiB", "−3.00 KiB", "0 B"; None gives "?"."""
    if not count:
        return format_size(count)
    return ("+" if count > 0 else "−") + format_size(abs(count))


def _contents(comparison: Comparison, top: int | None, *, terminal: int | None) -> RenderableType:
    changed = [each for each in comparison.layers if each.change or each.is_in != "both"]
    shown = changed[:top] if top else changed
    parts: list[RenderableType] = [_heading("A", comparison.before), _heading("B", comparison.after), ""]
    parts.append(_table("", comparison.categories, [], terminal))
    parts.append("")
    if changed:
        parts.append(_table("Layer (class)", shown, changed[len(shown) :], terminal))
    same = len(comparison.layers) - len(changed)
    if any(each.change is not None for each in comparison.layers):
        parts.append(
            Text(
                f"{same} {'layer takes' if same == 1 else 'layers take'} the same in both."
                if changed
                else "No layer differs.",
                style="dim",
            )
        )
    parts += [Text(f"Note: {printable(note)}.") for note in comparison.notes]
    for name, report in (("A", comparison.before), ("B", comparison.after)):
        if spread := claim(report):
            parts.append(Text(f"{name}: {format_size(report.bytes.total)}, {spread}."))
    if comparison.limits or comparison.after.device is not None:
        parts.append("")
    parts += [_limit(each) for each in comparison.limits]
    if comparison.after.device is not None:
        parts.append(Text("B on ").append_text(verdict_line(comparison.after.device, comparison.after.bytes)))
    return Group(*parts)


def _heading(letter: str, report: MemoryReport) -> Text:
    settings = report.settings
    line = Text(f"{letter}: ").append(printable(report.model.name, 60), style="bold")
    if report.model.source != report.model.name:
        line.append(f"  {printable(report.model.source, 120)}", style="dim")
    return line.append(f"\n   {settings_line(settings)} · method: {printable(settings.method, 30)} ({how(report)})")


def _table(first: str, rows: Iterable[Difference], rest: list[Difference], terminal: int | None) -> Table:
    rich_look = terminal is not None
    with_percent = terminal is None or terminal >= _WIDTH_FOR_PERCENT
    table = Table(
        box=box.SIMPLE_HEAD if rich_look else None,
        header_style="bold",
        padding=(0, 1) if rich_look else (0, 2, 0, 0),
        pad_edge=rich_look,
    )
    table.add_column(first or "Category", overflow="fold")
    for name in ("A", "B", "Change"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        change = row.change
        if row.class_name:
            name = f"{printable(row.name, 100)} ({printable(row.class_name, 40)})"
        else:
            name = _WORDS.get(row.name, printable(row.name)).capitalize()
        before = "–" if row.is_in == "second" else format_size(row.before)
        after = "–" if row.is_in == "first" else format_size(row.after)
        style = "" if not change else "red" if change > 0 else "green"
        words = signed_size(change) + (_percent(row) if with_percent else "")
        table.add_row(Text(name), before, after, Text(words, style=style),
                      style="bold" if row.name == "total" and not row.class_name else None)  # fmt: skip
    if rest:
        old, new = sum(row.before or 0 for row in rest), sum(row.after or 0 for row in rest)
        table.add_row(f"{len(rest)} more layers", format_size(old), format_size(new), signed_size(new - old))
    return table


def _percent(row: Difference) -> str:
    if row.class_name or not row.change or not row.before:
        return ""
    share = row.change / row.before
    return f" ({'+' if share > 0 else '−'}{abs(share):.1%})".replace("%", " %")


def _limit(limit: LimitVerdict) -> Text:
    high = (
        "no upper end known"
        if limit.high is None
        else (format_size(limit.high) if limit.what == "budget" else signed_size(limit.high))
    )
    low = format_size(limit.low) if limit.what == "budget" else signed_size(limit.low)
    needs = low if low == high else f"{low} to {high}"
    subject = "B needs" if limit.what == "budget" else "B against A"
    line = Text(f"{subject} {needs}, the limit is {format_size(limit.limit_bytes)}: ")
    return line.append(limit.verdict, style=VERDICT_STYLES.get(limit.verdict, "bold"))
