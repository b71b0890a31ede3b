"""Words for a failure: one sentence, and two or three suggestions with code.

Suggestions are chosen here; their words are in `data/texts.json`, with the case's figures in braces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kerasmem.diagnosis.causes import Figures
from kerasmem.diagnosis.diagnosis import Diagnosis, Suggestion
from kerasmem.diagnosis.failures import Failure
from kerasmem.diagnosis.messages import read_data
from kerasmem.diagnosis.operations import model_number
from kerasmem.units import format_size

DAMAGED = (
    "A step compiled by XLA that runs out frees weights that the model still uses: in that process nothing may be "
    "retried or saved, not even if the weights look right. Go on from a checkpoint, in a fresh process."
)
MOST = 3
_PILED_UP = 4  # models without names, from which earlier ones are worth a word
_WORTH = 10  # what a tenth of the request or more would give back is worth a word


def other_sentence(family: str, what: str) -> str:
    """Return the sentence for a text that is not out of memory."""
    said = read_data("texts")["not out of memory"]
    return str(said.get(what) or said.get(family) or "Nothing here says that memory ran out.")


def sentence(failure: Failure, found: Figures, layer: str | None, phase: str | None, subject: str | None) -> str:
    """Summarise a failure in one sentence."""
    if failure.family == "host":
        return _host_sentence(failure, found)
    place = failure.facts.get("device") or "The device"
    place = {"GPU": "The GPU", "TPU": "The TPU", "MPS": "The GPU (MPS)", "host": "The host"}.get(place, place)
    if failure.what == "copy" and subject is None:
        return f"{place} ran out of memory: a tensor could not be copied to it."
    if failure.what == "library":
        return f"{place} ran out of memory: a CUDA library ({failure.facts.get('note')}) got none for itself."
    moment = read_data("texts")["moments"][subject] if subject else _moment(failure, layer, phase)
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
    if failure.facts.get("autotuning"):
        return "while XLA compiled a step and tried kernels (autotuning)"
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


def suggestions(
    failure: Failure, found: Figures, operation: str | None, phase: str | None, subject: str | None
) -> tuple[Suggestion, ...]:
    """Choose suggestions for a failure.

    Args:
        failure: the failure.
        found: its figures and cause.
        operation: that failed.
        phase: of the step.
        subject: as `failed_subject` returns it.
    """
    batch = batch_of(failure, operation, phase)
    numbered = model_number(operation or "")
    if failure.family == "host" or failure.what == "host":
        chosen = _host(failure)
    elif subject is not None:
        chosen = ["processes"] if found.cause == "other process" else []
        chosen += _SUGGESTED[subject]
    elif failure.family == "cuda" and failure.what == "library":
        chosen = ["room for libraries", "processes", "smaller batch"]
    elif failure.what == "copy":
        chosen = ["stream", "processes", "smaller batch"]
    elif failure.family == "pytorch":
        chosen = _pytorch(found)
    else:
        chosen = ["earlier models"] if numbered is not None and numbered[1] >= _PILED_UP else []
        chosen += _device(failure, found, batch, phase)
    texts, values = read_data("texts")["suggestions"], _values(failure, found, batch, numbered)
    return tuple(
        Suggestion(**{name: text.format(**values) for name, text in texts[each].items()}) for each in chosen[:MOST]
    )


_SUGGESTED = {
    "weights": ["smaller layer", "free models"],
    "slots": ["leaner optimizer", "smaller layer", "free models"],
    "arrays": ["stream", "arrays on the host", "processes"],
    "outputs": ["predict in a loop", "processes"],
}


def with_kept_models(diagnosis: Diagnosis, kept: int | None) -> Diagnosis:
    """Put freeing of deleted models first among the suggestions, if that can help.

    Args:
        diagnosis: of an out-of-memory in this process.
        kept: bytes of the weights and optimizers of models that are gone; None where it is not known.
    """
    if not kept or kept < (diagnosis.requested_bytes or 0) / _WORTH:
        return diagnosis
    texts = read_data("texts")["suggestions"]["kept models"]
    first = Suggestion(**{name: text.format(kept=format_size(kept)) for name, text in texts.items()})
    others = (each for each in diagnosis.suggestions if each.what != first.what)
    return replace(diagnosis, suggestions=(first, *others)[:MOST])


def batch_of(failure: Failure, operation: str | None, phase: str | None) -> int | None:
    """Return the batch size: of the call in the traceback, or the first dimension of a tensor that has one."""
    sizes, given = failure.facts.get("tensor_shape"), failure.facts.get("given_batch")
    if failure.family != "tensorflow" or not sizes or len(sizes) < 2 or phase == "optimizer":
        return None
    last = (operation or "").rsplit("/", 1)[-1]
    is_of_weights = any(word in last for word in read_data("scopes")["operations on weights"])
    if phase is None or is_of_weights or not 1 <= sizes[0] <= 65536:
        return None
    return int(given or sizes[0])


def smaller_batch(batch: int, found: Figures) -> int:
    """Return a power of two at most half the batch, scaled by what the step lacked: a first guess, as weights do not
    shrink with the batch.

    Examples:
        >>> smaller_batch(64, Figures(2**30, 0, 0, 2**33, 2**33, None, None, "capacity"))
        32
    """
    share = 0.5
    if found.requested and found.limit and found.in_use is not None:
        share = min(share, found.limit / (found.in_use + found.requested))
    return 1 << max(0, int(batch * share).bit_length() - 1)


def _device(failure: Failure, found: Figures, batch: int | None, phase: str | None) -> list[str]:
    device, family = str(failure.facts.get("device") or ""), failure.family
    is_on_host, is_tpu = device.startswith("CPU"), device == "TPU"
    is_small = batch is not None and smaller_batch(batch, found) >= batch
    chosen = ["processes", "growth"] if found.cause == "other process" else []
    if found.cause == "fragmentation" and not is_on_host:
        chosen.append("cuda allocator")
    if failure.facts.get("dtype") in ("double", "float64", "f64"):
        chosen.append("float32 data")
    if phase == "optimizer":
        chosen.append("leaner optimizer")
    chosen.append("smaller batch" if batch is None else "look" if is_small else "that batch")
    if family == "theano":
        return [*chosen, *([] if found.cause == "other process" else ["processes"])]
    if failure.facts.get("autotuning"):
        chosen.append("no autotuning")
    if family == "xla" and failure.what == "program":
        chosen.append("no xla")
    if family in ("tensorflow", "xla") and not is_tpu:  # what runs on TensorFlow, on one card
        chosen.append("advise" if phase == "optimizer" else "recompute" if is_small else "micro-batches")
    if not is_on_host:
        chosen.append("mixed precision")
    return [*chosen, "logger" if family == "jax" else "advise"]


def _host(failure: Failure) -> list[str]:
    chosen = ["float32 array"] if failure.facts.get("dtype") in ("float64", "f8", "double") else []
    ways = {"slurm": "slurm", "cgroup": "container", "container": "container", "killed": "kernel log"}
    return [*chosen, "stream", *([ways[failure.what]] if failure.what in ways else []), "track"]


def _pytorch(found: Figures) -> list[str]:
    chosen = {"other process": ["processes"], "fragmentation": ["larger segments"]}.get(found.cause, [])
    return [*chosen, "smaller batch", "mixed precision", *([] if chosen else ["processes"])]


def _values(failure: Failure, found: Figures, batch: int | None, numbered: tuple[str, int] | None) -> dict[str, Any]:
    """Return the values of the braces in the texts."""
    facts, asked = failure.facts, found.requested
    smaller = 1 if batch is None else smaller_batch(batch, found)
    spare = None if found.reserved is None or found.in_use is None else found.reserved - found.in_use
    return {
        "allocator": "PYTORCH_HIP_ALLOC_CONF" if facts.get("platform") == "HIP" else "PYTORCH_CUDA_ALLOC_CONF",
        "batch": batch,
        "batch_size": "" if batch is None else f", batch_size={batch}",
        "device": found.limit or "...",
        "whose": "" if found.limit else '; ... is your card, such as "t4"',
        "free": "enough" if found.free is None else format_size(found.free),
        "gigabytes": 64 if found.limit is None else -(-found.limit * 3 // 2**31),  # half as much again
        "half": f": {format_size(asked // 2)} in place of {format_size(asked)}" if asked else "",
        "held": _told(", held to {},", found.limit),
        "more": _told("; ask for more than {}", found.limit),
        "others": _told("; here others hold {}", found.others or None),
        "piece": _told(", the largest piece {}", found.largest),
        "policy": "mixed_bfloat16" if facts.get("device") == "TPU" else "mixed_float16",
        "smaller": smaller,
        "number": numbered and numbered[1],
        "scope": numbered and numbered[0],
        "weights": "much" if asked is None else format_size(asked),
        "spare": _told("{} are reserved and not handed out", spare) or "enough is free",
        "tensor": f"; this tensor is then {format_size(asked * smaller // (batch or 1))}, not {format_size(asked)}"
        if asked
        else "",
        "whole": format_size(asked) if asked is not None and failure.what in ("array", "copy") else "the data",
    }


def _told(text: str, size: int | None) -> str:
    return "" if size is None else text.format(format_size(size))
