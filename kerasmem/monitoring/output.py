"""The log file of a recorder. A disk that fails ends the writing, not the training."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kerasmem.cluster import Worker, own_path
from kerasmem.monitoring.logfile import LogFile
from kerasmem.monitoring.timeline import Sample
from kerasmem.processes.children import GOES_ON

_begun: set[str] = set()  # families whose file has been begun in this process


class Output:
    """The log file of a recorder. A copy of it writes to the same file through a handle of its own.

    Args:
        path: the log file, or None for none.
        append: add to the file of an earlier process, as in a script that `kerasmem run` restarts.

    Attributes:
        file: the open log; None between runs, without a path, and once writing has failed.
    """

    def __init__(self, path: str | os.PathLike[str] | None, append: bool) -> None:
        self._path, self._append = path, append
        self._family = uuid.uuid4().hex  # shared by copies, which add to the same file
        self.file: LogFile | None = None

    def open(self, worker: Worker | None, again: bool) -> int:
        """Open the file for a run, under the worker's own name if there are several; return its next run number.

        Args:
            worker: this process's place among several.
            again: whether this recorder has recorded before, so that the file is continued.

        Raises:
            UsageError: If the file cannot be written.
        """
        if self._path is None:
            return 0
        append = self._append or again or self._family in _begun or bool(os.environ.get(GOES_ON))
        self.file = LogFile(own_path(Path(self._path), worker), append=append)
        _begun.add(self._family)
        return self.file.next_run

    def start_run(self, run: int, notes: Sequence[str], worker: Worker | None) -> None:
        """Write the head of a run.

        Raises:
            UsageError: If the file cannot be written after all.
        """
        if self.file is not None:
            ranks = {} if worker is None else {"rank": worker.rank, "ranks": worker.size}
            self.file.start_run(run, datetime.now(timezone.utc).isoformat(), notes, **ranks)

    def add(self, samples: Sequence[Sample]) -> str | None:
        """Write samples; return a sentence if that failed."""
        return None if self.file is None else self._try(self.file.add, samples)

    def add_object(self, kind: str, **values: Any) -> str | None:
        """Write an object of another kind; return a sentence if that failed."""
        return None if self.file is None else self._try(self.file.add_object, kind, **values)

    def close(self) -> None:
        """Close the file; another run opens it again."""
        file, self.file = self.file, None
        if file is not None:
            file.close()

    def _try(self, write: Callable[..., None], *args: Any, **values: Any) -> str | None:
        try:
            write(*args, **values)
        except OSError as error:
            self.close()
            return f"file: writing to {self._path} stopped: {error.strerror or error}; .timeline goes on"
        return None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open file out of copies."""
        return {**self.__dict__, "file": None}
