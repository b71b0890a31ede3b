"""The sentence that says what happened, and the warnings."""

from __future__ import annotations

from kerasmem.diagnosis.causes import Figures
from kerasmem.diagnosis.failures import Failure
from kerasmem.units import format_size

_OTHERS = {
    "disk": "This is not about memory: the disk is full.",
    "notice": "Memory did not run out: this is a notice, and the program went on.",
    "limit": "Memory did not run out: another limit was met.",
    "library": "Memory did not run out: a library was not found; `kerasmem doctor` tells more.",
    "stopped": "Memory did not run out: the run was stopped from outside.",
    "crash": "Memory did not run out: the program touched memory that is not its own.",
    "shape": "Memory did not run out: shapes do not go together.",
    "nan": "Memory did not run out: the loss is not a number.",
}
_PARTICULAR = {
    "quota": "Memory did not run out: a quota is used up.",
    "message": "Memory did not run out: a gRPC message was larger than its limit.",
    "files": "Memory did not run out: too many files are open.",
    "processes": "Memory did not run out: the system refused another process or thread.",
    "time": "Memory did not run out: the job reached its time limit.",
    "shm": "Memory did not run out: shared memory (/dev/shm) is full.",
    "retry": "Memory did not run out: something failed and was tried again.",
    "shrinking": "Memory did not run out: TensorFlow asked for the whole card, got less, and went on.",
}
_DEATHS = {
    "kernel": "The kernel killed {who} because the machine ran out of memory",
    "cgroup": "The kernel killed {who} because its container or job ran out of memory",
    "slurm": "Slurm killed the job because it ran out of its memory",
    "job": "The batch system killed the job because it used more memory than it may",
    "container": "The container was killed because it ran out of memory",
    "killed": "The process was killed from outside; most often it is the kernel, for want of memory",
    "java": "Java ran out of its own heap",
    "array": "There was no host memory for a NumPy array",
    "python": "Python ran out of host memory",
    "cpp": "A C++ library ran out of host memory",
    "os": "The system had no host memory to give",
}
_CAUSES = {
    "fragmentation": "enough is free, but in pieces that are too small",
    "other process": "other processes hold a good part of the card",
}
DAMAGED = (
    "A step compiled by XLA that runs out frees weights that the model still uses: in that process nothing may be "
    "retried or saved, not even if the weights look right. Go on from a checkpoint, in a fresh process."
)


def other_sentence(family: str, what: str) -> str:
    """Return the sentence for what is not out of memory."""
    return _PARTICULAR.get(what) or _OTHERS.get(family, "Nothing here says that memory ran out.")


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
    text = _DEATHS.get(failure.what, "Host memory ran out").format(who=failure.facts.get("note") or "the process")
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
    if found.cause in _CAUSES:
        return f"{asked}; {_CAUSES[found.cause]}" if asked else _CAUSES[found.cause]
    if found.requested and found.limit and found.requested > found.limit:
        return f"{asked}, more than the {format_size(found.limit)} there is"
    return f"{asked}, {format_size(found.free)} was free" if asked and found.free is not None else asked


def warnings(failure: Failure) -> tuple[str, ...]:
    """Return what must not be overlooked."""
    damaged = failure.family == "xla" and failure.what == "program"
    return (DAMAGED,) if damaged else ()
