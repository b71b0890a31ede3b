"""What a recorder writes to: the log file and TensorBoard. A disk that fails ends the writing, not the training."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Union

from kerasmem.cluster import Worker, own_path
from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.monitoring.logfile import Format, LogFile
from kerasmem.monitoring.timeline import SIZES, Sample
from kerasmem.processes.children import GOES_ON

_Path = Union[str, "os.PathLike[str]"]
_begun: set[str] = set()  # families whose file has been begun in this process


class Outputs:
    """The file and the board of a recorder; a copy has the same, and opens its own.

    Args:
        path: the log file; None for none.
        format: "csv" or "jsonl".
        append: add to what an earlier process wrote, as a script does that `kerasmem run` runs again.
        board: TensorBoard's folder; None for none.

    Attributes:
        file: the open log; None between runs, without a path, and once writing has failed.
    """

    file: LogFile | None
    _board: Board | None

    def __init__(self, path: _Path | None, format: Format | None, append: bool, board: _Path | None) -> None:
        self._path, self._format, self._append, self._board_folder = path, format, append, board
        self._family = uuid.uuid4().hex  # copies have the same, for they write to the same file
        self.file = self._board = None

    @property
    def any(self) -> bool:
        """Whether there is something open to write samples to."""
        return self.file is not None or self._board is not None

    def open(self, worker: Worker | None, again: bool, busy: Callable[[], bool] | None) -> int:
        """Open for a run, under the worker's own names where there are several; return the file's next run number.

        Args:
            worker: which of several this process is.
            again: this recorder has recorded before, so the file is continued.
            busy: whether the run is still going on, where that can be told.

        Raises:
            UsageError: the file cannot be written, or is another recorder's that is busy.
        """
        if self._path is not None:
            append = self._append or again or self._family in _begun or bool(os.environ.get(GOES_ON))
            self.file = LogFile(own_path(Path(self._path), worker), self._format, append=append, busy=busy)
            _begun.add(self._family)
        if self._board is None and self._board_folder is not None:
            folder = self._board_folder
            self._board = Board(folder if worker is None else os.path.join(folder, f"rank{worker.rank}"))
        return 0 if self.file is None else self.file.next_run

    def start_run(self, run: int, notes: Sequence[str], worker: Worker | None) -> None:
        """Write what is known at the start of a run.

        Raises:
            UsageError: the file cannot be written after all.
        """
        if self.file is not None:
            who = {} if worker is None else {"rank": worker.rank, "ranks": worker.size}
            self.file.start_run(run, datetime.now(timezone.utc).isoformat(), notes, **who)

    def add(self, moments: Sequence[list[Sample]]) -> list[str]:
        """Write the samples of some moments; return what went wrong, in sentences."""
        failures = []
        if self.file is not None:
            try:
                self.file.add([sample for samples in moments for sample in samples])
            except OSError as error:
                failures.append(self._stop_file(error))
        if self._board is not None:
            try:
                for samples in moments:
                    self._board.add(samples)
            except OSError as error:
                self._board = self._board_folder = None
                failures.append(f"tensorboard: writing stopped: {error.strerror or error}")
        return failures

    def add_object(self, kind: str, **values: Any) -> list[str]:
        """Write an object of another kind into the file; return what went wrong, in sentences."""
        if self.file is not None:
            try:
                self.file.add_object(kind, **values)
            except OSError as error:
                return [self._stop_file(error)]
        return []

    def close(self) -> None:
        """Close what is open; another run opens it again."""
        file, self.file = self.file, None
        if file is not None:
            file.close()
        if self._board is not None:
            self._board.close()

    def _stop_file(self, error: OSError) -> str:
        file, self.file = self.file, None
        if file is not None:
            file.close()
        return f"file: writing to {self._path} stopped: {error.strerror or error}; .timeline goes on"

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds names, and no open file."""
        return {**self.__dict__, "file": None, "_board": None}


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

    def __init__(self, folder: _Path) -> None:
        require_tensorboard()
        self._folder = Path(folder)
        self._writers: dict[str, Any] = {}
        self._steps: dict[str, int] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"tensorboard: {str(folder)!r} cannot be made: {error.strerror or error}") from error
        # Here, as `add` runs in another thread too: TensorBoard's modules import one another in circles, and what
        # Keras's own callback imports at the same time would fail.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._record_writer = Event, Summary, RecordWriter

    def add(self, samples: list[Sample]) -> None:
        """Write one moment's samples; raises OSError where the system does not take them."""
        first = samples[0]
        if first.phase == "epoch":
            folder, prefix, step = "train", "epoch_memory", first.epoch or 0
        else:
            folder, prefix = first.phase, "memory"
            step = self._steps.get(folder, 0) + (first.steps or 1)
            self._steps[folder] = step
        values = [
            self._summary.Value(tag=f"{prefix}/{sample.device or 'host'}/{name}", simple_value=float(size))
            for sample in samples
            for name in SIZES
            if (size := getattr(sample, name)) is not None
        ]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._writer(folder).write(event.SerializeToString())

    def close(self) -> None:
        """Close the event files; writing again opens new ones."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _writer(self, folder: str) -> Any:
        if folder not in self._writers:
            target = self._folder / folder
            target.mkdir(parents=True, exist_ok=True)
            now = time.time()
            unique = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
            name = f"events.out.tfevents.{int(now)}.{unique}.memory"
            writer = self._record_writer((target / name).open("ab", buffering=0))
            writer.write(self._event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            self._writers[folder] = writer
        return self._writers[folder]
