"""An Advice as text: what to do and its line of code, then the remedies by rank, what fits, and what is not offered."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from kerasmem.estimation.report import DeviceVerdict, interval
from kerasmem.recovery.advice import Advice, Remedy
from kerasmem.rendering.escape import printable, printable_lines
from kerasmem.rendering.layout import (
    figures,
    has_room,
    model_heading,
    note_lines,
    table,
    verdict_heading,
    verdict_text,
    words,
)
from kerasmem.rendering.peak_text import settings_line, verdict_line
from kerasmem.units import format_size

_WIDTH_FOR_RESULT = 100
_WIDTH_FOR_THEN = 64
# kind of a change → what its line of a script contains
_MARKS = {
    "micro_batches": "micro_batches=", "batch_size": "batch_size=", "recompute": "kerasmem.recompute(",
    "jit_compile": "jit_compile", "dtype_policy": "policy", "optimizer": "optimizer=", "freeze": "trainable = False",
    "lora": "with_lora(model", "input_size": "keras.Input(", "separable": "clone_function=separable",
    "float32": "clone_function=single", "replicas": "MirroredStrategy(",
}  # fmt: skip


def advice_table(advice: Advice, terminal: int | None = None, *, is_brief: bool = False) -> RenderableType:
    """Return what to do and its line of code, the need, remedies, plans, a script, and what is not offered.

    Args:
        advice: what was found.
        terminal: columns of one, None for plain text.
        is_brief: leave out costs, the script, what is not offered, and notes.
    """
    settings = f"{settings_line(advice.settings)} · method: {printable(advice.settings.method, 30)}"
    need = advice.need
    kernels = "" if advice.kernels is None else f", on kernels of {printable(advice.kernels, 80)}"
    now = Text(f"Now: {_needs(advice.settings.method, need.total, need.low, need.high)}{kernels}\n")
    now.append_text(verdict_line(advice.device, need, advice.settings.method))
    parts: list[RenderableType] = [*_answer(advice), "", model_heading(advice.model, settings), "", now, ""]
    if advice.remedies:
        heading = Text("Remedies, by bytes saved for each unit of arithmetic", style="bold")
        parts += [heading, _remedies(advice, terminal)]
    else:
        parts.append(Text("No remedy was found that saves memory."))
    if is_brief:
        more = ["costs, plans and a script" if advice.plans or advice.remedies else "", "what is not offered"]
        more.append(f"{len(advice.notes)} notes" if advice.notes else "")
        return Group(*parts, Text(f"-v shows {', '.join(filter(None, more))}", style="dim"))
    if advice.remedies:
        parts.append(Text("What they cost", style="bold"))
        parts += [Text(f"  {n}  {printable(each.cost, 300)}") for n, each in enumerate(advice.remedies, 1)]
    parts += ["", *_plans(advice)]
    if advice.considered:
        parts.append(Text("Not offered", style="bold"))
        parts += [Text(f"  {printable(each.name, 120)}: {printable(each.why, 300)}") for each in advice.considered]
    return Group(*parts, *note_lines(advice.notes, 400))


def labelled(advice: Advice) -> dict[str, Remedy]:
    """Return what is offered by the labels in the text: remedies 1, 2, …, plans A, B, …."""
    numbers = {str(place): each for place, each in enumerate(advice.remedies, 1)}
    return {**numbers, **_plan_labels(advice)}


def _plan_labels(advice: Advice) -> dict[str, Remedy]:
    return {chr(ord("A") + place): each for place, each in enumerate(advice.plans)}


def _answer(advice: Advice) -> Iterator[Text]:
    """Yield what to do, and the lines of code that do it."""
    device, chosen = advice.device, winner(advice)
    if chosen is None:
        need, how = advice.need, "as it is" if device.verdict == "fits" else ""
        yield _verdict_on(device, device.verdict, how, _needs(advice.settings.method, need.total, need.low, need.high))
        return
    needs = _needs(chosen.method, chosen.total, chosen.low, chosen.high)
    yield _verdict_on(device, chosen.verdict, f"with {printable(chosen.name, 200)}", needs).append(_trial(chosen))
    yield from (Text(f"  {line}", style="cyan") for line in key_lines(chosen))


def _needs(method: str, total: int, low: int | None, high: int | None) -> str:
    return format_size(total) + interval(method, total, low, high)


def winner(advice: Advice) -> Remedy | None:
    """Return the plan to follow; None where it fits as it is, or nothing helps."""
    return advice.plans[0] if advice.plans and advice.device.verdict != "fits" else None


def key_lines(remedy: Remedy) -> list[str]:
    """Return the lines of a remedy's script that make its changes."""
    lines = remedy.code.splitlines()
    marks = [_MARKS.get(str(change["kind"]), "") for change in remedy.changes]
    found = (next((line for line in reversed(lines) if mark and mark in line), lines[-1]) for mark in marks)
    return [printable(line.strip(), 300) for line in dict.fromkeys(found)]


def _verdict_on(device: DeviceVerdict, verdict: str, how: str, needs: str) -> Text:
    line = verdict_heading(verdict, device.name)
    line.append(f" {how}" if how else "", style="bold")
    return line.append(f": needs {needs}, of {format_size(device.available_bytes)}", style="not bold default")


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
        for label, each in _plan_labels(advice).items():
            needs = _needs(each.method, each.total, each.low, each.high)
            line = Text(f"  {label}  {printable(each.name, 300)}: {needs}, ").append_text(verdict_text(each.verdict))
            yield line.append(f"; {printable(each.result, 60)}{_trial(each)}")
        yield ""
        yield from _code("A", advice.plans[0])
    elif advice.device.verdict == "fits" and advice.remedies:
        yield from _code("1", advice.remedies[0])


def _trial(each: Remedy) -> str:
    """Return what real steps of it took."""
    trial = each.trial
    if trial is None:
        return ""
    if trial.peak_bytes is None:
        return f"; its real steps ran out ({printable(trial.reason or '', 200)})"
    return f"; real steps took {format_size(trial.peak_bytes)} of {format_size(trial.limit_bytes)}"


def _code(label: str, each: Remedy) -> Iterator[RenderableType]:
    yield Text(f"Code of {label} (of another: --code LABEL)", style="bold")
    yield from ("", Padding(Text(printable_lines(each.code)), (0, 0, 0, 2)), "")
