"""`MemoryLogger`: the Keras callback that logs a run's memory."""

from __future__ import annotations

import os
import threading
import traceback
from typing import Any, Literal

import keras

from kerasmem.checks import choice
from kerasmem.cluster import find_worker
from kerasmem.devices.growth import GrowthStatus, enable_memory_growth
from kerasmem.errors import warn_user
from kerasmem.monitoring.leak_watch import LeakReport
from kerasmem.monitoring.recorder import Kind, Recorder
from kerasmem.monitoring.run_log import Overhead
from kerasmem.monitoring.timeline import PhasePeaks, Timeline


class MemoryLogger(keras.callbacks.Callback):
    """Log the memory that `fit`, `evaluate` and `predict` use, batch by batch.

    For each batch and device: what the allocator has in use, its true peak during that batch, what the driver
    sees, and the host's side. A batch's peak needs a reset of the allocator's statistics, so
    `tf.config.experimental.get_memory_info` then returns the peak since the last batch only.

    For each epoch `memory_mib` goes into `logs`: the largest device's peak, or this process's memory where no device
    tells, in MiB. With `epoch_logs="bytes"` all sizes go there, as `memory_peak_bytes`, `memory_in_use_bytes`,
    `memory_driver_used_bytes`, `memory_rss_bytes`, `memory_tree_bytes` (this process and its workers) and
    `memory_swap_bytes` (those that can be read here; the same every epoch), so that `History` and callbacks after
    this one, such as `CSVLogger`, have them. Put it first in the list.

    A background thread reads the host, the processes under this one and the driver, so that peaks in loading,
    validation and callbacks are seen too: `phases` has the largest sizes of each phase. It ends with
    the run. If `fit` raised, it ends with the logger's next run, with `close`, when the logger is deleted, or after
    ten minutes.

    A reading that fails never stops training: it is None from then on, and `notes` says why. After an exception the
    file holds every batch that ended; after `kill -9`, all but those of the last 0.2 seconds, which are
    written together.

    Where several processes train together (`tf.distribute`, `keras.distribution`, torchrun, MPI, srun), each writes
    a file of its own, "run.rank1.jsonl" for "run.jsonl", which `kerasmem report` lays side by side, and rank 0 alone
    prints.

    Several loggers at once, in one `fit` or in nested ones, each have their own true peaks. One logger logs one
    `fit` at a time, with the `evaluate` and `predict` inside it. Meanwhile, a `fit` inside that one and a method in
    another thread are not logged, with one warning.

    Args:
        filename: file to log to, `.csv` or `.jsonl`; None keeps the samples in `timeline` alone. One row a
            batch and device. Without `append`, the logger's first run overwrites the file; a copy of the logger
            (`copy.deepcopy`) adds to what the others have written in this process. Loggers and processes need a
            file each; processes that train together get one.
        update_freq: log every N-th batch of each epoch. Peaks of batches in between are not lost: they are the next
            row's `between_peak_bytes`.
        append: add to a file of an earlier process; so it is in a script that `kerasmem run` runs again.
        memory_growth: ask TensorFlow for memory growth on construction (see `kerasmem.enable_memory_growth`);
            where that is too late, one warning says so.
        nvml: "auto" asks the NVIDIA driver where a GPU is used; True warns where that fails; False does
            not ask.
        verbose: 1 prints a line an epoch; 0 is silent.
        epoch_logs: True puts one short key into `logs`, and so into Keras's progress line; "bytes" puts every size
            there, in bytes; False nothing.
        sampling: background readings a second; 0 reads the driver and the host at the beginning and end of epochs
            only.
        leaks: True watches for memory that is kept from epoch to epoch, also over several `fit` calls (some tenths
            of a second an epoch: garbage is collected first); `leaks` and, at the end, `notes` have the answer.

    Attributes:
        growth: what came of asking for memory growth; None if it was not asked for.

    Raises:
        UsageError: an argument is wrong; from `fit`, before training: the file cannot be written.

    Examples:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> logger = MemoryLogger(epoch_logs="bytes")
        >>> history = model.fit(np.ones((64, 8)), np.ones((64, 1)), verbose=0, callbacks=[logger])
        >>> history.history["memory_rss_bytes"][0] > 0, len(logger.timeline)
        (True, 3)
    """

    def __init__(
        self,
        filename: str | os.PathLike[str] | None = None,
        *,
        update_freq: int = 1,
        append: bool = False,
        memory_growth: bool = True,
        nvml: bool | Literal["auto"] = "auto",
        verbose: int = 0,
        epoch_logs: bool | Literal["bytes"] = True,
        sampling: float = 20.0,
        leaks: bool = False,
    ) -> None:
        super().__init__()
        self._recorder = Recorder(
            filename, append=append, update_freq=update_freq, nvml=nvml, epoch_logs=epoch_logs,
            sampling=sampling, leaks=leaks,
        )  # fmt: skip
        self._verbose = choice("verbose", verbose, (0, 1, False, True))
        self._memory_growth = memory_growth
        self._kind: Kind = "train"  # of the run under way
        self._test_phase = "evaluate"
        self._thread: int | None = None  # of the hooks that are logged; 0 during a `fit` inside the logged one
        self._run_thread: int | None = None  # of the run in progress
        self._fit_depth: int | None = None  # of its `fit` in the stack
        self._line: str | None = None  # waits until the progress bar has ended its own
        self.growth: GrowthStatus | None = None
        self._try_growth()

    # --------------------------------------------------------------- results

    @property
    def timeline(self) -> Timeline:
        """All samples so far (the newest million), as an immutable copy; a sample takes 120 bytes."""
        return self._recorder.timeline

    @property
    def notes(self) -> tuple[str, ...]:
        """Failed readings with their reasons, and unusual circumstances."""
        return self._recorder.notes

    @property
    def rank(self) -> int | None:
        """Number of this process in the latest run, or None if it trains alone."""
        worker = self._recorder.worker
        return None if worker is None else worker.rank

    @property
    def run_peaks(self) -> dict[str, int]:
        """Largest allocator peak of each device in the latest run that has ended, in bytes.

        The time between batches, and batches that were skipped (`update_freq`), count.
        """
        return self._recorder.run_peaks

    @property
    def run_peak(self) -> int | None:
        """Largest of `run_peaks`, or None if no allocator can be read."""
        return max(self.run_peaks.values(), default=None)

    @property
    def phases(self) -> tuple[PhasePeaks, ...]:
        """The largest host and driver sizes of each phase of each epoch, from background readings."""
        return tuple(self._recorder.log.phases)

    @property
    def leaks(self) -> LeakReport | None:
        """Report on memory kept from epoch to epoch, or None without `leaks=True`."""
        watch = self._recorder.leak_watch
        return None if watch is None else watch.report()

    @property
    def overhead(self) -> Overhead:
        """Cost of the logger's hooks so far."""
        return self._recorder.overhead

    def close(self) -> None:
        """Close the file and let go of the driver after an exception in `fit`; may be called again.

        A run that ends well does so itself. After one that did not, nothing is lost without this, and
        the logger can be used again either way.
        """
        self._print_line()
        self._thread = self._run_thread = None
        self._recorder.end_run()

    def __del__(self) -> None:
        """Close a logger that nobody refers to after an exception in `fit`."""
        recorder = self.__dict__.get("_recorder")  # missing if an argument was wrong
        if recorder is not None:
            recorder.end_run()

    def _try_growth(self) -> None:
        """Ask for memory growth once per process, and warn if it is refused."""
        if not self._memory_growth or self.growth is not None:
            return
        self.growth = enable_memory_growth()
        if self.growth.refused:
            self._recorder.log.add_note(f"memory growth: {self.growth.message}")
            warn_user(f"MemoryLogger: {self.growth.message}")

    # ---------------------------------------------------------- Keras's hooks

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a run: try memory growth if that was not done, open the file and the devices."""
        self._begin("train", "between")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the run."""
        self._end("train")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin an epoch's maxima."""
        self._print_line()
        if self._is_logged():
            self._recorder.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the epoch's maxima, and put them into `logs`."""
        ended = self._recorder.end_epoch() if self._is_logged() else None
        if ended is None:
            return
        values, line = ended
        if logs is not None and self._recorder.epoch_logs:
            logs.update(values)
        self._line = line if self._verbose and self.rank in (None, 0) else None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the peak since the batch before, and start this batch's own."""
        if self._is_logged():
            self._recorder.begin_batch("train", batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the batch."""
        if self._is_logged():
            self._recorder.end_batch("train", "train", batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin validation inside `fit`, or a run of `evaluate`."""
        is_inside = self._kind == "train" and self._recorder.log.run is not None
        self._test_phase = "validation" if is_inside else "evaluate"
        self._begin("test", self._test_phase)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """End validation, or the run of `evaluate`."""
        self._end("test")

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the peak since the batch before, and start this batch's own."""
        if self._is_logged():
            self._recorder.begin_batch("test", batch)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the batch."""
        if self._is_logged():
            self._recorder.end_batch("test", self._test_phase, batch)

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a run of `predict`, or a part of the run under way."""
        self._begin("predict", "predict")

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the run of `predict`."""
        self._end("predict")

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the peak since the batch before, and start this batch's own."""
        if self._is_logged():
            self._recorder.begin_batch("predict", batch)

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the batch."""
        if self._is_logged():
            self._recorder.end_batch("predict", "predict", batch)

    # ------------------------------------------------------------------ runs

    def _begin(self, kind: Kind, phase: str) -> None:
        """Begin a run, or validation and the like inside the `fit` in progress. A run that broke off ends."""
        here = threading.get_ident()
        if self._run_thread == here:
            is_refused = self._is_in_inner_fit()
            self._thread = 0 if is_refused else here
        else:
            is_refused = self._run_thread in {thread.ident for thread in threading.enumerate()} - {None}
        if is_refused:
            self._refuse()
            return
        if kind == "train" or self._kind != "train" or self._recorder.log.run is None:
            self._try_growth()
            self._recorder.begin_run(find_worker(getattr(self._model, "distribute_strategy", None)))
            self._kind, self._thread, self._run_thread = kind, here, here
            self._fit_depth = next(iter(_fit_depths()), None)
        self._recorder.begin_part(kind)
        self._recorder.phase.enter(phase)

    def _end(self, kind: Kind) -> None:
        if self._is_logged():
            self._recorder.begin_part(kind)
            self._recorder.phase.enter("between")
            if self._kind == kind:
                self.close()

    def _is_logged(self) -> bool:
        """Return whether a hook belongs to the run in progress."""
        here = threading.get_ident()
        if self._thread == here:  # nearly always, and a batch's hook must be quick
            return True
        if self._run_thread == here and not self._is_in_inner_fit():  # which has ended
            self._thread = here
            return True
        if self._run_thread is None:
            self._refuse()
        return False

    def _is_in_inner_fit(self) -> bool:
        return self._fit_depth in _fit_depths()[1:]

    def _refuse(self) -> None:
        text = "a fit inside another, a method in another thread or a loop without on_train_begin is not logged"
        self._recorder.log.add_note(f"run: {text}; give it a MemoryLogger of its own", warns=True)

    def _print_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            print(line, flush=True)

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds the settings; results, the model, open files and the driver stay with the original."""
        return {**self.__dict__, **dict.fromkeys(("_model", "_thread", "_run_thread", "_line", "growth"))}


def _fit_depths() -> list[int]:
    """Return the depth in the stack of each `fit` of Keras in progress in this thread, the innermost first."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    return [
        len(frames) - number
        for number, frame in enumerate(frames)
        if frame.f_code.co_name == "fit" and frame.f_globals.get("__name__", "").startswith("keras.")
    ]
