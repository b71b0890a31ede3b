"""Recordings of a real allocator: every allocation and every free, by TensorFlow's profiler."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kerasmem.errors import InputError

ALLOCATE, DEALLOCATE = "allocate", "free"
_KINDS = {"MemoryAllocation": ALLOCATE, "MemoryDeallocation": DEALLOCATE}
# Fields of `AllocatorEvent` by the profiler's names for them.
_FIELDS = {
    "allocator_name": "allocator", "addr": "address", "requested_bytes": "requested", "allocation_bytes": "allocated",
    "bytes_allocated": "in_use", "tf_op": "op", "region_type": "region", "shape": "shape",
}  # fmt: skip


class AllocatorEvent(NamedTuple):
    """One allocation or one free.

    Attributes:
        time: in picoseconds, on the clock of the recording.
        kind: "allocate" or "free".
        allocator: its name: "bfc_cpu_allocator_for_gpu", "GPU_0_bfc".
        address: of the chunk.
        requested: bytes asked for.
        allocated: bytes of the chunk.
        in_use: bytes of all chunks handed out, after this event.
        op: the operation that runs, with its name scopes, or "" outside of any.
        region: its purpose: "output", "temp", "persist" or "".
        shape: as TensorFlow writes it ("[32,10]"), or "".
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
    """The begin of a `tf.profiler.experimental.Trace(name)`, in picoseconds."""

    time: int
    name: str


def start_recording(folder: str | os.PathLike[str]) -> None:
    """Start TensorFlow's profiler to record the allocators into a folder."""
    import tensorflow as tf

    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)
    tf.profiler.experimental.start(os.fspath(folder), options=options)


def of_device(events: Iterable[AllocatorEvent], device: str) -> tuple[AllocatorEvent, ...]:
    """Return the events of the allocator of a device ("CPU:0", "GPU:0")."""
    kind, _, number = device.partition(":")
    name = f"GPU_{number}_bfc" if kind == "GPU" else "bfc_cpu_allocator_for_gpu"
    return tuple(event for event in events if event.allocator == name)


def read_recording(
    folder: str | os.PathLike[str], mark_prefix: str
) -> tuple[tuple[AllocatorEvent, ...], tuple[Mark, ...]]:
    """Return the allocator's events in order, across threads, and the marks that the traced program set.

    Only allocators of the BFC kind record: GPUs, and the CPU's if `TF_CPU_ALLOCATOR_USE_BFC=true` was set.

    Args:
        folder: the folder of `start_recording`; the newest recording in it is taken.
        mark_prefix: prefix of the names of marks.

    Raises:
        InputError: If it holds no recording.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    files = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda each: each.stat().st_mtime_ns)
    if not files:
        raise InputError(f"{folder}: has no .xplane.pb file; was the profiler stopped?")
    space = xplane_pb2.XSpace()
    space.ParseFromString(files[-1].read_bytes())
    found = [event for plane in space.planes for event in _events_of(plane)]
    # Events are recorded under the allocator's lock, so that their clock has their order; a sort keeps that of equals.
    found.sort(key=lambda event: event.time)
    marks = [mark for plane in space.planes for mark in _marks_of(plane, mark_prefix)]
    return tuple(found), tuple(sorted(marks))


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
    wanted = {key: item.name for key, item in plane.event_metadata.items() if item.name.startswith(prefix)}
    for line in plane.lines:
        for event in line.events:
            if event.metadata_id in wanted:
                yield Mark(line.timestamp_ns * 1000 + event.offset_ps, wanted[event.metadata_id])
