"""Scalars for TensorBoard, written by the tensorboard package itself: no TensorFlow op, no thread."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from pathlib import Path
from typing import Any

from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.monitoring.timeline import SIZES, Sample


def require_tensorboard() -> None:
    """Raise MissingExtraError unless the tensorboard package can be imported."""
    if importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError("MemoryLogger(tensorboard=…)", "tensorboard")


class Board:
    """Event files, one folder a phase ("train", "validation", …) as Keras's TensorBoard callback has them.

    Batches go to `memory/<device>/<size>` against the number of batches so far in the phase, epochs to
    `epoch_memory/<device>/<size>` against the epoch.

    Args:
        folder: where to write; made if missing.

    Raises:
        MissingExtraError: tensorboard is not installed.
        UsageError: the folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require_tensorboard()
        self._folder = Path(folder)
        self._writers: dict[str, Any] = {}
        self._steps: dict[str, int] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"tensorboard: {str(folder)!r} cannot be made: {error.strerror or error}") from error

    def add(self, samples: list[Sample]) -> None:
        """Write one moment's samples; raises OSError where the system does not take them."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        first = samples[0]
        if first.phase == "epoch":
            folder, prefix, step = "train", "epoch_memory", first.epoch or 0
        else:
            folder, prefix = first.phase, "memory"
            step = self._steps.get(folder, 0) + (first.steps or 1)
            self._steps[folder] = step
        values = [
            Summary.Value(tag=f"{prefix}/{sample.device or 'host'}/{name}", simple_value=float(size))
            for sample in samples
            for name in SIZES
            if (size := getattr(sample, name)) is not None
        ]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._writer(folder).write(event.SerializeToString())

    def close(self) -> None:
        """Close the event files; writing again opens new ones."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _writer(self, folder: str) -> Any:
        if folder not in self._writers:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter

            target = self._folder / folder
            target.mkdir(parents=True, exist_ok=True)
            now = time.time()
            unique = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
            name = f"events.out.tfevents.{int(now)}.{unique}.memory"
            writer = RecordWriter((target / name).open("ab", buffering=0))
            writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            self._writers[folder] = writer
        return self._writers[folder]
