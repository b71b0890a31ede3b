"""An EstimateTable as text: a row a candidate, and why some have none."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from kerasmem.estimation.many import Candidate, EstimateTable
from kerasmem.rendering.escape import printable, short_name
from kerasmem.rendering.layout import figures, table, verdict_text, words

_REASON = 300  # characters


def many_table(
    found: EstimateTable, terminal: int | None = None, *, sort: str = "order", top: int | None = None
) -> RenderableType:
    """Return the answer, a row for each candidate, and the reasons of those that failed.

    Args:
        found: the candidates.
        terminal: columns of one, None for plain text.
        sort: "order", or "size" for the largest first.
        top: how many rows; None or 0 for all.
    """
    shown = list(found.candidates)
    if sort == "size":
        shown.sort(key=lambda each: -1 if each.report is None else each.report.peak, reverse=True)
    shown = shown[: top or None]
    names = list(dict.fromkeys(name for each in found.candidates for name in each.grid))
    varied = [Column(printable(name, 40), justify="right", overflow="fold") for name in names]
    sizes = map(figures, ("Parameters", "Needs", "At least", "At most"))
    rows = table(terminal, words("Model"), *varied, *sizes, "Method", "Verdict")
    for each in shown:
        rows.add(short_name(each.model, 60), *(_value(each.grid.get(name)) for name in names), *_cells(each))
    left = len(found.candidates) - len(shown)
    more = [Text(f"{left:,} more: --top 0 lists all", style="dim")] if left else []
    return Group(Text(str(found), style="bold"), "", rows, *more, *_reasons(found, names))


def _cells(candidate: Candidate) -> tuple[str | Text | int | None, ...]:
    row = candidate.row()
    parameters = "–" if row["parameters"] is None else f"{row['parameters']:,}"
    method, verdict = printable(row["method"] or "–", 30), verdict_text(candidate.verdict or "–")
    return (parameters, row["total"], row["low"], row["high"], method, verdict)


def _value(value: object) -> Text:
    return Text(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else printable(str(value), 40))


def _reasons(found: EstimateTable, names: list[str]) -> Iterator[Text]:
    """Yield a line for each reason, with those that it is the reason of."""
    told: dict[str, list[Candidate]] = {}
    for each in found.failed:
        told.setdefault(each.reason or "", []).append(each)
    for reason, failed in told.items():
        first = failed[0]
        settings = ", ".join(f"{name} {first.grid[name]}" for name in names)
        others = f" and {len(failed) - 1:,} more" if len(failed) > 1 else ""
        where = f"{short_name(first.model, 60)}{f' ({settings})' if settings else ''}{others}"
        yield Text(f"Failed: {printable(where, 200)}: {printable(reason, _REASON)}")
