"""The sentence that says what happened, and the warnings."""

from __future__ import annotations

from kerasmem.diagnosis.causes import Figures
from kerasmem.diagnosis.failures import Failure
from kerasmem.diagnosis.messages import read_data
from kerasmem.units import format_size

DAMAGED = (
    "A step compiled by XLA that runs out frees weights that the model still uses: in that process nothing may be "
    "retried or saved, not even if the weights look right. Go on from a checkpoint, in a fresh process."
)


def other_sentence(family: str, what: str) -> str:
    """Return the sentence for what is not out of memory."""
    said = read_data("texts")["not out of memory"]
    return str(said.get(what) or said.get(family) or "Nothing here says that memory ran out.")


def sentence(failure: Failure, found: Figures, layer: str | None, phase: str | None) -> str:
    """Return what happened in one sentence."""
    if failure.family == "host":
        return _host_sentence(failure, found)
    place = failure.facts.get("device") or "The device"
    place = {"GPU": "The GPU", "TPU": "The TPU", "MPS": "The GPU (MPS)", "host": "The host"}.get(place, place)
    if failure.what == "copy":
        return f"{place} ran out of memory: a tensor could not be copied to it."
    if failure.what == "library":
        return f"{place} ran out of memory: a CUDA library ({failure.facts.get('note')}) got none for itself."
    moment = _moment(failure, layer, phase)
    tail = _figures(found)
    return f"{place} ran out of memory{moment and f' {moment}'}{tail and f': {tail}'}."


def _host_sentence(failure: Failure, found: Figures) -> str:
    text = str(read_data("texts")["deaths"].get(failure.what, "Host memory ran out"))
    text = text.format(who=failure.facts.get("note") or "the process")
    if found.requested:
        text += f": {format_size(found.requested)} was asked for"
    elif found.in_use and found.limit:
        text += f": it used {format_size(found.in_use)} of {format_size(found.limit)}"
    elif found.in_use:
        text += f": it held {format_size(found.in_use)}"
    return text + "."


def _moment(failure: Failure, layer: str | None, phase: str | None) -> str:
    if failure.family in ("xla", "jax"):  # a compiled step fails as a whole; the operation is that of a buffer in it
        return f"in a compiled step whose largest buffer belongs to {layer}" if layer else ""
    moments = {
        "forward": f"while computing {layer}" if layer else "in the forward pass",
        "backward": f"while computing the gradient of {layer}" if layer else "in the backward pass",
        "optimizer": "while the optimizer updated the weights",
    }
    return moments.get(phase or "", "")


def _figures(found: Figures) -> str:
    asked = "" if found.requested is None else f"{format_size(found.requested)} was asked for"
    if why := read_data("texts")["causes"].get(found.cause, ""):
        return f"{asked}; {why}" if asked else str(why)
    if found.requested and found.limit and found.requested > found.limit:
        return f"{asked}, more than the {format_size(found.limit)} there is"
    return f"{asked}, {format_size(found.free)} was free" if asked and found.free is not None else asked


def warnings(failure: Failure) -> tuple[str, ...]:
    """Return what must not be overlooked."""
    damaged = failure.family == "xla" and failure.what == "program"
    return (DAMAGED,) if damaged else ()
