"""Writes the summary of a failure, and chooses two or three suggestions with code.

`data/texts.json` has the texts, with figures in braces, and the rules that choose suggestions. A clause between `<?`
and `?>` is left out if a figure in it is unknown. A rule applies to a case if every field under "when" has one of its
values. The first three suggestions of all rules that apply are chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

from kerasmem.diagnosis.causes import Figures, OperationName, model_number
from kerasmem.diagnosis.diagnosis import Suggestion
from kerasmem.diagnosis.failure_reader import Failure
from kerasmem.diagnosis.log_messages import read_data
from kerasmem.units import format_size

MOST = 3
_PILED_UP = 4  # lowest number of a model without a name that shows earlier models
_CLAUSE = re.compile(r"<\?(.*?)\?>")


def other_sentence(family: str, what: str) -> str:
    """Return the sentence for a text without an out-of-memory error."""
    texts = read_data("texts")["not out of memory"]
    return str(texts.get(what) or texts.get(family) or "No out-of-memory error was found.")


def sentence(failure: Failure, sizes: Figures, operation: OperationName, subject: str | None) -> str:
    """Summarise a failure in one sentence."""
    texts = read_data("texts")
    if failure.family == "host":
        return _host_sentence(failure, sizes)
    device = failure.facts.get("device") or "The device"
    start = texts["devices"].get(device, device) + " ran out of memory"
    if subject is None and failure.what in texts["details"]:
        return start + texts["details"][failure.what].format(note=failure.facts.get("note")) + "."
    moment, figures = _moment(failure, operation, subject), _figures(sizes)
    return f"{start}{moment and f' {moment}'}{figures and f': {figures}'}."


def _host_sentence(failure: Failure, sizes: Figures) -> str:
    texts = read_data("texts")["deaths"]
    figures = texts["asked"] if sizes.requested else texts["held"]
    values = {**_values(failure, sizes), "who": failure.facts.get("note") or "the process"}
    return _fill_in(texts.get(failure.what, texts["host"]) + figures, values) + "."


def _moment(failure: Failure, operation: OperationName, subject: str | None) -> str:
    moments: Mapping[str, str] = read_data("texts")["moments"]
    moment = subject or operation.phase or ""
    if failure.facts.get("autotuning"):
        moment = "autotuning"
    elif failure.family in ("xla", "jax"):  # a compiled step fails as a whole; the operation is of one of its buffers
        moment = "compiled"
    with_layer = moments.get(f"{moment} of a layer") if operation.layer else None
    return (with_layer or moments.get(moment, "")).format(layer=operation.layer)


def _figures(sizes: Figures) -> str:
    requested = "" if sizes.requested is None else f"{format_size(sizes.requested)} was requested"
    if cause := read_data("texts")["causes"].get(sizes.cause, ""):
        return f"{requested}; {cause}" if requested else str(cause)
    if sizes.requested and sizes.limit and sizes.requested > sizes.limit:
        return f"{requested}, more than the {format_size(sizes.limit)} available"
    return f"{requested}, {format_size(sizes.free)} was free" if requested and sizes.free is not None else requested


def suggestions(
    failure: Failure, sizes: Figures, operation: str | None, phase: str | None, subject: str | None
) -> tuple[Suggestion, ...]:
    """Choose suggestions for a failure.

    Args:
        failure: the failure.
        sizes: its figures and cause.
        operation: name of the failed operation, or None.
        phase: phase of the step, or None.
        subject: result of `failed_subject`.
    """
    batch, model = batch_of(failure, operation, phase), model_number(operation or "")
    smaller = 1 if batch is None else smaller_batch(batch, sizes)
    device = str(failure.facts.get("device") or "")
    case = {
        "kind": _kind(failure, subject),
        "family": failure.family,
        "what": failure.what,
        "cause": sizes.cause,
        "phase": phase,
        "device": "host" if device.startswith("CPU") else "TPU" if device == "TPU" else "GPU",
        "batch": "unknown" if batch is None else "divisible" if smaller < batch else "small",
        "is_double": failure.facts.get("dtype") in ("double", "float64", "f64", "f8"),
        "is_autotuning": "autotuning" in failure.facts,
        "has_earlier_models": model is not None and model[1] >= _PILED_UP,
    }
    values = _values(failure, sizes) | {"batch": batch, "smaller": smaller, "tensor": None}
    if sizes.requested and batch:
        values["tensor"] = format_size(sizes.requested * smaller // batch)
    values["scope"], values["number"] = model or (None, None)
    texts = read_data("texts")
    names = (name for rule in texts["rules"] if _applies(rule["when"], case) for name in rule["suggest"])
    suggestions = (texts["suggestions"][name] for name in list(dict.fromkeys(names))[:MOST])
    return tuple(
        Suggestion(**{part: _fill_in(text, values) for part, text in suggestion.items()}) for suggestion in suggestions
    )


def _kind(failure: Failure, subject: str | None) -> str:
    if failure.family == "host" or failure.what == "host":
        return "host"
    if subject is not None or failure.what in ("library", "copy"):
        return subject or failure.what
    return "pytorch" if failure.family == "pytorch" else "device"


def _applies(when: Mapping[str, list[Any]], case: Mapping[str, Any]) -> bool:
    return all(case[name] in values for name, values in when.items())


def _values(failure: Failure, sizes: Figures) -> dict[str, Any]:
    """Return the values for the braces in the texts, None if unknown."""
    spare = None if sizes.reserved is None or sizes.in_use is None else sizes.reserved - sizes.in_use
    counts = {
        "requested": sizes.requested,
        "half": sizes.requested and sizes.requested // 2,
        "free": sizes.free,
        "largest": sizes.largest,
        "limit": sizes.limit,
        "in_use": sizes.in_use,
        "others": sizes.others or None,
        "spare": spare,
    }
    return {name: None if count is None else format_size(count) for name, count in counts.items()} | {
        "allocator": "PYTORCH_HIP_ALLOC_CONF" if failure.facts.get("platform") == "HIP" else "PYTORCH_CUDA_ALLOC_CONF",
        "policy": "mixed_bfloat16" if failure.facts.get("device") == "TPU" else "mixed_float16",
        "device": sizes.limit or '"t4"',
        "gigabytes": 64 if sizes.limit is None else -(-sizes.limit * 3 // 2**31),  # 1.5 times the limit
    }


def _fill_in(text: str, values: Mapping[str, Any]) -> str:
    """Fill in the braces of a text, and drop clauses with an unknown value."""

    def clause(match: re.Match[str]) -> str:
        fields = [field for _, field, _, _ in Formatter().parse(match[1]) if field]
        return match[1] if all(values[field] is not None for field in fields) else ""

    return _CLAUSE.sub(clause, text).format(**values)


def batch_of(failure: Failure, operation: str | None, phase: str | None) -> int | None:
    """Return the batch size in the traceback, or else the first dimension of a tensor with a batch."""
    sizes, batch_size = failure.facts.get("tensor_shape"), failure.facts.get("given_batch")
    if failure.family != "tensorflow" or not sizes or len(sizes) < 2 or phase == "optimizer":
        return None
    last = (operation or "").rsplit("/", 1)[-1]
    is_of_weights = any(word in last for word in read_data("scopes")["operations on weights"])
    if phase is None or is_of_weights or not 1 <= sizes[0] <= 65536:
        return None
    return int(batch_size or sizes[0])


def smaller_batch(batch: int, sizes: Figures) -> int:
    """Return a first guess for a batch that fits: a power of two, at most half the batch.

    Examples:
        >>> smaller_batch(64, Figures(2**30, 0, 0, 2**33, 2**33, None, None, "capacity"))
        32
    """
    share = 0.5
    if sizes.requested and sizes.limit and sizes.in_use is not None:
        share = min(share, sizes.limit / (sizes.in_use + sizes.requested))
    return 1 << max(0, int(batch * share).bit_length() - 1)
