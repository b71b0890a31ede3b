"""The profile of one batch inside a logged run: `MemoryLogger(profile_batch=…)`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerasmem.cluster import Worker
from kerasmem.errors import UsageError
from kerasmem.monitoring.ranks import own_path

if TYPE_CHECKING:
    from kerasmem.monitoring.step_profiler import StepProfiler
    from kerasmem.profiling.results import StepProfile


class OneProfile:
    """Drives a `StepProfiler` from the logger's hooks, and writes what it finds beside the log.

    Args:
        batch: the batch, counted from 1 through all epochs of a `fit`.
        log: the log's path, from which the profile's is made; None to write none.
        note: called with a sentence on what went wrong.

    Attributes:
        result: the latest profile; None as long as there is none.

    Raises:
        UsageError: `batch` is not a whole number from 2.
    """

    def __init__(self, batch: int, log: str | os.PathLike[str] | None, note: Callable[[str], None]) -> None:
        from kerasmem.monitoring.step_profiler import StepProfiler

        try:
            self._profiler: StepProfiler = StepProfiler(batch)
        except UsageError as error:
            raise UsageError(f"profile_{error}") from error
        self._log = None if log is None else Path(log)
        self._note = note
        self._worker: Worker | None = None
        self._running = self._written = False

    @property
    def result(self) -> StepProfile | None:
        """The profile of the latest `fit`."""
        return self._profiler.profile

    def begin_run(self, model: Any, worker: Worker | None) -> None:
        """Begin a `fit`; on another backend than TensorFlow say why there will be no profile."""
        import keras

        self._worker, self._written = worker, False
        if model is None or keras.config.backend() != "tensorflow":
            why = "a loop of one's own has no step to trace" if model is None else "Keras does not run on TensorFlow"
            self._note(f"profile: {why}, so there is none")
            return
        self._running = True
        self._profiler.set_model(model)
        self._profiler.on_train_begin()

    def begin_batch(self, batch: int) -> None:
        """Begin to record, where this is the batch."""
        if self._running:
            self._profiler.on_train_batch_begin(batch)

    def end_batch(self, batch: int) -> None:
        """End the recording, where this was the batch, and write the file."""
        if not self._running:
            return
        self._profiler.on_train_batch_end(batch)
        if self.result is not None and not self._written:
            self._written = True
            self._write(self.result)

    def end_run(self) -> None:
        """Let go of everything."""
        if self._running:
            self._running = False
            self._profiler.on_train_end()
            if self._profiler.failure is not None:
                self._note(f"profile: {self._profiler.failure}")

    def _write(self, profile: StepProfile) -> None:
        if self._log is None:
            return
        path = own_path(self._log, self._worker).with_suffix(".profile.json")
        try:
            path.write_text(json.dumps(profile.to_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self._note(f"profile: {path} cannot be written: {error.strerror or error}")
