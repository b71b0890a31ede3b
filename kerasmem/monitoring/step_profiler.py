"""`StepProfiler`: a Keras callback that profiles the memory of one batch; `BatchProfile`: the same inside a logger."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Any

import keras

from kerasmem.cluster import Worker, own_path
from kerasmem.errors import UsageError
from kerasmem.files import write_named
from kerasmem.profiling.recorder import ProfilingError, StepRecorder
from kerasmem.profiling.results import StepProfile

RUN_UP = 8  # batches before the one, recorded too: more than a data pipeline usually keeps ready


class StepProfiler(keras.callbacks.Callback):
    """Profile the memory of one training batch: its peak by layer and category, and the timeline that leads to it.

    TensorFlow's profiler records the batch and up to 8 before it, which makes these slower, and no other. To see which
    operation belongs to which layer, the step is traced again when `fit` begins. What goes wrong is a warning; training
    goes on.
    On a CPU the allocator keeps records only where `TF_CPU_ALLOCATOR_USE_BFC=true` was set before Python started.

    Args:
        batch: the batch that is profiled, counted from 1 through all epochs of a `fit`; at least 2, as the first one
            sets things up.
        path: a file that the profile is written to as JSON, or None. Its folder must exist.

    Attributes:
        profile: the `StepProfile`, or None as long as there is none.
        failure: why there is none, or None.

    Raises:
        UsageError: `batch` is not a whole number from 2, or the folder of `path` does not exist.

    Examples:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> profiler = StepProfiler(batch=2)
        >>> history = model.fit(np.ones((96, 8)), np.ones((96, 1)), verbose=0, callbacks=[profiler])  # doctest: +SKIP
        >>> profiler.profile.bytes.total  # doctest: +SKIP
    """

    def __init__(self, batch: int = 3, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        given: Any = batch  # NumPy's whole numbers too
        if isinstance(given, bool) or not isinstance(given, Integral) or int(given) < 2:
            raise UsageError(f"batch {batch!r}: must be a whole number from 2 (the first batch sets things up)")
        self._path = None if path is None else Path(path)
        if self._path is not None and not self._path.absolute().parent.is_dir():
            raise UsageError(f"{self._path}: there is no folder {self._path.absolute().parent}")
        self._batch = int(batch)
        self._recorder: StepRecorder | None = None
        self._seen = 0
        self._is_recording = False
        self.profile: StepProfile | None = None
        self.failure: str | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Watch the step being traced."""
        self._let_go()
        self.profile, self.failure, self._seen = None, None, 0
        self._recorder = StepRecorder(self.model)
        with contextlib.suppress(TypeError):  # a model's own `make_train_function` may take no arguments
            self.model.make_train_function(force=True)
        self._recorder.watch()
        if self._batch <= RUN_UP:
            self._try(self._recorder.record)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin to record, where this is the batch."""
        # With `steps_per_execution` several batches run as one: the one that is asked for is in the last that begins.
        self._seen += 1
        if self._recorder is None or self._seen > self._batch:
            return
        if self._seen == self._batch:
            self._is_recording = self._try(self._recorder.begin)
        elif self._seen >= self._batch - RUN_UP:
            self._try(self._recorder.record)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """End the recording, where this was the batch, and write the file."""
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

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Let go of everything, and say so where the batch never came."""
        if self.profile is None and self.failure is None:
            self._fail(f"batch {self._batch} was to be profiled, and training had {self._seen}")
        self._let_go()

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except ProfilingError as error:
            self._fail(str(error))
            return False
        return True

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._let_go()
        warnings.warn(f"StepProfiler: {reason}", stacklevel=3)

    def _let_go(self) -> None:
        recorder, self._recorder, self._is_recording = self._recorder, None, False
        if recorder is not None:
            recorder.cancel()

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds settings and results; the recording and the model stay with the original."""
        return {**self.__dict__, "_model": None, "_recorder": None, "_is_recording": False}


class BatchProfile(StepProfiler):
    """A `StepProfiler` that a logger drives, and that writes what it finds beside the log.

    Args:
        batch: the batch, counted from 1 through all epochs of a `fit`.
        log: the log's path, from which the profile's is made; None to write none.
        note: called with a sentence on what went wrong.

    Raises:
        UsageError: `batch` is not a whole number from 2.
    """

    def __init__(self, batch: int, log: str | os.PathLike[str] | None, note: Callable[[str], None]) -> None:
        try:
            super().__init__(batch)
        except UsageError as error:
            raise UsageError(f"profile_{error}") from error
        self._log = None if log is None else Path(log)
        self._note = note
        self._is_running = False

    def begin_run(self, model: Any, worker: Worker | None) -> None:
        """Begin a `fit`; on another backend than TensorFlow say why there will be no profile."""
        if model is None or keras.config.backend() != "tensorflow":
            why = "a loop of one's own has no step to trace" if model is None else "Keras does not run on TensorFlow"
            self._note(f"profile: {why}, so there is none")
            return
        self._is_running = True
        self._path = None if self._log is None else own_path(self._log, worker).with_suffix(".profile.json")
        self.set_model(model)
        self.on_train_begin()

    def end_run(self) -> None:
        """Let go of everything."""
        if self._is_running:
            self._is_running = False
            self.on_train_end()

    def _fail(self, reason: str) -> None:
        super()._fail(reason)
        self._note(f"profile: {reason}")
