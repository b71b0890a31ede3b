"""Finds the figures, the operation and the cause of a failure.

Sizes are bytes. Figures are None if the text does not give or imply them.

Keras 3 numbers each scope of a call: "net_1/block_2_1/Relu" is the layer block_2 of the model net. Keras 2 does not,
so its layers cannot be told apart by name.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from kerasmem.diagnosis.failure_reader import Failure
from kerasmem.diagnosis.log_messages import read_data, tensor_bytes
from kerasmem.models.op_names import BACKWARD
from kerasmem.units import GIB

_CLEARLY = 0.2  # of the card, which other processes must use to be the cause
_LOOSE = 0.05  # of the card, reserved but not in use; less is normal on a full card


@dataclass(frozen=True)
class Figures:
    """Figures of a failure, as in `Diagnosis`."""

    requested: int | None
    free: int | None
    largest: int | None
    limit: int | None
    in_use: int | None
    reserved: int | None
    others: int | None
    cause: str


def figures(failure: Failure) -> Figures:
    """Return the figures of a failure and its cause."""
    if failure.family == "pytorch":
        return _pytorch(failure)
    if failure.family == "host":
        return _host(failure)
    return _device(failure)


def requested_bytes(failure: Failure) -> int | None:
    """Return the bytes requested, from the tensor's shape if that agrees with the text."""
    facts = failure.facts
    text = facts.get("requested_bytes")  # "14.65GiB"
    if failure.family in ("xla", "jax", "theano"):  # the shape is of one of many buffers
        return text
    # the allocator rounds up to 256 bytes
    for exact in (tensor_bytes(facts.get("tensor_shape"), facts.get("dtype")), facts.get("rounded")):
        if exact is not None and (text is None or abs(exact - text) <= max(0.01 * text, 256)):
            return exact
    return text


def _device(failure: Failure) -> Figures:
    """Return the figures from an allocator's statistics and free blocks, and from the driver."""
    facts = failure.facts
    requested, used = requested_bytes(failure), facts.get("in_use_bytes")
    limit = facts.get("limit_bytes") or facts.get("driver_total")
    pool = facts.get("pool") or None
    rest = None if pool is None or not limit else max(0, limit - pool)  # not yet reserved
    free, largest = facts.get("free_bytes", facts.get("driver_free")), facts.get("largest_stat")
    if failure.largest_piece:
        free = failure.free_pieces + (rest or 0)
        largest = max(failure.largest_piece, rest or 0)
    elif free is None and limit and used is not None:
        free = max(0, limit - used)
    reserved = facts.get("reserved_stat") or pool
    cause = _device_cause(failure, Figures(requested, free, largest, limit, used, reserved, None, "unknown"), rest)
    if used is None and failure.family == "theano" and limit and free is not None:
        used = limit - free  # the driver's figures
    return Figures(requested, free, largest, limit, used, reserved, None, cause)


def _device_cause(failure: Failure, sizes: Figures, rest: int | None) -> str:
    requested, free, limit, used = sizes.requested, sizes.free, sizes.limit, sizes.in_use
    if limit and requested and requested > limit:
        return "capacity"
    if requested is None or free is None:
        return "unknown"
    if rest is not None and limit and rest >= max(requested, _CLEARLY * limit):
        return "other process"  # the driver refused memory within the allocator's limit
    if free < requested:
        total = failure.facts.get("driver_total")
        held = total - failure.facts["driver_free"] - used if total and used is not None else 0
        return "other process" if total and held >= max(_CLEARLY * total, requested - free) else "capacity"
    if not failure.largest_piece and sizes.largest is None and limit and used is not None and used < limit / 2:
        return "other process"  # refused far below the limit
    return "fragmentation"


def _pytorch(failure: Failure) -> Figures:
    facts = failure.facts
    requested, free, used = facts.get("requested_bytes"), facts.get("free_bytes"), facts.get("in_use_bytes")
    spare, total = facts.get("unallocated"), facts.get("limit_bytes")
    reserved = facts.get("reserved_bytes")
    if reserved is None and used is not None and spare is not None:
        reserved = used + spare
    if spare is None and reserved is not None and used is not None:
        spare = max(0, reserved - used)
    if free is None and total and used is not None:
        free = max(0, total - used - facts.get("other_allocations", 0))
    others = _others(facts.get("processes"), facts.get("own_process"), reserved)
    if others is None and None not in (total, free, reserved):
        others = max(0, total - free - reserved)  # type: ignore[operator]
    limit = facts.get("allowed") or total
    if requested is None or free is None:
        cause = "unknown"
    elif limit and requested > limit:
        cause = "capacity"
    elif others and total and others >= max(_CLEARLY * total, requested - free - (spare or 0)):
        cause = "other process"
    elif free >= requested and "allowed" in facts:
        cause = "capacity"  # the limit of the process, not of the card
    elif (spare or 0) >= max(requested, _LOOSE * (total or 0)) or free >= requested:
        cause = "fragmentation"
    else:
        cause = "capacity"
    return Figures(requested, free, None, limit, used, reserved, others, cause)


def _others(processes: list[int] | None, own: int | None, reserved: int | None) -> int | None:
    """Return the bytes in use by other processes.

    In a container, PyTorch does not find its own process ID in the driver's list, and lists itself as another process.
    """
    if not processes:
        return None if own is None else 0
    nearest = min(processes, key=lambda count: abs(count - (reserved or 0)))
    is_own = own is None and reserved is not None and abs(nearest - reserved) <= max(GIB, 0.1 * reserved)
    return sum(processes) - (nearest if is_own else 0)


