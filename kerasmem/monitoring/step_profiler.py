"""The memory of one training batch of a `fit`: its peak by layer and category, and the timeline that leads to it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from kerasmem.checks import whole
from kerasmem.cluster import Worker, own_path
from kerasmem.errors import UsageError
from kerasmem.files import write_named
from kerasmem.profiling.recorder import ProfilingError, StepRecorder
from kerasmem.profiling.results import StepProfile

RUN_UP = 8  # batches before the one, recorded too: more than a data pipeline usually keeps ready


class BatchProfile:
    """Profiles one batch of each `fit`, driven by a logger's hooks, and writes the profile beside the log.

    TensorFlow's profiler records the batch and up to 8 before it, which makes these slower, and no other. To see which
    operation belongs to which layer, the step is traced again when `fit` begins. On a CPU the allocator keeps records
    only if `TF_CPU_ALLOCATOR_USE_BFC=true` was set before Python started.

    Args:
        batch: number of the batch from 1 through all epochs of a `fit`; at least 2, as the first one sets things up.
        log: path of the log, from which the profile's is made, or None to write none.
        note: called with a sentence on a failure; training goes on.

    Attributes:
        profile: of the latest run, or None.

    Raises:
        UsageError: If `batch` is not a whole number from 2.
    """

    def __init__(self, batch: int, log: str | os.PathLike[str] | None, note: Callable[[str], None]) -> None:
        self._batch = whole("profile_batch", batch, 2)
        self._log, self._note = log, note
        self._path: Path | None = None
        self._recorder: StepRecorder | None = None
        self._seen = 0
        self._is_recording = self._is_running = False
        self.profile: StepProfile | None = None

    def begin_run(self, model: Any, worker: Worker | None) -> None:
        """Begin a `fit` and watch its step being traced."""
        self._let_go()
        self.profile, self._seen = None, 0
        if model is None or keras.config.backend() != "tensorflow":
            why = "a loop of one's own has no step to trace" if model is None else "Keras does not run on TensorFlow"
            self._note(f"profile: {why}, so there is none")
            return
        self._is_running = True
        self._path = None if self._log is None else own_path(Path(self._log), worker).with_suffix(".profile.json")
        self._recorder = StepRecorder(model)
        with contextlib.suppress(TypeError):  # a model's own `make_train_function` may take no arguments
            model.make_train_function(force=True)
        self._recorder.watch()
        if self._batch <= RUN_UP:
            self._try(self._recorder.record)

    def begin_batch(self) -> None:
        """Begin to record if this is the batch."""
        # With `steps_per_execution` several batches run as one: the one that is asked for is in the last that begins.
        self._seen += 1
        if self._recorder is None or self._seen > self._batch:
            return
        if self._seen == self._batch:
            self._is_recording = self._try(self._recorder.begin)
        elif self._seen >= self._batch - RUN_UP:
            self._try(self._recorder.record)

    def end_batch(self) -> None:
        """End the recording if this was the batch, and write the file."""
        if self._recorder is None or not self._is_recording:
            return
        self._is_recording = False
        try:
            self.profile = self._recorder.end()
            if self._path is not None:
                text = json.dumps(self.profile.to_dict(), indent=1) + "\n"
                write_named("path", str(self._path), text.encode())
        except (ProfilingError, UsageError) as error:
            self._fail(str(error))
        except OSError as error:
            self._fail(f"{self._path} cannot be written: {error.strerror or error}")
        self._let_go()

    def end_run(self) -> None:
        """Let go of everything, and note a batch that never came."""
        if self._is_running and self._recorder is not None:
            self._fail(f"batch {self._batch} was to be profiled, and training had {self._seen}")
        self._is_running = False
        self._let_go()

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except ProfilingError as error:
            self._fail(str(error))
            return False
        return True

    def _fail(self, reason: str) -> None:
        self._let_go()
        self._note(f"profile: {reason}")

    def _let_go(self) -> None:
        recorder, self._recorder, self._is_recording = self._recorder, None, False
        if recorder is not None:
            recorder.cancel()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the recording out of copies."""
        return {**self.__dict__, "_recorder": None, "_is_recording": False}
