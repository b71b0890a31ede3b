"""Keeps the rows, notes and phases of a recording in memory, writes them to its log file, and adds up its cost."""

from __future__ import annotations

import os
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from kerasmem.cluster import Worker, own_path
from kerasmem.errors import warn_user
from kerasmem.monitoring.logfile import LogFile, open_logs, write_waiting
from kerasmem.monitoring.timeline import FORMAT_VERSION, PhasePeaks, Sample, Table, Timeline, pack
from kerasmem.processes.children import GOES_ON
from kerasmem.records import Record

_MOST_BYTES = 120_000_000  # of rows in memory, about a million
_begun: set[str] = set()  # families with a file begun by this process


class RunLog:
    """Rows, notes and phases of a recording, in memory and in the log file.

    If the disk fails, writing stops with a warning, and the recording continues in memory.

    Args:
        filename: path of the log file, or None to keep everything in memory only.
        append: whether to add to a file of an earlier process.
        write_rows: writes the rows that the recorder still holds back.

    Attributes:
        run: number of the run in progress, or None between runs.
        worker: number of this process in the latest run, or None for a single process.
        notes: failed readings and their reasons.
        phases: largest sizes of the background readings, phase by phase.
        family: identifies a recording and its copies, which add to the same file.
        bytes: size of the rows in memory.
    """

    def __init__(self, filename: str | os.PathLike[str] | None, append: bool, write_rows: Callable[[], None]) -> None:
        self.run: int | None = None
        self.worker: Worker | None = None
        self.notes: dict[str, None] = {}
        self.phases: list[PhasePeaks] = []
        self.family = uuid.uuid4().hex
        self.bytes = 0
        self._filename, self._append, self._write_rows = filename, append, write_rows
        self._file: LogFile | None = None
        self._tables: deque[Table] = deque([pack(())])
        self._next_run = 0

    def timeline(self) -> Timeline:
        """Return the rows so far, as an immutable copy."""
        return Timeline(np.concatenate(self._tables), self.notes, self.phases)

    def open(self, worker: Worker | None) -> None:
        """Open the log file, under the worker's own name if there are several.

        Raises:
            UsageError: If the file cannot be written.
        """
        self.worker = worker
        if self._filename is None:
            return
        target = own_path(Path(self._filename), worker)
        write_waiting(target)  # rows of a logger whose run ended with an exception
        has_begun = self._next_run > 0 or self.family in _begun
        self._file = LogFile(target, self._append or has_begun or bool(os.environ.get(GOES_ON)))
        open_logs[target.resolve()] = self._write_rows
        self._next_run = max(self._next_run, self._file.next_run)
        _begun.add(self.family)

    def begin_run(self) -> None:
        """Assign the next run number, and write the run's start and the notes so far."""
        self.run = self._next_run
        self._next_run += 1
        ranks = {} if self.worker is None else {"rank": self.worker.rank, "ranks": self.worker.size}
        started = datetime.now(timezone.utc).isoformat()
        self.add_object("run", format_version=FORMAT_VERSION, started=started, notes=list(self.notes), **ranks)

    def end_run(self) -> None:
        """Close the log file."""
        self._close()
        self.run = None

    def add_note(self, text: str, *, warns: bool = False) -> None:
        """Add a note, once, to memory and the file. With `warns`, also warn the user."""
        if text in self.notes:
            return
        self.notes[text] = None
        if self.run is not None:
            self.add_object("note", text=text)
        if warns:
            warn_user(f"MemoryLogger: {text}")

    def add_rows(self, samples: Sequence[Sample]) -> None:
        """Keep samples and write them. In memory, the oldest are dropped beyond 120 MB."""
        self._tables.append(pack(samples))
        self.bytes += sys.getsizeof(self._tables[-1])
        while self.bytes > _MOST_BYTES:
            self.bytes -= sys.getsizeof(self._tables.popleft())
        self._write(lambda file: file.add(samples))

    def add_phases(self, phases: Iterable[PhasePeaks]) -> None:
        """Keep the peaks of phases and write them."""
        for peaks in phases:
            self.phases.append(peaks)
            self.add_object("phase", **vars(peaks))

    def add_object(self, kind: str, **values: Any) -> None:
        """Write an object of another kind than a sample."""
        values = {"run": self.run, **values}
        self._write(lambda file: file.add_object(kind, **values))

    def _write(self, action: Callable[[LogFile], None]) -> None:
        if self._file is None:
            return
        try:
            action(self._file)
        except OSError as error:
            self._close()
            reason = error.strerror or error
            self.add_note(
                f"file: writing to {self._filename} stopped: {reason}; `timeline` still gets all rows", warns=True
            )

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            open_logs.pop(file.path.resolve(), None)
            file.close()


@dataclass(frozen=True)
class Overhead(Record, what="overhead", also=("per_batch_seconds",)):
    """Time spent inside the logger, in seconds.

    Attributes:
        total_seconds: in all hooks.
        batch_seconds: in the hooks of batches only.
        batches: number of batches (of steps, with `steps_per_execution`), logged or not.
    """

    total_seconds: float
    batch_seconds: float
    batches: int

    @property
    def per_batch_seconds(self) -> float | None:
        """Mean time per batch, or None before the first."""
        return self.batch_seconds / self.batches if self.batches else None
