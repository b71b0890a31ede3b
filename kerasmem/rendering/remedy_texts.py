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
    """Show the answer and its code, the memory needed, remedies, plans, and rejected remedies.

    Args:
        advice: the advice.
        terminal: columns of a terminal, or None for plain text.
        is_brief: whether to leave out costs, plans, rejected remedies and notes.
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
        more = ["costs, plans, rejected remedies" if advice.remedies else "rejected remedies"]
        more += [format_count(len(advice.notes), "note")] if advice.notes else []
        code = "; --code the lines of each remedy" if advice.remedies else ""
        return Group(*parts, Text(f"-v shows {', '.join(more)}{code}", style="dim"))
    if advice.remedies:
        parts.append(Text("Costs", style="bold"))
        parts += [Text(f"  {n}  {printable(remedy.cost, 300)}") for n, remedy in enumerate(advice.remedies, 1)]
    parts += ["", *_plans(advice)]
    if advice.considered:
        parts.append(Text("Not offered", style="bold"))
        parts += [Text(f"  {printable(item.name, 120)}: {printable(item.why, 300)}") for item in advice.considered]
    return Group(*parts, *note_lines(advice.notes, 400))


def advice_code(advice: Advice) -> str:
    """Show the code of each plan and remedy, the best first."""
    by_name = {remedy.name: remedy for remedy in (*advice.plans, *advice.remedies)}
    parts = []
    for remedy in by_name.values():
        heading = f"# {printable(remedy.name, 200)}: {printable(remedy.verdict, 30)}, {printable(remedy.result, 60)}"
        parts.append(f"{heading}\n{printable_lines(remedy.code)}\n")
    return "\n".join(parts)


def _answer(advice: Advice) -> Iterator[Text]:
    """Yield the best plan and its code, or the verdict if none is needed or known."""
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


_ON_DEVICE = {
    "train": "model.fit copies the arrays to the device: {size}; kerasmem.H5ChunkSequence streams them",
    "evaluate": "model.evaluate copies the arrays to the device: {size}; kerasmem.H5ChunkSequence streams them",
    "inference": (
        "model.predict keeps inputs and all outputs on the device, these twice at its end: {size}; "
        "a loop of model.predict_on_batch does not"
    ),
}


def _arrays(advice: Advice) -> Iterator[Text]:
    if advice.data_bytes:
        yield Text(f"{_ON_DEVICE[advice.settings.mode].format(size=format_size(advice.data_bytes))}.")


def _needs(need: Bytes | Remedy, stands_in: bool) -> str:
    total = format_size(need.total)
    if need.low is None or need.high is None:
        return total
    most = format_size(need.high)
    return f"{total}, at most {most}" if stands_in else f"{total} ({format_size(need.low)} to {most})"


def _remedies(advice: Advice, terminal: int | None) -> Table:
    columns = (figures(""), words("Remedy"), figures("Saves"), figures("Then"), Column("Verdict", no_wrap=True))
    rows = table(terminal, *columns, words("Result"))
    for number, remedy in enumerate(advice.remedies, 1):
        saves = f"{format_size(remedy.saving)} ({remedy.saving_percent:.0f} %)"
        name, result = printable(remedy.name, 120), printable(remedy.result, 60)
        rows.add(str(number), name, saves, remedy.total, verdict_text(remedy.verdict), result)
    return rows


def _plans(advice: Advice) -> Iterator[RenderableType]:
    if advice.plans:
        fits = any(plan.verdict == "fits" for plan in advice.plans)
        yield Text("Plans that fit, the smallest change first" if fits else "Plans closest to fitting", style="bold")
        for plan in advice.plans:
            needs = _needs(plan, plan.stands_in)
            line = Text(f"  {printable(plan.name, 300)}: {needs}, ").append_text(verdict_text(plan.verdict))
            yield line.append(f"; {printable(plan.result, 60)}{_trial(plan)}")
        yield ""


def _trial(plan: Remedy) -> str:
    """Describe the measured memory of a plan."""
    trial = plan.trial
    if trial is None:
        return ""
    if trial.peak_bytes is None:
        return f"; its real steps ran out ({printable(trial.reason or '', 200)})"
    return f"; real steps took {format_size(trial.peak_bytes)} of {format_size(trial.limit_bytes)}"


_LOG_TEXT_WIDTH = 160  # characters of any text that comes from the log
_NAME_WIDTH = 11


def diagnosis_text(diagnosis: Diagnosis, terminal: int | None = None) -> RenderableType:
    """Show the summary, known figures, context, warnings and suggestions."""

    def in_style(text: str, style: str) -> Text:
        return Text(text, style="" if terminal is None else style)

    parts: list[RenderableType] = [
        in_style(printable(diagnosis.summary), f"bold {'red' if diagnosis.out_of_memory else 'green'}")
    ]
    rows = [*_diagnosis_figures(diagnosis), *_context_lines(diagnosis)]
    parts += [""] if rows else []
    parts += [in_style(f"  {name:<{_NAME_WIDTH}}", "dim").append(value, style="none") for name, value in rows]
    for warning in diagnosis.warnings:
        parts += ["", in_style("Warning: ", "bold yellow").append(printable(warning), style="none")]
    if diagnosis.suggestions:
        parts += ["", in_style("What to do", "bold")]
    for number, suggestion in enumerate(diagnosis.suggestions, 1):
        parts.append(Text(f"  {number}. {printable(suggestion.what)}: {printable(suggestion.why)}."))
        parts += [in_style("       " + printable(line), "cyan") for line in suggestion.code.split("\n")]
    return Group(*parts)


def _diagnosis_figures(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    if diagnosis.requested_bytes is not None:
        of = ""
        if diagnosis.tensor_shape and diagnosis.family not in ("xla", "jax", "theano"):
            of = f": {'an array' if diagnosis.family == 'host' else 'a tensor'} of {_shape(diagnosis)}"
        yield "Requested", format_size(diagnosis.requested_bytes) + of
    if diagnosis.free_bytes is not None:
        free, largest = format_size(diagnosis.free_bytes), format_size(diagnosis.largest_free_bytes)
        is_one_piece = diagnosis.largest_free_bytes is None or largest == free
        yield "Free", free if is_one_piece else f"{free}, the largest block {largest}"
    others = (
        ("In use", diagnosis.in_use_bytes),
        ("Reserved", diagnosis.reserved_bytes),
        ("Limit", diagnosis.limit_bytes),
    )
    yield from ((name, format_size(size)) for name, size in others if size is not None)


def _context_lines(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    if diagnosis.requested_bytes is None and diagnosis.tensor_shape:
        yield "Tensor", _shape(diagnosis)
    if diagnosis.layer:
        yield (
            "Layer",
            printable(diagnosis.layer, _LOG_TEXT_WIDTH) + (f" ({diagnosis.pass_} pass)" if diagnosis.pass_ else ""),
        )
    if diagnosis.operation:
        yield "Operation", printable(diagnosis.operation, _LOG_TEXT_WIDTH)
    if diagnosis.device:
        yield "Device", printable(diagnosis.device, 40)
    if diagnosis.cause and diagnosis.cause != "unknown":
        yield "Cause", diagnosis.cause
    if diagnosis.lines:
        first, last = diagnosis.lines
        yield "Where", f"line {first:,}" if first == last else f"lines {first:,}–{last:,}"
    if diagnosis.evidence:
        yield "Text", printable(diagnosis.evidence, _LOG_TEXT_WIDTH)


def _shape(diagnosis: Diagnosis) -> str:
    sizes = "×".join(map(str, diagnosis.tensor_shape or ()))
    return f"{sizes} {printable(diagnosis.dtype, 20)}" if diagnosis.dtype else sizes
