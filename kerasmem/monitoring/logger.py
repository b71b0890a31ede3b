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

    For each batch and device it logs the memory that the allocator has in use, the true peak during the batch, the
    memory in use on the card by the driver, and the host's memory. To get a batch's peak, the allocator's statistics
    are reset, so `tf.config.experimental.get_memory_info` then returns the peak since the last batch only.

    At the end of each epoch, `memory_mib` is added to `logs`: the peak of the fullest device, or this process's memory
    if no device can be read, in MiB. With `epoch_logs="bytes"` all sizes that can be read are added, as
    `memory_peak_bytes`, `memory_in_use_bytes`, `memory_driver_used_bytes`, `memory_rss_bytes`, `memory_tree_bytes`
    (this process and its workers) and `memory_swap_bytes`. `History` has them, and so have callbacks after this one,
    such as `CSVLogger`: put it first in the list.

    A background thread reads the host, the subprocesses and the driver, to see peaks in data loading, validation and
    callbacks too. `phases` has the largest sizes of each phase. The thread ends with the run. If `fit` raises an
    exception, the thread ends when the logger is used again, closed or deleted, or after ten minutes.

    If a reading fails, training continues. The size is None from then on, and `notes` has the reason. After an
    exception, the file contains every batch that ended. After `kill -9`, batches of the last 0.2 seconds may be
    missing, because they are written together.

    If several processes train together (`tf.distribute`, `keras.distribution`, torchrun, MPI, srun), each writes its
    own file ("run.rank1.jsonl" for "run.jsonl"), and only rank 0 prints. `kerasmem report` takes all files.

    Several loggers at once, in one `fit` or in nested ones, each have their own true peaks. One logger logs one
    `fit` at a time, with the `evaluate` and `predict` inside it. A nested `fit`, or a method in another thread, is
    not logged during that time, and one warning is issued.

    Args:
        filename: path of the log, `.csv` or `.jsonl`, with one row for each batch and device. None keeps the samples in
            `timeline` only. The logger's first run overwrites the file, unless `append` is set; copies of the logger
            (`copy.deepcopy`) append to it. Each logger and each process needs its own file; processes that train
            together get one automatically.
        update_freq: log every N-th batch of each epoch. Peaks of skipped batches are in the next row's
            `between_peak_bytes`. Defaults to 1.
        append: whether to append to a file of an earlier process. Always True in a script that `kerasmem run` restarts.
            Defaults to False.
        memory_growth: whether to enable TensorFlow's memory growth (see `kerasmem.enable_memory_growth`), with a
            warning if it is too late. Defaults to True.
        nvml: "auto" reads the NVIDIA driver if a GPU is used. True also warns if that fails. False does not read it.
            Defaults to "auto".
        verbose: 1 prints a line after each epoch, 0 prints nothing. Defaults to 0.
        epoch_logs: True adds one short key to `logs`, and so to Keras's progress bar. "bytes" adds all sizes, in bytes.
            False adds nothing. Defaults to True.
        sampling: background readings per second. 0 reads host and driver only at the start and end of epochs.
            Defaults to 20.
        leaks: whether to watch for memory that is kept from epoch to epoch, also over several `fit` calls. The result
            is in `leaks` and, at the end, in `notes`. Collects garbage after each epoch, which takes some tenths of a
            second. Defaults to False.

    Attributes:
        growth: result of enabling memory growth, or None if not requested.

    Raises:
        UsageError: If an argument is wrong. `fit` raises it before training if the file cannot be written.

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
        self._kind: Kind = "train"  # of the run in progress
        self._test_phase = "evaluate"  # or "validation" inside `fit`
        self._thread: int | None = None  # of the run in progress
        self._process: int | None = None  # of the latest run
        self._fits = 0  # in progress in the thread when the run began
        self._is_nested = False  # whether the latest hooks were of a `fit` inside the logged one
        self._line: str | None = None  # printed after the progress bar has ended its own
        self.growth: GrowthStatus | None = None
        self._try_growth()

    # --------------------------------------------------------------- results

    @property
    def timeline(self) -> Timeline:
        """The samples so far (at most the newest million), as an immutable copy of 120 bytes a sample."""
        return self._recorder.timeline

    @property
    def notes(self) -> tuple[str, ...]:
        """Failed readings with their reasons, and unusual circumstances."""
        return self._recorder.notes

    @property
    def rank(self) -> int | None:
        """Number of this process in the latest run, or None for a single process."""
        worker = self._recorder.log.worker
        return None if worker is None else worker.rank

    @property
    def run_peaks(self) -> dict[str, int]:
        """Largest allocator peak of each device in the latest run that has ended, in bytes.

        Includes the time between batches and skipped batches (`update_freq`).
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
        """Close the file and release the driver after an exception in `fit`. May be called again.

        A run that ends normally is closed already. Nothing is lost without this call, and the logger can be reused.
        """
        self._print_line()
        self._thread = None
        self._recorder.end_run()

    def __del__(self) -> None:
        """Close a logger that is deleted after an exception in `fit`, except in a forked process."""
        if self.__dict__.get("_process") == os.getpid():
            self._recorder.end_run()

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
        """Begin a run."""
        self._begin("train")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the run."""
        self._end("train")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin an epoch."""
        self._print_line()
        if self._is_logged():
            self._recorder.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the epoch's maxima, and add them to `logs`."""
        ended = self._recorder.end_epoch() if self._is_logged() else None
        if ended is None:
            return
        values, line = ended
        if logs is not None and self._recorder.epoch_logs:
            logs.update(values)
        self._line = line if self._verbose and self.rank in (None, 0) else None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin a batch."""
        if self._is_logged():
            self._recorder.begin_batch("train", batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the batch."""
        if self._is_logged():
            self._recorder.end_batch("train", "train", batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin validation inside `fit`, or a run of `evaluate`."""
        self._begin("test")

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """End validation, or the run of `evaluate`."""
        self._end("test")

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin a batch."""
        if self._is_logged():
            self._recorder.begin_batch("test", batch)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the batch."""
        if self._is_logged():
            self._recorder.end_batch("test", self._test_phase, batch)

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a run of `predict`, or a part of the run in progress."""
        self._begin("predict")

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the run of `predict`."""
        self._end("predict")

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin a batch."""
        if self._is_logged():
            self._recorder.begin_batch("predict", batch)

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the batch."""
        if self._is_logged():
            self._recorder.end_batch("predict", "predict", batch)

    # ------------------------------------------------------------------ runs

    def _begin(self, kind: Kind) -> None:
        """Begin a run, or validation and the like inside the `fit` in progress. A run that broke off ends."""
        here, fits = threading.get_ident(), _running_fits()
        if self._thread == here:
            is_refused = self._is_nested = 0 < self._fits < fits
        else:
            is_refused = self._thread is not None and self._thread in {one.ident for one in threading.enumerate()}
        if is_refused:
            self._refuse()
            return
        if kind == "train" or self._kind != "train" or self._thread != here:
            self._try_growth()
            self._recorder.end_run()  # of a run that broke off
            self._recorder.begin_run(find_worker(getattr(self._model, "distribute_strategy", None)))
            self._kind, self._thread, self._process = kind, here, os.getpid()
            self._fits, self._is_nested = fits, False
            self._test_phase = "validation" if kind == "train" else "evaluate"
        phases = {"train": "between", "test": self._test_phase, "predict": "predict"}
        self._recorder.begin_part(kind, phases[kind])

    def _end(self, kind: Kind) -> None:
        if self._is_logged():
            self._recorder.begin_part(kind, "between")
            if self._kind == kind:
                self.close()

    def _is_logged(self) -> bool:
        """Return whether a hook belongs to the run in progress. A batch's hook must be quick."""
        if self._thread != threading.get_ident():
            if self._thread is None:
                self._refuse()
            return False
        if self._is_nested:
            self._is_nested = _running_fits() > self._fits
        return not self._is_nested

    def _refuse(self) -> None:
        text = "a fit inside another, a method in another thread or a loop without on_train_begin is not logged"
        self._recorder.log.add_note(f"run: {text}; pass it another MemoryLogger", warns=True)

    def _print_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            print(line, flush=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only: results, the model, open files and the driver stay with the original."""
        return {
            **self.__dict__,
            **dict.fromkeys(("_model", "_thread", "_process", "_line", "growth")),
        }


def _running_fits() -> int:
    """Return the number of calls of Keras's `fit` in progress in this thread."""
    names = ((frame.f_code.co_name, frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_stack(None))
    return sum(name == "fit" and module.startswith("keras.") for name, module in names)
