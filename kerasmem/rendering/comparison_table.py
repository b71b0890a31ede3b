"""A Comparison as text and as Markdown: the total, categories and layers side by side, and the verdicts on limits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasmem.estimation.comparing import Comparison, Difference, LimitVerdict
from kerasmem.estimation.report import MemoryReport
from kerasmem.rendering.escape import printable
from kerasmem.rendering.layout import (
    category_name,
    change_text,
    figures,
    note_lines,
    signed_share,
    signed_size,
    table,
    verdict_text,
    words,
)
from kerasmem.rendering.peak_text import claim, how, settings_line, verdict_line
from kerasmem.units import format_size

_MOST_IN_A_COMMENT = 25  # layers
_MARKS = {  # of a comment, the worst verdict first
    "exceeds the limit": "❌ ", "does not fit": "❌ ", "too close to call": "⚠️ ",
    "within the limit": "✅ ", "fits": "✅ ",
}  # fmt: skip
_TOTAL = "total in use at the peak"


def comparison_table(comparison: Comparison, terminal: int | None = None, *, top: int | None = None) -> RenderableType:
    """Return what differs between two estimates.

    Args:
        comparison: of two estimates.
        terminal: columns of one, None for plain text.
        top: how many layers to list; None lists all that differ.
    """
    changed = [each for each in comparison.layers if each.change or each.is_in != "both"]
    shown = changed[:top] if top else changed
    sides = (("A", comparison.before), ("B", comparison.after))
    parts: list[RenderableType] = [_heading(*side) for side in sides]
    parts += ["", _differences("Category", comparison.categories, (), terminal), ""]
    if changed:
        parts.append(_differences("Layer (class)", shown, changed[len(shown) :], terminal))
    if any(each.change is not None for each in comparison.layers):
        same = len(comparison.layers) - len(changed)
        layers = "layer takes" if same == 1 else "layers take"
        parts.append(Text(f"{same} {layers} the same in both." if changed else "No layer differs.", style="dim"))
    parts += note_lines(comparison.notes)
    for name, report in sides:
        if spread := claim(report):
            parts.append(Text(f"{name}: {format_size(report.bytes.total)}, {spread}."))
    if comparison.limits or comparison.after.device is not None:
        parts.append("")
    parts += [_limit(each) for each in comparison.limits]
    after = comparison.after
    if after.device is not None:
        parts.append(
            Text("B on ").append_text(verdict_line(after.device, after.bytes, stands_in=after.settings.stands_in))
        )
    return Group(*parts)


def _heading(letter: str, report: MemoryReport) -> Text:
    settings = report.settings
    line = Text(f"{letter}: ").append(printable(report.model.name, 60), style="bold")
    if report.model.source != report.model.name:
        line.append(f"  {printable(report.model.source, 120)}", style="dim")
    return line.append(f"\n   {settings_line(settings)} · method: {printable(settings.method, 30)} ({how(report)})")


def _differences(first: str, shown: Iterable[Difference], rest: Sequence[Difference], terminal: int | None) -> Table:
    rows = table(terminal, words(first), *map(figures, ("A", "B", "Change")))
    for row in shown:
        name = _category(row).capitalize()
        if row.class_name:
            name = f"{printable(row.name, 100)} ({printable(row.class_name, 40)})"
        change = change_text(row.change, signed_size(row.change) + _percent(row))
        is_total = row.name == "total" and not row.class_name
        rows.add(name, *_sides(row), change, style="bold" if is_total else None)
    if rest:
        old, new = sum(row.before or 0 for row in rest), sum(row.after or 0 for row in rest)
        rows.add(f"{len(rest)} more layers", old, new, signed_size(new - old))
    return rows


def _category(row: Difference) -> str:
    return _TOTAL if row.name == "total" else category_name(row.name)


def _sides(row: Difference) -> tuple[str, str]:
    """Return the sizes before and after; a dash on the side that has no such layer."""
    before = "–" if row.is_in == "second" else format_size(row.before)
    return before, "–" if row.is_in == "first" else format_size(row.after)


def _percent(row: Difference) -> str:
    return "" if row.class_name else signed_share(row.change, row.before)


def _limit(limit: LimitVerdict) -> Text:
    written = format_size if limit.what == "budget" else signed_size
    high = "no upper end known" if limit.high is None else written(limit.high)
    low = written(limit.low)
    needs = low if low == high else f"{low} to {high}"
    subject = "B needs" if limit.what == "budget" else "B against A"
    line = Text(f"{subject} {needs}, the limit is {format_size(limit.limit_bytes)}: ")
    return line.append_text(verdict_text(limit.verdict, "bold"))


def comparison_markdown(comparison: Comparison, top: int | None = None) -> str:
    """Return what differs between two estimates as a comment on a change: the answer, and tables folded below it.

    Args:
        comparison: of two estimates.
        top: how many layers to list; None lists 25.
    """
    before, after = comparison.before, comparison.after
    total = comparison.categories[-1]
    judged = [*(each.verdict for each in comparison.limits), *([after.device.verdict] if after.device else [])]
    mark = next((mark for verdict, mark in _MARKS.items() if verdict in judged), "")
    verdicts = [_limit(each).plain for each in comparison.limits]
    if after.device is not None:
        verdicts.append("B on " + verdict_line(after.device, after.bytes, stands_in=after.settings.stands_in).plain)
    lines = [
        f"### {mark}Memory of {_code(after.model.name)}: {format_size(total.after)}, {_change(total)}",
        "",
        *(f"- {_plain(verdict)}" for verdict in verdicts),
        "",
        f"A: {_code(before.model.source or before.model.name)}, B: {_code(after.model.source or after.model.name)}; "
        f"{_plain(settings_line(after.settings))} · method {_plain(after.settings.method)}",
        "",
        *_markdown_rows("At the peak", comparison.categories),
    ]
    changed = [each for each in comparison.layers if each.change or each.is_in != "both"]
    shown = changed[: top or _MOST_IN_A_COMMENT]
    if shown:
        rest = f", the first {len(shown)} of {len(changed)}" if len(changed) > len(shown) else ""
        title = f"<details><summary>Layers that differ{rest}</summary>"
        lines += ["", title, "", *_markdown_rows("Layer", shown), "", "</details>"]
    for note in comparison.notes:
        lines += ["", f"Note: {_plain(note)}."]
    return "\n".join(lines) + "\n"


def _markdown_rows(first: str, rows: Iterable[Difference]) -> list[str]:
    lines = [f"| {first} | A | B | Change |", "|---|---:|---:|---:|"]
    for row in rows:
        name = f"{_code(row.name)} {_code(row.class_name)}" if row.class_name else _category(row)
        lines.append(f"| {' | '.join([name, *_sides(row), _change(row)])} |")
    return lines


def _change(row: Difference) -> str:
    return signed_size(row.change) + _percent(row)


def _code(name: str) -> str:
    """Return a name from a file as code: nothing in it is a link, a mention or an end of the cell."""
    return "`" + printable(name, 100).replace("`", "'").replace("|", "\\|") + "`"


def _plain(text: str) -> str:
    """Return text in which nothing is markup, and "@" calls nobody."""
    return re.sub(r"([\\`*_{}\[\]<>()#!|~])", r"\\\1", printable(text, 300)).replace("@", "@\u200b")
