"""Shows a `Comparison` as text and as Markdown: total, categories, layers, and verdicts on limits."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasmem.estimation.comparing import Comparison, Difference, LimitVerdict
from kerasmem.estimation.report import MemoryReport
from kerasmem.rendering.formatting import figures, note_lines, signed_share, signed_size, table, verdict_text, words
from kerasmem.rendering.peak_text import category_name, model_line, settings_line, verdict_line
from kerasmem.units import format_size, printable

_TOTAL = "Total in use at the peak"
_MOST_IN_A_COMMENT = 25  # layers
_MARKS = {  # of a comment, the worst verdict first
    "exceeds the limit": "❌ ", "does not fit": "❌ ", "too close to call": "⚠️ ",
    "within the limit": "✅ ", "fits": "✅ ",
}  # fmt: skip


def comparison_table(comparison: Comparison, terminal: int | None = None, *, top: int | None = None) -> RenderableType:
    """Show the differences of two estimates.

    Args:
        comparison: the comparison.
        terminal: columns of a terminal, or None for plain text.
        top: number of layers to list. None lists all that differ.
    """
    differing, pair = _changed_layers(comparison), (("A", comparison.before), ("B", comparison.after))
    parts: list[RenderableType] = [
        *(Text(f"{name}: {_with_profile(model_line(report), report)}") for name, report in pair),
        "",
        _differences("Category", comparison.categories, terminal),
        "",
        _differences("Layer (class)", differing[: top or None], terminal) if differing else Text("No layer differs."),
    ]
    if top and top < len(differing):
        parts.append(Text(f"{len(differing) - top} more layers differ: --top 0 lists all", style="dim"))
    return Group(*parts, *note_lines(comparison.notes), *_verdicts(comparison))


def _with_profile(line: str, report: MemoryReport) -> str:
    profile = report.settings.profile
    return f"{line} · {printable(profile)}" if profile else line


def _changed_layers(comparison: Comparison) -> list[Difference]:
    return [layer for layer in comparison.layers if layer.change or layer.is_in != "both"]


def _differences(first: str, differences: Iterable[Difference], terminal: int | None) -> Table:
    rows = table(terminal, words(first), *map(figures, ("A", "B", "Change")))
    for row in differences:
        name, before, after, change = _cells(row)
        label = f"{printable(name, 100)} ({printable(row.class_name, 40)})" if row.class_name else name
        colour = "" if not row.change else "red" if row.change > 0 else "green"
        rows.add(label, before, after, Text(change, style=colour), style="bold" if name == _TOTAL else None)
    return rows


def _cells(row: Difference) -> tuple[str, str, str, str]:
    """Return the name, both sizes and the change, with a dash for a missing layer."""
    before = "–" if row.is_in == "second" else format_size(row.before)
    after = "–" if row.is_in == "first" else format_size(row.after)
    change = signed_size(row.change)
    if row.class_name:
        return row.name, before, after, change
    name = _TOTAL if row.name == "total" else category_name(row.name).capitalize()
    return name, before, after, change + signed_share(row.change, row.before)


def _verdicts(comparison: Comparison) -> list[Text]:
    verdicts = [_limit(limit) for limit in comparison.limits]
    if comparison.after.device is not None:
        verdicts.append(Text("B ").append_text(verdict_line(comparison.after.device, comparison.after.needs)))
    return verdicts


def _limit(limit: LimitVerdict) -> Text:
    written = format_size if limit.what == "budget" else signed_size
    high = "no upper end known" if limit.high is None else written(limit.high)
    low = written(limit.low)
    needs = low if low == high else f"{low} to {high}"
    subject = "B needs" if limit.what == "budget" else "B against A"
    line = Text(f"{subject} {needs}, the limit is {format_size(limit.limit_bytes)}: ")
    return line.append_text(verdict_text(limit.verdict, "bold"))


def comparison_markdown(comparison: Comparison, top: int | None = None) -> str:
    """Return the differences of two estimates as a comment on a pull request.

    Args:
        comparison: the comparison.
        top: number of layers to list. Defaults to 25.
    """
    before, after, differing = comparison.before, comparison.after, _changed_layers(comparison)
    *_, total, change = _cells(comparison.categories[-1])
    judged = [*(limit.verdict for limit in comparison.limits), after.device.verdict if after.device else ""]
    mark = next((mark for verdict, mark in _MARKS.items() if verdict in judged), "")
    lines = [
        f"### {mark}Memory of {_code(after.model.name)}: {total}, {change}",
        "",
        *(f"- {_plain(verdict.plain)}" for verdict in _verdicts(comparison)),
        "",
        f"A: {_code(before.model.source or before.model.name)}, B: {_code(after.model.source or after.model.name)}; "
        f"{_plain(_with_profile(settings_line(after.settings), after))}",
        "",
        *_markdown_rows("At the peak", comparison.categories),
    ]
    if differing:
        listed = differing[: top or _MOST_IN_A_COMMENT]
        title = f"<details><summary>Layers that differ: {len(listed)} of {len(differing)}</summary>"
        lines += ["", title, "", *_markdown_rows("Layer", listed), "", "</details>"]
    for note in comparison.notes:
        lines += ["", f"Note: {_plain(note)}."]
    return "\n".join(lines) + "\n"


def _markdown_rows(first: str, differences: Iterable[Difference]) -> list[str]:
    lines = [f"| {first} | A | B | Change |", "|---|---:|---:|---:|"]
    for row in differences:
        name, *sizes = _cells(row)
        label = f"{_code(name)} {_code(row.class_name)}" if row.class_name else name
        lines.append(f"| {' | '.join([label, *sizes])} |")
    return lines


def _code(name: str) -> str:
    """Format an untrusted name as code, without links, mentions or an end of the cell."""
    return "`" + printable(name, 100).replace("`", "'").replace("|", "\\|") + "`"


def _plain(text: str) -> str:
    """Escape Markdown and mentions."""
    return re.sub(r"([\\`*_{}\[\]<>()#!|~])", r"\\\1", printable(text, 300)).replace("@", "@\u200b")
