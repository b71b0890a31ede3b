"""An Advice as text: what it needs now, the remedies by rank, what fits, the script, and what is not offered."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from kerasmem.recovery.advice import Advice, Remedy
from kerasmem.rendering.escape import printable, printable_lines
from kerasmem.rendering.layout import (
    figures,
    has_room,
    interval,
    model_heading,
    note_lines,
    table,
    verdict_text,
    words,
)
from kerasmem.rendering.peak_text import settings_line, verdict_line
from kerasmem.units import format_size

_WIDTH_FOR_RESULT = 100
_WIDTH_FOR_THEN = 64


def advice_table(advice: Advice, terminal: int | None = None) -> RenderableType:
    """Return the need, remedies with their costs, plans, a script, and what is not offered."""
    settings = f"{settings_line(advice.settings)} · method: {printable(advice.settings.method, 30)}"
    need = advice.need
    now = Text(f"Now: {format_size(need.total)}{interval(advice.settings.method, need.total, need.low, need.high)}\n")
    now.append_text(verdict_line(advice.device, need, advice.settings.method))
    parts: list[RenderableType] = [model_heading(advice.model, settings), "", now, ""]
    if advice.remedies:
        heading = Text("Remedies, by bytes saved for each unit of arithmetic", style="bold")
        parts += [heading, _remedies(advice, terminal), Text("What they cost", style="bold")]
        parts += [Text(f"  {n}  {printable(each.cost, 300)}") for n, each in enumerate(advice.remedies, 1)]
    else:
        parts.append(Text("No remedy was found that saves memory."))
    parts += ["", *_plans(advice)]
    if advice.considered:
        parts.append(Text("Not offered", style="bold"))
        parts += [Text(f"  {printable(each.name, 120)}: {printable(each.why, 300)}") for each in advice.considered]
    return Group(*parts, *note_lines(advice.notes, 400))


def labelled(advice: Advice) -> dict[str, Remedy]:
    """Return remedies and plans by the labels that the text gives them: 1, 2, … and A, B, …."""
    numbers = {str(place): each for place, each in enumerate(advice.remedies, 1)}
    return {**numbers, **{chr(ord("A") + place): each for place, each in enumerate(advice.plans)}}


def _remedies(advice: Advice, terminal: int | None) -> Table:
    with_then = has_room(terminal, _WIDTH_FOR_THEN)
    shown = (True, True, True, with_then, True, has_room(terminal, _WIDTH_FOR_RESULT))
    saves = Column("Saves", justify="right", no_wrap=with_then)
    verdict = Column("Verdict", no_wrap=with_then, overflow="fold")
    columns = (figures(""), words("Remedy"), saves, figures("Then"), verdict, words("Result"))
    rows = table(terminal, *compress(columns, shown))
    for number, each in enumerate(advice.remedies, 1):
        cells: tuple[str | Text, ...] = (
            str(number),
            Text(printable(each.name, 120)),
            f"{format_size(each.saving)} ({each.saving_percent:.0f} %)",
            format_size(each.total),
            verdict_text(each.verdict),
            Text(printable(each.result, 60)),
        )
        rows.add_row(*compress(cells, shown))
    return rows


def _plans(advice: Advice) -> Iterator[RenderableType]:
    if advice.plans:
        fits = any(each.verdict == "fits" for each in advice.plans)
        yield Text("What fits, the least harmful first" if fits else "What comes nearest", style="bold")
        for label, each in labelled(advice).items():
            if not label.isdigit():
                needs = f"{format_size(each.total)}{interval(each.method, each.total, each.low, each.high)}"
                line = Text(f"  {label}  {printable(each.name, 300)}: {needs}, ").append_text(
                    verdict_text(each.verdict)
                )
                yield line.append(f"; {printable(each.result, 60)}")
        yield ""
        yield from _code("A", advice.plans[0])
    elif advice.device.verdict == "fits" and advice.remedies:
        yield from _code("1", advice.remedies[0])


def _code(label: str, each: Remedy) -> Iterator[RenderableType]:
    yield Text(f"Code of {label} (of another: --code LABEL)", style="bold")
    yield from ("", Padding(Text(printable_lines(each.code)), (0, 0, 0, 2)), "")
