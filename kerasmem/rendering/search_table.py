"""A SearchResult as text: the answer, what lies around it, and every size that was asked."""

from __future__ import annotations

from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasmem.estimation.search import SearchResult
from kerasmem.rendering.escape import printable
from kerasmem.rendering.peak_text import VERDICT_STYLES, how, settings_line
from kerasmem.units import format_size

_WIDTH_FOR_ENDS = 72
_WORDS = {"batch_size": "batch size"}


def render_search(result: SearchResult) -> str:
    """Return the result as plain text."""
    buffer = StringIO()
    console = Console(file=buffer, width=400, color_system=None, emoji=False, markup=False, highlight=False)
    console.print(_contents(result, terminal=None))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def print_search(result: SearchResult, console: Console) -> None:
    """Print the result on a terminal."""
    console.print(_contents(result, terminal=console.width))


def _contents(result: SearchResult, *, terminal: int | None) -> RenderableType:
    report, settings = result.report, result.report.settings
    title = Text(printable(report.model.name, 60), style="bold")
    if report.model.source != report.model.name:
        title.append(f"  {printable(report.model.source, 120)}", style="dim")
    title.append(
        f"\n{settings_line(settings, with_batch=result.vary != 'batch_size')} · "
        f"method: {printable(settings.method, 30)} ({how(report)})"
    )
    parts: list[RenderableType] = [title, "", _table(result, terminal)]
    if result.trials:
        parts += ["", _trials_table(result, terminal)]
    parts += [Text(f"Note: {printable(note)}.") for note in result.notes]
    parts += ["", *_answer(result)]
    return Group(*parts)


def _table(result: SearchResult, terminal: int | None) -> Table:
    rich_look = terminal is not None
    with_ends = terminal is None or terminal >= _WIDTH_FOR_ENDS
    table = Table(
        box=box.SIMPLE_HEAD if rich_look else None,
        header_style="bold",
        padding=(0, 1) if rich_look else (0, 2, 0, 0),
        pad_edge=rich_look,
    )
    table.add_column(_what(result), justify="right", overflow="fold")
    for name in ("Needs", "At least", "At most") if with_ends else ("Needs",):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Verdict", no_wrap=True)
    for each in result.evaluations:
        is_answer = each.size == result.largest
        figures = (each.total, each.low, each.high) if with_ends else (each.total,)
        table.add_row(
            f"{each.size:,}", *(format_size(size) for size in figures),
            Text(each.verdict, style=VERDICT_STYLES.get(each.verdict, "")),
            style="bold" if is_answer else None,
        )  # fmt: skip
    return table


def _trials_table(result: SearchResult, terminal: int | None) -> Table:
    """Return what really ran."""
    rich_look = terminal is not None
    table = Table(
        box=box.SIMPLE_HEAD if rich_look else None,
        header_style="bold",
        padding=(0, 1) if rich_look else (0, 2, 0, 0),
        pad_edge=rich_look,
    )
    table.add_column("Real steps at", justify="right", no_wrap=True)
    table.add_column("Peak", justify="right", no_wrap=True)
    table.add_column("Limit", justify="right", no_wrap=True)
    table.add_column("Outcome", no_wrap=True)
    for each in sorted(result.trials, key=lambda trial: trial.size):
        outcome = Text("ran", VERDICT_STYLES["fits"]) if each.fits else Text("ran out", VERDICT_STYLES["does not fit"])
        table.add_row(
            f"{each.size:,}", "–" if each.peak_bytes is None else format_size(each.peak_bytes),
            format_size(each.limit_bytes), outcome, style="bold" if each.size == result.largest else None,
        )  # fmt: skip
    return table


def _what(result: SearchResult) -> str:
    return _WORDS.get(result.vary, printable(result.vary, 60))


def _answer_of_trials(result: SearchResult) -> Text:
    device, sizes = result.device, [each.size for each in result.trials]
    line = Text(f"{printable(device.name, 80)} ({format_size(device.available_bytes)} for TensorFlow): ")
    if result.largest is None:
        line.append(f"batch size {min(sizes):,} ran out of memory", style=VERDICT_STYLES["does not fit"])
        return line
    peak = next((each.peak_bytes for each in result.trials if each.size == result.largest), None)
    line.append(f"batch size {result.largest:,} ran", style=VERDICT_STYLES["fits"])
    if peak is not None:
        line.append(f", {format_size(device.available_bytes - peak)} to spare")
    return line


def _answer(result: SearchResult) -> list[Text]:
    device, what = result.device, _what(result)
    smallest = result.evaluations[0]
    if result.trials:
        return [_answer_of_trials(result)]
    room = f"{printable(device.name, 80)} ({format_size(device.available_bytes)} for TensorFlow)"
    if result.largest is not None:
        size = next(each for each in result.evaluations if each.size == result.largest)
        most = size.total if size.high is None else size.high
        line = Text(f"{room}: ")
        line.append(f"{what} {result.largest:,} fits", style=VERDICT_STYLES["fits"])
        line.append(f", {format_size(device.available_bytes - most)} to spare")
    else:
        line = Text(f"{room}: ")
        words = "does not fit" if device.verdict == "does not fit" else "is too close to call"
        line.append(f"{what} {smallest.size:,} {words}", style=VERDICT_STYLES.get(device.verdict, "bold"))
        if device.verdict == "does not fit":
            least = smallest.total if smallest.low is None else smallest.low
            line.append(f", at least {format_size(least - device.available_bytes)} too much")
    lines = [line]
    if result.fails_from is not None and device.verdict != "does not fit":
        between = (
            ""
            if result.largest is None or result.fails_from - result.largest <= 1
            else ("; what lies between is too close to call")
        )
        lines.append(Text(f"From {result.fails_from:,} on it surely does not fit{between}."))
    return lines
