"""`MemoryLogger`: the Keras callback that logs what a run uses."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras

from kerasmem.devices.growth import GrowthStatus, enable_memory_growth
from kerasmem.devices.nvml import Nvml
from kerasmem.monitoring.cost import Overhead
from kerasmem.monitoring.hooks import LoggerHooks
from kerasmem.monitoring.leak_watch import LeakReport
from kerasmem.monitoring.phases import PhasePeaks, over_epochs
from kerasmem.monitoring.recorder import Recorder
from kerasmem.monitoring.results import EpochHealth, LoggerSummary
from kerasmem.monitoring.settings import LoggerSettings
from kerasmem.monitoring.step_profiler import BatchProfile
from kerasmem.monitoring.timeline import Timeline
from kerasmem.profiling.results import StepProfile


class MemoryLogger(LoggerHooks, keras.callbacks.Callback):
    """Log the memory that `fit`, `evaluate` and `predict` use, batch by batch.

    For each batch and device: what the allocator has in use, its true peak during that batch, what the driver
    sees, and the host's side. For each epoch the largest of these go into `logs`, as
    `memory_peak_bytes`, `memory_in_use_bytes`, `memory_driver_used_bytes`, `memory_rss_bytes`,
    `memory_tree_bytes` (this process and its workers) and `memory_swap_bytes` (those that can be read here; the
    same every epoch), so that `History` and callbacks placed after this one, such as `CSVLogger`, have them. Put
    it first in the list.

    A background thread reads the host, the processes under this one and the driver, so that peaks in loading,
    validation, callbacks and saving (by the model's `save`, `save_weights` or `export`) are seen too: `phases` has
    the largest sizes of each phase. It ends with the run. Where `fit` raised, it ends as soon as nobody keeps the
    exception's traceback, with the logger's next run, or after ten minutes.

    A reading that fails never stops training: it is None from then on, and `notes` says why. After an exception the
    file holds every batch that ended; after `kill -9`, all but those of the last tenths of a second, which wait for
    the background thread to write them (with `sampling=0` each is written at once, which costs more).

    Where several processes train together (`tf.distribute`, `keras.distribution`, torchrun, MPI, srun), each writes
    a file of its own, "run.rank1.jsonl" for "run.jsonl", which `kerasmem report` lays side by side, and rank 0 alone
    prints.

    Several loggers at once, in one `fit` or in nested ones, each have their own true peaks. One logger logs one
    run at a time: another `fit` that it is given to meanwhile, inside the first or in another thread, is not
    logged, and one warning says so.

    Args:
        filename: file to log to, `.csv` or `.jsonl`; None keeps the samples in `timeline` alone. One row a
            batch and device. Without `append`, the logger's first run overwrites the file, unless another
            logger of this process is writing to it; a copy of the logger (`copy.deepcopy`) adds to what the
            others have written in this process. Processes need a file each; those that train together get one.
        update_freq: log every N-th batch of each epoch. Peaks of batches in between are not lost: they are the next
            row's `between_peak_bytes`.
        format: "csv" or "jsonl", where the suffix does not say.
        append: add to a file of an earlier process.
        tensorboard: folder for TensorBoard scalars (several processes have one below it each); needs the
            `tensorboard` extra. It costs more than all the rest (`overhead` says what).
        memory_growth: ask TensorFlow for memory growth on construction (see `kerasmem.enable_memory_growth`);
            where that is too late, one warning says so.
        nvml: "auto" asks the NVIDIA driver where a GPU is used; True warns where that fails; False does
            not ask; or an open `kerasmem.devices.nvml.Nvml`.
        verbose: 1 prints a line an epoch; 0 is silent.
        devices: logical devices to log, such as ["GPU:0", "CPU:0"]; default: every GPU, or the CPU where
            there is none.
        reset_peaks: a batch's peak is had by resetting the allocator's statistics, so
            `tf.config.experimental.get_memory_info` then tells the peak since the last batch only (`run_peak`
            and `process_peak` have the largest). False leaves it alone; a batch's peak is then known only
            where it rose above all before it.
        epoch_logs: False keeps `logs` (and the progress bar) as they were.
        sampling: background readings a second; 0 reads the driver and the processes under this one at the
            beginning and end of epochs only.
        health: True asks each allocator at every epoch's end how whole its free memory is (some milliseconds, by
            way of TensorFlow's profiler); `health` and, at the end, `notes` have the answers.
        leaks: True watches for memory that is kept from epoch to epoch, also over several `fit` calls (some tenths
            of a second an epoch: garbage is collected first); `leaks` and, at the end, `notes` have the answer.
        profile_batch: profile the memory of this batch of each `fit`, counted from 1 through all epochs and at least
            2 (3 is good): which layer and category hold the peak. It and up to 8 batches before it become slower, and
            the step is traced again. `profile` has the result, and so has "run.profile.json" beside "run.jsonl".
        every: the former name of `update_freq`; it works still, with a warning.
        keep: samples to keep in `timeline` at most, the newest; a sample takes 108 bytes. The file has all.
        clock: seconds that only go forward.

    Attributes:
        growth: what came of asking for memory growth; None if it was not asked for.

    Raises:
        UsageError: an argument is wrong; from `fit`, before training: the file cannot be written, or another
            logger is writing to it.
        MissingExtraError: `tensorboard` is given and not installed.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> logger = MemoryLogger()
        >>> history = model.fit(np.ones((64, 8)), np.ones((64, 1)), verbose=0, callbacks=[logger])
        >>> history.history["memory_rss_bytes"][0] > 0, len(logger.timeline)
        (True, 3)
    """

    def __init__(
        self,
        filename: str | os.PathLike[str] | None = None,
        *,
        update_freq: int = 1,
        format: Literal["csv", "jsonl"] | None = None,
        append: bool = False,
        tensorboard: str | os.PathLike[str] | None = None,
        memory_growth: bool = True,
        nvml: Nvml | bool | Literal["auto"] = "auto",
        verbose: int = 0,
        devices: Sequence[str] | None = None,
        reset_peaks: bool = True,
        epoch_logs: bool = True,
        sampling: float = 20.0,
        health: bool = False,
        leaks: bool = False,
        profile_batch: int | None = None,
        keep: int | None = 1_000_000,
        clock: Callable[[], float] = time.perf_counter,
        every: int | None = None,
    ) -> None:
        super().__init__()
        if every is not None:
            message = "MemoryLogger(every=…) is called update_freq now, as in keras.callbacks.TensorBoard"
            warnings.warn(message, FutureWarning, stacklevel=2)
            update_freq = every
        settings = LoggerSettings(
            filename, format, append, update_freq, tensorboard, nvml, verbose, devices, reset_peaks, epoch_logs,
            sampling, health, leaks, keep, clock,
        )  # fmt: skip
        self._memory_growth = memory_growth
        self._recorder = Recorder(settings)
        self._profile = None if profile_batch is None else BatchProfile(profile_batch, filename, self._recorder.note)
        self._forget_runs()
        self.growth: GrowthStatus | None = None
        self._try_growth()

    @property
    def profile(self) -> StepProfile | None:
        """The profile of the batch that `profile_batch` named, in the latest `fit`; None where `notes` says why."""
        return None if self._profile is None else self._profile.profile

    @property
    def timeline(self) -> Timeline:
        """All samples so far (the newest `keep` of them), as an immutable copy."""
        return self._recorder.timeline

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be read and why, and what is out of the ordinary."""
        return self._recorder.notes

    @property
    def rank(self) -> int | None:
        """This process's number among those that train together, in the latest run; None where it trains alone."""
        worker = self._recorder.worker
        return None if worker is None else worker.rank

    @property
    def run_peaks(self) -> dict[str, int]:
        """Each device's largest allocator peak in the latest run, in bytes, where it can be read.

        The time between batches, and batches that were skipped (`update_freq`), count.
        """
        return self._recorder.peaks[0]

    @property
    def run_peak(self) -> int | None:
        """The largest of `run_peaks`; None where no device's allocator can be read."""
        return max(self.run_peaks.values(), default=None)

    @property
    def process_peak(self) -> int | None:
        """The largest allocator peak since the process began, as TensorFlow would say without the resets."""
        return max(self._recorder.peaks[1].values(), default=None)

    @property
    def phases(self) -> tuple[PhasePeaks, ...]:
        """The largest host and driver sizes of each phase of each epoch, from background readings."""
        return self._recorder.phases

    @property
    def health(self) -> tuple[EpochHealth, ...]:
        """Reserved, largest free block and fragmentation at each epoch's end; empty without `health=True`."""
        return tuple(self._recorder.health)

    @property
    def leaks(self) -> LeakReport | None:
        """Whether memory is kept from epoch to epoch; None without `leaks=True`."""
        watch = self._recorder.leak_watch
        return None if watch is None else watch.report()

    @property
    def overhead(self) -> Overhead:
        """What the logger itself has cost so far: its hooks, and its background thread."""
        return self._recorder.overhead

    @property
    def summary(self) -> LoggerSummary:
        """The findings in brief."""
        latest = over_epochs(each for each in self.phases if each.run == self.phases[-1].run)
        return LoggerSummary(self.run_peaks, self.process_peak, latest, self.health, self.overhead, self.notes)

    def close(self) -> None:
        """Close the file and let go of the driver, also after an exception in `fit`; may be called again.

        A run that ends well closes its file itself. After one that did not, nothing is lost without this, and
        the logger can be used again either way.
        """
        self._end_run()
        self._recorder.close()

    def _try_growth(self) -> None:
        """Ask for memory growth, once a process, and say so where it was not granted."""
        if not self._memory_growth or self.growth is not None:
            return
        self.growth = enable_memory_growth()
        if self.growth.refused:
            self._recorder.note(f"memory growth: {self.growth.message}")
            warnings.warn(f"MemoryLogger: {self.growth.message}", stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds settings and results; the model, open files and the driver stay with the original."""
        gone = dict.fromkeys(("_model", "_run_model", "_run_params", "_line", "_taken_up", "_call", "growth"))
        return {**self.__dict__, **gone, "_guests": {}}
