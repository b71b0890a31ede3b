"""An Advice as text: what it needs now, the remedies by rank, what fits, the script, and what is not offered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kerasmem.recovery.advice import Advice, Remedy
from kerasmem.rendering.escape import printable
from kerasmem.rendering.peak_text import VERDICT_STYLES, settings_line, verdict_line
from kerasmem.units import format_size

_WIDTH_FOR_RESULT = 100
_WIDTH_FOR_THEN = 64


def render_advice(advice: Advice) -> str:
    """Return the advice as plain text."""
    buffer = StringIO()
    console = Console(file=buffer, width=400, color_system=None, emoji=False, markup=False, highlight=False)
    console.print(_contents(advice, terminal=None))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def print_advice(advice: Advice, console: Console) -> None:
    """Print the advice on a terminal."""
    console.print(_contents(advice, terminal=console.width))


def labelled(advice: Advice) -> dict[str, Remedy]:
    """Return remedies and plans by the labels that the text gives them: 1, 2, … and A, B, …."""
    numbers = {str(place): each for place, each in enumerate(advice.remedies, 1)}
    return {**numbers, **{chr(ord("A") + place): each for place, each in enumerate(advice.plans)}}


def _contents(advice: Advice, *, terminal: int | None) -> RenderableType:
    title = Text(printable(advice.model.name, 60), style="bold")
    if advice.model.source != advice.model.name:
        title.append(f"  {printable(advice.model.source, 120)}", style="dim")
    title.append(f"\n{settings_line(advice.settings)} · method: {printable(advice.settings.method, 30)}")
    parts: list[RenderableType] = [title, "", _now(advice), ""]
    if advice.remedies:
        parts += [Text("Remedies, by bytes saved for each unit of arithmetic", style="bold"),
                  _table(advice, terminal), *_costs(advice), ""]  # fmt: skip
    else:
        parts += [Text("No remedy was found that saves memory."), ""]
    parts += _plans(advice)
    if advice.considered:
        parts.append(Text("Not offered", style="bold"))
        parts += [Text(f"  {printable(each.name, 120)}: {printable(each.why, 300)}") for each in advice.considered]
    parts += [Text(f"Note: {printable(note, 400)}.") for note in advice.notes]
    return Group(*parts)


def _now(advice: Advice) -> Text:
    need = advice.need
    ends = "" if need.low is None or need.high is None else f" ({format_size(need.low)} to {format_size(need.high)})"
    line = Text(f"Now: {format_size(need.total)}{ends}\n")
    return line.append_text(verdict_line(advice.device, need))


def _table(advice: Advice, terminal: int | None) -> Table:
    rich_look = terminal is not None
    with_result = terminal is None or terminal >= _WIDTH_FOR_RESULT
    with_then = terminal is None or terminal >= _WIDTH_FOR_THEN
    table = Table(
        box=box.SIMPLE_HEAD if rich_look else None,
        header_style="bold",
        padding=(0, 1) if rich_look else (0, 2, 0, 0),
        pad_edge=rich_look,
    )
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("Remedy", overflow="fold")
    table.add_column("Saves", justify="right", no_wrap=with_then)
    if with_then:
        table.add_column("Then", justify="right", no_wrap=True)
    table.add_column("Verdict", no_wrap=with_then, overflow="fold")
    if with_result:
        table.add_column("Result", overflow="fold")
    for label, each in labelled(advice).items():
        if not label.isdigit():
            continue
        saves = f"{format_size(each.saving)} ({each.saving_percent:.0f} %)"
        row: list[RenderableType] = [label, Text(printable(each.name, 120)), saves]
        row += [format_size(each.total)] if with_then else []
        row += [Text(each.verdict, style=VERDICT_STYLES.get(each.verdict, ""))]
        row += [Text(printable(each.result, 60))] if with_result else []
        table.add_row(*row)
    return table


def _costs(advice: Advice) -> Iterator[Text]:
    yield Text("What they cost", style="bold")
    for label, each in labelled(advice).items():
        if label.isdigit():
            yield Text(f"  {label}  {printable(each.cost, 300)}")


def _plans(advice: Advice) -> list[RenderableType]:
    chosen = labelled(advice)
    if advice.plans:
        fitting = [each for each in advice.plans if each.verdict == "fits"]
        heading = "What fits, the least harmful first" if fitting else "What comes nearest"
        lines: list[RenderableType] = [Text(heading, style="bold")]
        lines += [_plan(label, each) for label, each in chosen.items() if not label.isdigit()]
        return [*lines, "", *_code("A", advice.plans[0]), ""]
    if advice.device.verdict == "fits" and advice.remedies:
        return [*_code("1", advice.remedies[0]), ""]
    return []


def _plan(label: str, each: Remedy) -> Text:
    ends = "" if each.low is None or each.high is None else f" ({format_size(each.low)} to {format_size(each.high)})"
    line = Text(f"  {label}  {printable(each.name, 300)}: {format_size(each.total)}{ends}, ")
    line.append(each.verdict, style=VERDICT_STYLES.get(each.verdict, ""))
    return line.append(f"; {printable(each.result, 60)}")


def _code(label: str, each: Remedy) -> Sequence[RenderableType]:
    text = "\n".join(printable(line) for line in each.code.splitlines())
    return [Text(f"Code of {label} (of another: --code LABEL)", style="bold"), "", Padding(Text(text), (0, 0, 0, 2))]
