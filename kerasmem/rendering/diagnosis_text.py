"""What was found in a log, as text for people: what happened, the figures, where, what to do."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.rendering.escape import printable
from kerasmem.units import format_size

_LONGEST = 160  # characters of any text that comes from the log
_NAMES = 11


def diagnosis_text(found: Diagnosis, *, rich_look: bool) -> RenderableType:
    """Return the sentence, the figures that are known, the place, warnings, and what to do with its code.

    Args:
        found: the diagnosis; its texts are escaped here.
        rich_look: colours, for a terminal.
    """
    style = "bold red" if found.out_of_memory else "bold green"
    parts: list[RenderableType] = [Text(printable(found.summary), style=style if rich_look else "")]
    rows = list(_rows(found))
    if rows:
        parts.append("")
    for name, value in rows:
        line = Text(f"  {name:<{_NAMES}}", style="dim" if rich_look else "")
        parts.append(line.append(value, style="none"))
    for warning in found.warnings:
        line = Text("Warning: ", style="bold yellow" if rich_look else "")
        parts += ["", line.append(printable(warning), style="none")]
    if found.suggestions:
        parts += ["", Text("What to do", style="bold" if rich_look else "")]
    for number, each in enumerate(found.suggestions, 1):
        parts.append(Text(f"  {number}. {printable(each.what)}: {printable(each.why)}."))
        parts += [
            Text("       " + printable(line), style="cyan" if rich_look else "") for line in each.code.split("\n")
        ]
    return Group(*parts)


def _rows(found: Diagnosis) -> Iterator[tuple[str, str]]:
    sizes = (
        ("Asked for", found.requested_bytes),
        ("Free", found.free_bytes),
        ("In use", found.in_use_bytes),
        ("Reserved", found.reserved_bytes),
        ("Limit", found.limit_bytes),
    )
    for name, value in sizes:
        if value is None:
            continue
        text = format_size(value)
        if name == "Asked for" and found.tensor_shape and found.family not in ("xla", "jax", "theano"):
            text += f": {'an array' if found.family == 'host' else 'a tensor'} of {_shape(found)}"
        largest = format_size(found.largest_free_bytes)
        if name == "Free" and found.largest_free_bytes is not None and largest != text:
            text += f", the largest piece {largest}"
        yield name, text
    if found.requested_bytes is None and found.tensor_shape:
        yield "Tensor", _shape(found)
    if found.layer:
        yield "Layer", printable(found.layer, _LONGEST) + (f" ({found.pass_} pass)" if found.pass_ else "")
    if found.operation:
        yield "Operation", printable(found.operation, _LONGEST)
    if found.device:
        yield "Device", printable(found.device, 40)
    if found.cause and found.cause != "unknown":
        yield "Cause", found.cause
    if found.lines:
        first, last = found.lines
        place = f"line {first:,}" if first == last else f"lines {first:,}–{last:,}"
        more = f"; {found.later_failures:,} more later, the first is the cause" if found.later_failures else ""
        yield "Where", place + more
    if found.evidence:
        yield "Text", printable(found.evidence, _LONGEST)


def _shape(found: Diagnosis) -> str:
    sizes = "×".join(map(str, found.tensor_shape or ()))
    return f"{sizes} {printable(found.dtype, 20)}" if found.dtype else sizes
