"""Recordings of an allocator by TensorFlow's profiler: all allocations and deallocations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kerasmem.errors import InputError

ALLOCATE, DEALLOCATE = "allocate", "free"
_KINDS = {"MemoryAllocation": ALLOCATE, "MemoryDeallocation": DEALLOCATE}
# The profiler's names → fields of `AllocatorEvent`.
_FIELDS = {
    "allocator_name": "allocator", "addr": "address", "requested_bytes": "requested", "allocation_bytes": "allocated",
    "bytes_allocated": "in_use", "tf_op": "op", "region_type": "region", "shape": "shape",
}  # fmt: skip


class AllocatorEvent(NamedTuple):
    """One allocation or deallocation.

    Attributes:
        time: time in picoseconds of the recording's clock.
        kind: "allocate" or "free".
        allocator: name of the allocator, such as "bfc_cpu_allocator_for_gpu" or "GPU_0_bfc".
        address: address of the chunk.
        requested: requested bytes.
        allocated: bytes of the chunk.
        in_use: bytes of all chunks in use after this event.
        op: name of the running operation with its scopes, or "".
        region: purpose of the memory: "output", "temp", "persist" or "".
        shape: TensorFlow's text of the shape, such as "[32,10]", or "".
    """

    time: int
    kind: str
    allocator: str
    address: int
    requested: int
    allocated: int
    in_use: int
    op: str = ""
    region: str = ""
    shape: str = ""


class Mark(NamedTuple):
    """Start of a `tf.profiler.experimental.Trace(name)`, in picoseconds."""

    time: int
    name: str


def start_recording(folder: str | os.PathLike[str]) -> None:
    """Start to record the allocators into a folder with TensorFlow's profiler."""
    import tensorflow as tf

    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)
    tf.profiler.experimental.start(os.fspath(folder), options=options)


def of_device(events: Iterable[AllocatorEvent], device: str) -> tuple[AllocatorEvent, ...]:
    """Return the events of the allocator of a device, such as "CPU:0" or "GPU:0"."""
    kind, _, number = device.partition(":")
    name = f"GPU_{number}_bfc" if kind == "GPU" else "bfc_cpu_allocator_for_gpu"
    return tuple(event for event in events if event.allocator == name)


def read_recording(
    folder: str | os.PathLike[str], mark_prefix: str
) -> tuple[tuple[AllocatorEvent, ...], tuple[Mark, ...]]:
    """Read the ordered events of all allocators and threads, and the marks of the program.

    Only BFC allocators record events: those of GPUs, and of the CPU if `TF_CPU_ALLOCATOR_USE_BFC=true`.

    Args:
        folder: folder of `start_recording`. Its newest recording is read.
        mark_prefix: prefix of the names of marks.

    Raises:
        InputError: If the folder has no recording.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    files = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not files:
        raise InputError(f"{folder}: has no .xplane.pb file; was the profiler stopped?")
    space = xplane_pb2.XSpace()
    space.ParseFromString(files[-1].read_bytes())
    events = [event for plane in space.planes for event in _events_of(plane)]
    # The allocator's lock makes times reflect the order of events, and the stable sort keeps that of equal times.
    events.sort(key=lambda event: event.time)
    marks = [mark for plane in space.planes for mark in _marks_of(plane, mark_prefix)]
    return tuple(events), tuple(sorted(marks))


def _events_of(plane: Any) -> Iterator[AllocatorEvent]:
    kinds = {key: _KINDS[item.name] for key, item in plane.event_metadata.items() if item.name in _KINDS}
    names = {key: item.name for key, item in plane.stat_metadata.items()}
    fields = {key: _FIELDS[name] for key, name in names.items() if name in _FIELDS}
    for line in plane.lines:
        begin = line.timestamp_ns * 1000
        for event in line.events:
            kind = kinds.get(event.metadata_id)
            if kind is None:
                continue
            values: dict[str, Any] = {"time": begin + event.offset_ps, "kind": kind}
            for stat in event.stats:
                if stat.metadata_id in fields:
                    form = stat.WhichOneof("value")
                    value = getattr(stat, form)
                    values[fields[stat.metadata_id]] = names.get(value, "") if form == "ref_value" else value
            yield AllocatorEvent(**values)


def _marks_of(plane: Any, prefix: str) -> Iterator[Mark]:
    mark_names = {key: item.name for key, item in plane.event_metadata.items() if item.name.startswith(prefix)}
    for line in plane.lines:
        for event in line.events:
            if event.metadata_id in mark_names:
                yield Mark(line.timestamp_ns * 1000 + event.offset_ps, mark_names[event.metadata_id])
