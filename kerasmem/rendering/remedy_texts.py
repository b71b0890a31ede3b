"""Shows how to get out of an out-of-memory error: a `Diagnosis` of a failure, and the remedies of an `Advice`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.estimation.report import Bytes
from kerasmem.recovery.advice import Advice, Remedy
from kerasmem.rendering.formatting import figures, note_lines, printable_lines, table, verdict_text, words
from kerasmem.rendering.peak_text import settings_line, verdict_line
from kerasmem.units import format_count, format_size, printable


def advice_table(advice: Advice, terminal: int | None = None, *, is_brief: bool = False) -> RenderableType:
    """Show the answer and its lines of code, the need, remedies, plans, and what is not offered.

    Args:
        advice: the advice.
        terminal: columns of a terminal, or None for plain text.
        is_brief: leave out costs, plans, what is not offered, and notes.
    """
    stands_in = advice.settings.stands_in
    now = Text(f"Now: {_needs(advice.need, stands_in)}: ").append_text(verdict_text(advice.device.verdict))
    model = f"{printable(advice.model.name, 60)} · {settings_line(advice.settings)}"
    parts: list[RenderableType] = [*_answer(advice), *_arrays(advice), Text(model, style="dim"), "", now, ""]
    if advice.remedies:
        heading = Text("Remedies, by bytes saved for each unit of arithmetic", style="bold")
        parts += [heading, _remedies(advice, terminal)]
    else:
        parts.append(Text("No remedy was found that saves memory."))
    if is_brief:
        more = ["costs, plans, what is not offered" if advice.remedies else "what is not offered"]
        more += [format_count(len(advice.notes), "note")] if advice.notes else []
        code = "; --code the lines of each remedy" if advice.remedies else ""
        return Group(*parts, Text(f"-v shows {', '.join(more)}{code}", style="dim"))
    if advice.remedies:
        parts.append(Text("What they cost", style="bold"))
        parts += [Text(f"  {n}  {printable(each.cost, 300)}") for n, each in enumerate(advice.remedies, 1)]
    parts += ["", *_plans(advice)]
    if advice.considered:
        parts.append(Text("Not offered", style="bold"))
        parts += [Text(f"  {printable(each.name, 120)}: {printable(each.why, 300)}") for each in advice.considered]
    return Group(*parts, *note_lines(advice.notes, 400))


def advice_code(advice: Advice) -> str:
    """Show the changed lines of each plan and remedy, the best first."""
    offered = {each.name: each for each in (*advice.plans, *advice.remedies)}
    parts = []
    for each in offered.values():
        heading = f"# {printable(each.name, 200)}: {printable(each.verdict, 30)}, {printable(each.result, 60)}"
        parts.append(f"{heading}\n{printable_lines(each.code)}\n")
    return "\n".join(parts)


def _answer(advice: Advice) -> Iterator[Text]:
    """Yield what to do, and the lines of code that do it."""
    device = advice.device
    if not advice.plans or device.verdict == "fits":
        how = "as it is" if device.verdict == "fits" else ""
        yield verdict_line(device, f"needs {_needs(advice.need, advice.settings.stands_in)}", how)
        return
    plan = advice.plans[0]
    needs = f"needs {_needs(plan, plan.stands_in)}"
    line = verdict_line(replace(device, verdict=plan.verdict), needs, f"with {printable(plan.name, 200)}")
    yield line.append(_trial(plan), style="not bold default")
    yield from (Text(f"  {line}", style="cyan") for line in printable_lines(plan.code).splitlines())


_KEPT = {
    "train": "model.fit copies the arrays to the device: {size}; kerasmem.H5ChunkSequence streams them",
    "evaluate": "model.evaluate copies the arrays to the device: {size}; kerasmem.H5ChunkSequence streams them",
    "inference": (
        "model.predict keeps inputs and all outputs on the device, these twice at its end: {size}; "
        "a loop of model.predict_on_batch does not"
    ),
}


def _arrays(advice: Advice) -> Iterator[Text]:
    if advice.data_bytes:
        yield Text(f"{_KEPT[advice.settings.mode].format(size=format_size(advice.data_bytes))}.")


def _needs(need: Bytes | Remedy, stands_in: bool) -> str:
    total = format_size(need.total)
    if need.low is None or need.high is None:
        return total
    most = format_size(need.high)
    return f"{total}, at most {most}" if stands_in else f"{total} ({format_size(need.low)} to {most})"


def _remedies(advice: Advice, terminal: int | None) -> Table:
    columns = (figures(""), words("Remedy"), figures("Saves"), figures("Then"), Column("Verdict", no_wrap=True))
    rows = table(terminal, *columns, words("Result"))
    for number, each in enumerate(advice.remedies, 1):
        saves = f"{format_size(each.saving)} ({each.saving_percent:.0f} %)"
        result = printable(each.result, 60)
        rows.add(str(number), printable(each.name, 120), saves, each.total, verdict_text(each.verdict), result)
    return rows


def _plans(advice: Advice) -> Iterator[RenderableType]:
    if advice.plans:
        fits = any(each.verdict == "fits" for each in advice.plans)
        yield Text("What fits, the least harmful first" if fits else "What comes nearest", style="bold")
        for each in advice.plans:
            needs = _needs(each, each.stands_in)
            line = Text(f"  {printable(each.name, 300)}: {needs}, ").append_text(verdict_text(each.verdict))
            yield line.append(f"; {printable(each.result, 60)}{_trial(each)}")
        yield ""


def _trial(each: Remedy) -> str:
    """Describe the measured memory of a plan."""
    trial = each.trial
    if trial is None:
        return ""
    if trial.peak_bytes is None:
        return f"; its real steps ran out ({printable(trial.reason or '', 200)})"
    return f"; real steps took {format_size(trial.peak_bytes)} of {format_size(trial.limit_bytes)}"


_LOG_TEXT_WIDTH = 160  # characters of any text that comes from the log
_NAME_WIDTH = 11


def diagnosis_text(found: Diagnosis, terminal: int | None = None) -> RenderableType:
    """Return the sentence, the figures that are known, the place, warnings, and what to do with its code."""

    def styled(text: str, style: str) -> Text:
        return Text(text, style="" if terminal is None else style)

    parts: list[RenderableType] = [
        styled(printable(found.summary), f"bold {'red' if found.out_of_memory else 'green'}")
    ]
    rows = [*_diagnosis_figures(found), *_context_lines(found)]
    parts += [""] if rows else []
    parts += [styled(f"  {name:<{_NAME_WIDTH}}", "dim").append(value, style="none") for name, value in rows]
    for warning in found.warnings:
        parts += ["", styled("Warning: ", "bold yellow").append(printable(warning), style="none")]
    if found.suggestions:
        parts += ["", styled("What to do", "bold")]
    for number, each in enumerate(found.suggestions, 1):
        parts.append(Text(f"  {number}. {printable(each.what)}: {printable(each.why)}."))
        parts += [styled("       " + printable(line), "cyan") for line in each.code.split("\n")]
    return Group(*parts)


def _diagnosis_figures(found: Diagnosis) -> Iterator[tuple[str, str]]:
    if found.requested_bytes is not None:
        of = ""
        if found.tensor_shape and found.family not in ("xla", "jax", "theano"):
            of = f": {'an array' if found.family == 'host' else 'a tensor'} of {_shape(found)}"
        yield "Asked for", format_size(found.requested_bytes) + of
    if found.free_bytes is not None:
        free, largest = format_size(found.free_bytes), format_size(found.largest_free_bytes)
        is_one_piece = found.largest_free_bytes is None or largest == free
        yield "Free", free if is_one_piece else f"{free}, the largest piece {largest}"
    others = (("In use", found.in_use_bytes), ("Reserved", found.reserved_bytes), ("Limit", found.limit_bytes))
    yield from ((name, format_size(size)) for name, size in others if size is not None)


def _context_lines(found: Diagnosis) -> Iterator[tuple[str, str]]:
    if found.requested_bytes is None and found.tensor_shape:
        yield "Tensor", _shape(found)
    if found.layer:
        yield "Layer", printable(found.layer, _LOG_TEXT_WIDTH) + (f" ({found.pass_} pass)" if found.pass_ else "")
    if found.operation:
        yield "Operation", printable(found.operation, _LOG_TEXT_WIDTH)
    if found.device:
        yield "Device", printable(found.device, 40)
    if found.cause and found.cause != "unknown":
        yield "Cause", found.cause
    if found.lines:
        first, last = found.lines
        place = f"line {first:,}" if first == last else f"lines {first:,}–{last:,}"
        yield "Where", place
    if found.evidence:
        yield "Text", printable(found.evidence, _LOG_TEXT_WIDTH)


def _shape(found: Diagnosis) -> str:
    sizes = "×".join(map(str, found.tensor_shape or ()))
    return f"{sizes} {printable(found.dtype, 20)}" if found.dtype else sizes
