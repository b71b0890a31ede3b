"""What was found in a log, as text for people: what happened, the figures, where, what to do."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.units import format_size, printable

_LONGEST = 160  # characters of any text that comes from the log
_NAMES = 11


def diagnosis_text(found: Diagnosis, terminal: int | None = None) -> RenderableType:
    """Return the sentence, the figures that are known, the place, warnings, and what to do with its code."""

    def styled(text: str, style: str) -> Text:
        return Text(text, style="" if terminal is None else style)

    parts: list[RenderableType] = [
        styled(printable(found.summary), f"bold {'red' if found.out_of_memory else 'green'}")
    ]
    rows = [*_sizes(found), *_context(found)]
    parts += [""] if rows else []
    parts += [styled(f"  {name:<{_NAMES}}", "dim").append(value, style="none") for name, value in rows]
    for warning in found.warnings:
        parts += ["", styled("Warning: ", "bold yellow").append(printable(warning), style="none")]
    if found.suggestions:
        parts += ["", styled("What to do", "bold")]
    for number, each in enumerate(found.suggestions, 1):
        parts.append(Text(f"  {number}. {printable(each.what)}: {printable(each.why)}."))
        parts += [styled("       " + printable(line), "cyan") for line in each.code.split("\n")]
    return Group(*parts)


def _sizes(found: Diagnosis) -> Iterator[tuple[str, str]]:
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


def _context(found: Diagnosis) -> Iterator[tuple[str, str]]:
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
        yield "Where", place
    if found.evidence:
        yield "Text", printable(found.evidence, _LONGEST)


def _shape(found: Diagnosis) -> str:
    sizes = "×".join(map(str, found.tensor_shape or ()))
    return f"{sizes} {printable(found.dtype, 20)}" if found.dtype else sizes