def _host(failure: Failure) -> Figures:
    facts = failure.facts
    requested, used = requested_bytes(failure), facts.get("in_use_bytes") or facts.get("group_usage")
    limit = facts.get("limit_bytes")
    group = facts.get("group_usage")  # of all processes that share the limit
    free = None if limit is None or group is None else max(0, limit - group)
    certain = failure.what in ("kernel", "cgroup", "slurm", "job", "container", "array")
    return Figures(requested, free, None, limit, used, None, None, "capacity" if certain else "unknown")


def failed_operation(failure: Failure) -> tuple[str | None, OperationName]:
    """Return the most informative operation, and its layer and phase."""
    best: tuple[str | None, OperationName] = (None, OperationName(None, None))
    for name in failure.operations:
        named = parse_operation(name)
        if failure.facts.get("keras") == 2:  # Keras 2 does not number its scopes
            named = OperationName(None, named.phase)
        if named.layer:
            return name, named
        if best[0] is None or (best[1].phase is None and named.phase):
            best = name, named
    return best


def failed_subject(failure: Failure, operation: str | None, phase: str | None) -> str | None:
    """Return the kind of tensor that failed, if its size does not depend on the batch.

    Returns:
        "weights" or "slots" that are being created, "arrays" that are copied to the device, "outputs" that `predict`
        concatenates, or None for anything else.
    """
    facts, sizes = failure.facts, failure.facts.get("tensor_shape")
    name = facts.get("eager") or operation or ""
    if failure.family != "tensorflow" or phase or "/" in name:
        return None
    if facts.get("in_initializer") or is_in_scope(name, "initializers"):
        return "slots" if facts.get("in_optimizer") else "weights"
    if facts.get("in_predict") and name == "ConcatV2":
        return "outputs"
    rows, batch = sizes[0] if sizes else 0, facts.get("given_batch")
    return "arrays" if is_in_scope(name, "arrays") or (batch and rows > batch) else None


_NUMBERED = re.compile(r"(.+)_\d{1,4}")


@dataclass(frozen=True)
class OperationName:
    """Layer of an operation, and "forward", "backward" or "optimizer", each None if unknown."""

    layer: str | None
    phase: str | None


@functools.cache
def _scope(kind: str) -> re.Pattern[str]:
    """Compile a pattern for the scopes of a kind in `data/scopes.json`, with an optional number."""
    names = "|".join(read_data("scopes")[kind])
    case, end = "" if kind == "wrappers" else "(?i)", "(?:_grad)?" if kind == "inside" else ""
    return re.compile(rf"{case}(?:{names}){end}(?:_\d+)?")


def is_in_scope(name: str, kind: str) -> bool:
    """Return whether a scope or operation is of a kind in `data/scopes.json`."""
    return _scope(kind).fullmatch(name[:400]) is not None


def model_number(operation: str) -> tuple[str, int] | None:
    """Return the scope of a model with an automatic name, and its number in the process from 1.

    Examples:
        >>> model_number("gradient_tape/functional_3_1/dense_7_1/MatMul")
        ('functional_3', 4)
    """
    for part in operation[:400].split("/"):
        match = _scope("models").fullmatch(part)
        if match and match["number"]:
            return part[: match.end("number")], int(match["number"]) + 1
    return None


def parse_operation(name: str) -> OperationName:
    """Return the layer and the phase of the operation of this name.

    Args:
        name: name of the operation in TensorFlow or XLA.

    Examples:
        >>> parse_operation("gradient_tape/vgg16_1/block4_conv2_1/Conv2D/Conv2DBackpropInput")
        OperationName(layer='block4_conv2', phase='backward')
    """
    name = name[:400].split(";")[0]
    if "(" in name:
        return OperationName(None, "backward" if "transpose(" in name else "forward" if "jvp(" in name else None)
    parts = [part for part in re.sub(r"__inference_\w+$|:\d+$|\^", "", name).split("/") if part]
    backward = BACKWARD in parts or any(re.fullmatch(r"gradients?(?:_\d+)?", part) for part in parts)
    # the tape sums gradients of a value with several uses outside any scope
    backward = backward or any(re.fullmatch(r"AddN(?:_\d+)?", part) for part in parts)
    backward = backward or any(part.endswith("_grad") or "Backprop" in part for part in parts)
    while parts and (_scope("wrappers").fullmatch(parts[0]) or parts[0] == BACKWARD):
        parts.pop(0)
    if parts and _scope("optimizers").fullmatch(parts[0]) and not backward:
        return OperationName(None, "optimizer")
    if len(parts) < 2:  # of no layer
        return OperationName(None, "backward" if backward else None)
    if _scope("losses").fullmatch(parts[0]) and not re.search(r"conv|dense|block", parts[0]):
        return OperationName(None, "backward" if backward else "forward")
    return OperationName(_layer(parts[:-1]), "backward" if backward else "forward")


def _layer(scopes: list[str]) -> str | None:
    """Return the layer: the numbered scopes below the model, up to the first internal scope of a layer."""
    if not _NUMBERED.fullmatch(scopes[0]):
        return None
    layers: list[str] = []
    for scope in scopes[1:]:
        numbered = _NUMBERED.fullmatch(scope)
        if not numbered or (layers and _scope("inside").fullmatch(scope)):
            break
        layers.append(numbered[1])
    return "/".join(layers) or None
