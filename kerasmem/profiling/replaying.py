"""Replay of a recorded step: bytes in use over time, and chunks at the peak."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerasmem.compat.living import living_objects
from kerasmem.devices.recording import ALLOCATE, AllocatorEvent
from kerasmem.models.own_step import variables_of
from kerasmem.profiling.results import TimelinePoint

_OF_THE_MODEL = ("weights", "metrics", "optimizer")
GRAIN = 256  # bytes; chunks are multiples of it
MOST_POINTS = 2000


@dataclass(frozen=True)
class KnownTensor:
    """A tensor at a known address.

    Attributes:
        address: address of its first byte.
        bytes: size.
        kind: "weights", "optimizer", "metrics", "inputs" or "constant".
        name: the variable's path, or a description.
        layer: names of the layer that made it, the outermost first; () for none.
        shape: TensorFlow's text of the shape ("[32,10]").
    """

    address: int
    bytes: int
    kind: str
    name: str
    layer: tuple[str, ...] = ()
    shape: str = ""


@dataclass
class AllocatedChunk:
    """A chunk in use.

    Attributes:
        requested: requested bytes.
        allocated: bytes of the chunk.
        operation: operation that requested it, or "".
        region: "output", "temp", "persist" or "".
        shape: TensorFlow's text of the shape.
        is_new: whether it was allocated in the step.
        is_recorded: whether an event describes it.
        tensor: the tensor in it, if known.
    """

    requested: int
    allocated: int
    operation: str = ""
    region: str = ""
    shape: str = ""
    is_new: bool = False
    is_recorded: bool = False
    tensor: KnownTensor | None = None


@dataclass(frozen=True)
class StepReplay:
    """A replayed step.

    Attributes:
        begin: bytes in use when it began.
        peak: the most bytes in use.
        operation: the last named operation at the peak, or "" if nothing was allocated.
        live: the chunks at the peak.
        unknown: bytes in use at the peak beyond those chunks, from before the step.
        points: bytes in use after every event.
    """

    begin: int
    peak: int
    operation: str
    live: tuple[AllocatedChunk, ...]
    unknown: int
    points: tuple[TimelinePoint, ...]


def replay_step(
    step: Sequence[AllocatorEvent],
    earlier: Sequence[AllocatorEvent] = (),
    before: Sequence[KnownTensor] = (),
    after: Sequence[KnownTensor] = (),
    *,
    is_complete: bool = False,
) -> StepReplay:
    """Replay a step's events.

    Args:
        step: its events, in order.
        earlier: events before it. Defaults to none.
        before: known tensors when the step begins. Defaults to none.
        after: known tensors when it has ended, for the variables that it created. Defaults to none.
        is_complete: whether the recording has all events of the process, so that every chunk is known. Defaults to
            False.
    """
    live = _chunks_before(earlier, before, is_complete)
    _add_freed_chunks(step, live)
    begin = _in_use_before(step, earlier)
    _drop_outside_tensors(live, begin)
    unknown = max(begin - sum(chunk.allocated for chunk in live.values()), 0)
    peak, at, operation, last = begin, 0, "", ""
    points = [TimelinePoint(0.0, begin, "")]
    start = step[0].time if step else 0
    for number, event in enumerate(step, 1):
        points.append(TimelinePoint((event.time - start) / 1e6, event.in_use, event.op))
        last = event.op or last  # kernels' own threads request scratch without an operation
        if event.in_use > peak:
            peak, at, operation = event.in_use, number, last
    _apply(step[:at], live, is_new=True)
    at_peak = tuple(live.values())
    _apply(step[at:], live, is_new=True)
    for tensor in after:
        chunk = live.get(tensor.address)
        if chunk is not None and chunk.tensor is None:
            chunk.tensor = tensor
    return StepReplay(begin, peak, operation, at_peak, unknown, tuple(points))


def _apply(events: Sequence[AllocatorEvent], live: dict[int, AllocatedChunk], is_new: bool) -> None:
    for event in events:
        if event.kind == ALLOCATE:
            live[event.address] = _chunk(event, is_new)
        else:
            live.pop(event.address, None)


def _chunks_before(
    earlier: Sequence[AllocatorEvent], before: Sequence[KnownTensor], is_complete: bool
) -> dict[int, AllocatedChunk]:
    live: dict[int, AllocatedChunk] = {}
    _apply(earlier, live, is_new=False)
    for tensor in before:
        if tensor.address in live:
            live[tensor.address].tensor = tensor
        elif not is_complete:  # its chunk is at least as large as this
            live[tensor.address] = AllocatedChunk(tensor.bytes, -(-tensor.bytes // GRAIN) * GRAIN, tensor=tensor)
    return live


def thin_timeline(points: Sequence[TimelinePoint], most: int = MOST_POINTS) -> tuple[TimelinePoint, ...]:
    """Return the first and last point, and the highest and lowest of equal parts.

    Args:
        points: points of a timeline.
        most: maximum number of points. Defaults to 2000.

    Examples:
        >>> points = [TimelinePoint(time, 1000 if time == 777 else time % 7, "") for time in range(5000)]
        >>> thinned = thin_timeline(points, 100)
        >>> len(thinned) <= 100, max(point.bytes for point in thinned)
        (True, 1000)
    """
    if len(points) <= most:
        return tuple(points)
    parts = (most - 2) // 2
    indices = {0, len(points) - 1}
    for part in range(parts):
        part_indices = range(part * len(points) // parts, (part + 1) * len(points) // parts)
        indices.add(max(part_indices, key=lambda index: points[index].bytes))
        indices.add(min(part_indices, key=lambda index: points[index].bytes))
    return tuple(points[index] for index in sorted(indices))


def _chunk(event: AllocatorEvent, is_new: bool = False) -> AllocatedChunk:
    return AllocatedChunk(event.requested, event.allocated, event.op, event.region, event.shape, is_new, True)


def _add_freed_chunks(step: Sequence[AllocatorEvent], live: dict[int, AllocatedChunk]) -> None:
    """Add earlier chunks that the step frees. Their events have the sizes."""
    seen: set[int] = set()
    for event in step:
        if event.kind == ALLOCATE:
            seen.add(event.address)
        elif event.address not in seen:
            chunk = live.setdefault(event.address, AllocatedChunk(event.requested, event.allocated))
            chunk.requested, chunk.allocated, chunk.is_recorded = event.requested, event.allocated, True
            seen.add(event.address)


def _drop_outside_tensors(live: dict[int, AllocatedChunk], begin: int) -> None:
    """Drop tensors outside the allocator, until the rest fits into the bytes in use.

    A tensor of a NumPy array may share the array's memory, which cannot be detected.
    """
    excess = sum(chunk.allocated for chunk in live.values()) - begin
    doubtful = [
        (chunk.tensor.kind in _OF_THE_MODEL, -chunk.allocated, address)
        for address, chunk in live.items()
        if chunk.tensor is not None and not chunk.is_recorded
    ]
    for _, size, address in sorted(doubtful):
        if excess <= 0:
            return
        del live[address]
        excess += size


def _in_use_before(step: Sequence[AllocatorEvent], earlier: Sequence[AllocatorEvent]) -> int:
    if step:
        first = step[0]
        return first.in_use + (-first.allocated if first.kind == ALLOCATE else first.allocated)
    return earlier[-1].in_use if earlier else 0


# A managed tensor of DLPack begins with the address of its data.
_CAPSULE_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
_CAPSULE_POINTER.restype = ctypes.c_void_p
_CAPSULE_POINTER.argtypes = [ctypes.py_object, ctypes.c_char_p]


def address_of(tensor: Any) -> int | None:
    """Return the address of an eager tensor's data on any device, or None if unknown.

    DLPack hands out the buffer itself, without a copy.
    """
    import tensorflow as tf

    try:
        capsule = tf.experimental.dlpack.to_dlpack(tensor)
        managed = _CAPSULE_POINTER(capsule, b"dltensor")
        address = ctypes.cast(managed, ctypes.POINTER(ctypes.c_void_p))[0]
    except Exception:  # a dtype or a tensor that DLPack does not know
        return None
    return int(address) if address else None


def known_tensor(tensor: Any, kind: str, name: str, layer: tuple[str, ...] = ()) -> KnownTensor | None:
    """Describe an eager tensor, or return None if its address is unknown."""
    address = address_of(tensor)
    if address is None:
        return None
    elements = int(tensor.shape.num_elements() or 0)
    shape = "[" + ",".join(str(size) for size in tensor.shape) + "]"
    return KnownTensor(address, elements * (tensor.dtype.size or 0), kind, name, layer, shape)


def known_tensors(tensors: Iterable[Any], kind: str, name: str) -> list[KnownTensor]:
    """Describe the eager tensors among objects."""
    described = (known_tensor(tensor, kind, name) for tensor in tensors if _is_eager(tensor))
    return [tensor for tensor in described if tensor is not None]


def tensors_of_model(model: Any, owners: Mapping[int, tuple[str, ...]]) -> list[KnownTensor]:
    """Describe the variables of a model, its metrics and its optimizers.

    Args:
        model: a Keras model with weights.
        owners: names of the layer that made a variable, by the variable's id.
    """
    tensors = []
    for variable, kind in variables_of(model).values():
        value: Any = variable.value
        if not hasattr(value, "read_value"):  # it has no value yet
            continue
        tensor = known_tensor(value.read_value(), kind, variable.path, owners.get(id(variable), ()))
        if tensor is not None:
            tensors.append(tensor)
    return tensors


def tensors_of_python() -> list[KnownTensor]:
    """Describe the tensors of Python objects: constants of a step, a dataset, stored results."""
    tensors = (value for value in living_objects() if _is_eager(value))
    return known_tensors((tensor for tensor in tensors if tensor.dtype.size), "constant", "a tensor kept in Python")


def _is_eager(value: Any) -> bool:
    import tensorflow as tf

    return type(value).__name__ == "EagerTensor" and tf.is_tensor(value)
