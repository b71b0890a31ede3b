"""`MemoryLogger`: the Keras callback that logs what a run uses."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import keras

from kerasmem.devices.growth import GrowthStatus, enable_memory_growth
from kerasmem.devices.nvml import Nvml
from kerasmem.monitoring.arguments import check_arguments
from kerasmem.monitoring.board import require_tensorboard
from kerasmem.monitoring.calls import KerasCall
from kerasmem.monitoring.cost import Overhead
from kerasmem.monitoring.logfile import format_of
from kerasmem.monitoring.recorder import Kind, Recorder
from kerasmem.monitoring.timeline import Timeline

_METHODS: dict[Kind, str] = {"train": "fit", "test": "evaluate", "predict": "predict"}


class MemoryLogger(keras.callbacks.Callback):
    """Log the memory that `fit`, `evaluate` and `predict` use, batch by batch.

    For each batch and device: what the allocator has in use, its true peak during that batch, what the driver
    sees, and the host's side. For each epoch the largest of these go into `logs`, as
    `memory_peak_bytes`, `memory_in_use_bytes`, `memory_driver_used_bytes`, `memory_rss_bytes` and
    `memory_swap_bytes` (those that can be read here; the same every epoch), so that `History` and callbacks
    placed after this one, such as `CSVLogger`, have them. Put it first in the list.

    A reading that fails never stops training: it is None from then on, and `notes` says why. After a crash
    the file holds every batch that ended.

    Several loggers at once, in one `fit` or in nested ones, each have their own true peaks. One logger logs one
    run at a time: another `fit` that it is given to meanwhile, inside the first or in another thread, is not
    logged, and one warning says so.

    Args:
        filename: file to log to, `.csv` or `.jsonl`; None keeps the samples in `timeline` alone. One row a
            batch and device. Without `append`, the logger's first run overwrites the file, unless another
            logger of this process is writing to it; a copy of the logger (`copy.deepcopy`) adds to what the
            others have written in this process. Processes need a file each.
        every: log every N-th batch of each epoch. Peaks of batches in between are not lost: they are the next
            row's `between_peak_bytes`.
        format: "csv" or "jsonl", where the suffix does not say.
        append: add to a file of an earlier process.
        tensorboard: folder for TensorBoard scalars; needs the `tensorboard` extra. It costs more
            than all the rest (`overhead` says what).
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
        every: int = 1,
        format: Literal["csv", "jsonl"] | None = None,
        append: bool = False,
        tensorboard: str | os.PathLike[str] | None = None,
        memory_growth: bool = True,
        nvml: Nvml | bool | Literal["auto"] = "auto",
        verbose: int = 0,
        devices: Sequence[str] | None = None,
        reset_peaks: bool = True,
        epoch_logs: bool = True,
        keep: int | None = 1_000_000,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        check_arguments(filename, every, nvml, verbose, devices, keep, tensorboard)
        if tensorboard is not None:
            require_tensorboard()
        self._verbose = verbose
        self._epoch_logs = epoch_logs
        self._memory_growth = memory_growth
        self._recorder = Recorder(
            None if filename is None else Path(filename),
            "csv" if filename is None else format_of(filename, format),
            every=int(every),
            append=append,
            board=None if tensorboard is None else os.fspath(tensorboard),
            nvml=nvml,
            devices=None if devices is None else list(devices),
            reset_peaks=reset_peaks,
            keep=None if keep is None else int(keep),
            clock=clock,
        )
        self._kind: Kind = "train"  # of the run under way
        self._test_phase = "evaluate"
        self._taken_up: int | None = None  # the thread in which a Keras method has that has not begun yet
        self._call: KerasCall | None = None  # that began the run under way; None if that was begun by hand
        self._guests: dict[int, KerasCall] = {}  # calls that are not logged, by thread
        self._run_model: weakref.ref[Any] | None = None
        self._run_params: Any = None
        self._totals: dict[Kind, int | None] = {}  # batches an epoch, where Keras knows
        self._line: str | None = None  # waits until the progress bar has ended its own
        self.growth: GrowthStatus | None = None
        self._try_growth()

    @property
    def timeline(self) -> Timeline:
        """All samples so far (the newest `keep` of them), as an immutable copy."""
        return self._recorder.timeline

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be read, and why."""
        return self._recorder.notes

    @property
    def run_peaks(self) -> dict[str, int]:
        """Each device's largest allocator peak in the latest run, in bytes, where it can be read.

        The time between batches, and batches that were skipped (`every`), count.
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
    def overhead(self) -> Overhead:
        """What the logger's own hooks have cost so far."""
        return self._recorder.overhead

    def close(self) -> None:
        """Close the file and let go of the driver, also after an exception in `fit`; may be called again.

        A run that ends well closes its file itself. After one that did not, nothing is lost without this, and
        the logger can be used again either way.
        """
        self._end_run()
        self._recorder.close()

    # ---------------------------------------------------------- Keras's hooks

    def set_model(self, model: Any) -> None:
        """Note that a Keras method has taken the callback up (validation inside `fit` does not)."""
        if not self._is_guests():
            super().set_model(model)
            self._taken_up = threading.get_ident()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a run: try memory growth if that was not done, open the file and the devices."""
        if not self._is_guests() and self._admit("train"):
            self._begin_run("train")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the run."""
        if not self._is_guests():
            self._end_run()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin an epoch's maxima."""
        if self._is_guests():
            return
        self._print_line()
        if self._recorder.run is None and not self._recorder.broken:
            self._begin_run("train")
        self._recorder.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the epoch's maxima, and put them into `logs`."""
        if self._is_guests():
            return
        ended = self._recorder.end_epoch()
        if ended is None:
            return
        values, line = ended
        if logs is not None and self._epoch_logs:
            logs.update(values)
        self._line = line if self._verbose else None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the peak since the batch before, and start this batch's own."""
        self._begin_batch("train", batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the batch."""
        self._end_batch("train", "train", batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin validation inside `fit`, or a run of `evaluate`."""
        if self._is_guests():
            return
        taken_up = self._is_taken_up()
        part = self._begin_part("test")
        if part is None:
            return
        validation = part and not taken_up
        self._test_phase = "validation" if validation else "evaluate"
        if validation and self._call is not None and self._run_model is not None:
            iterator = getattr(self._run_model(), "_eval_epoch_iterator", None)
            self._totals["test"] = getattr(iterator, "num_batches", None)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """End validation, or the run of `evaluate`."""
        self._end_part("test")

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the peak since the batch before, and start this batch's own."""
        self._begin_batch("test", batch)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the batch."""
        self._end_batch("test", self._test_phase, batch)

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a run of `predict`, or a part of the run under way."""
        if not self._is_guests():
            self._begin_part("predict")

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the run of `predict`."""
        self._end_part("predict")

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the peak since the batch before, and start this batch's own."""
        self._begin_batch("predict", batch)

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the batch."""
        self._end_batch("predict", "predict", batch)

    # ------------------------------------------------------------------ runs

    def _begin_run(self, kind: Kind) -> None:
        self._try_growth()
        call = KerasCall.innermost(_METHODS[kind])
        self._recorder.begin_run(None if call is None else call.is_running)
        self._kind = kind
        self._call = call
        # Hooks called by hand leave `params` as the last Keras method had them.
        self._totals = {kind: None if call is None else (self.params or {}).get("steps")}
        self._run_model = None if self._model is None else weakref.ref(self._model)
        self._run_params = self.params
        self._taken_up = None

    def _end_run(self) -> None:
        self._print_line()
        self._recorder.end_run()

    def _begin_batch(self, kind: Kind, batch: int) -> None:
        if self._is_guests():
            return
        if self._recorder.run is None and not self._recorder.broken:  # a custom loop that skips on_…_begin
            self._begin_run(kind)
        self._recorder.begin_batch(kind, batch)

    def _end_batch(self, kind: Kind, phase: str, batch: int) -> None:
        if not self._is_guests():
            self._recorder.end_batch(kind, phase, batch, self._totals.get(kind))

    def _begin_part(self, kind: Kind) -> bool | None:
        """Begin a run, or a part of the one under way; return whether it is a part, None for neither."""
        if not self._admit(kind):
            return None
        taken_up = self._is_taken_up()
        part = self._recorder.run is not None and (not taken_up or self._call is None or self._call.is_running())
        if part:
            self._totals[kind] = (self.params or {}).get("steps") if taken_up else None
            self._taken_up = None
        else:
            self._begin_run(kind)
        self._recorder.begin_part(kind)
        return part

    def _end_part(self, kind: Kind) -> None:
        if self._is_guests():
            return
        self._recorder.begin_part(kind)
        if self._kind == kind:
            self._end_run()

    # ---------------------------------------------------- other calls meanwhile

    def _is_taken_up(self) -> bool:
        return self._taken_up == threading.get_ident()

    def _is_guests(self) -> bool:
        """Whether the hook comes from a call that is not logged."""
        if not self._guests:
            return False
        thread = threading.get_ident()
        guest = self._guests.get(thread)
        if guest is None:
            return False
        if guest.is_running():
            return True
        del self._guests[thread]  # it may have raised; nothing else would tell
        return False

    def _admit(self, kind: Kind) -> bool:
        """Return whether the call that begins now is to be logged; what cannot be becomes a guest.

        One logger follows one run, so a `fit` inside another and any call in another thread have to wait until
        the one under way has ended. (`evaluate` and `predict` inside `fit` are parts of it.)
        """
        under_way = self._call
        if self._recorder.run is None or under_way is None:
            return True
        call = KerasCall.innermost(_METHODS[kind])
        here = under_way.thread == threading.get_ident()
        if call is None or (here and kind != "train") or not under_way.is_running():
            return True
        if call == under_way:  # the logger is in the list twice
            return False
        self._guests[threading.get_ident()] = call
        self._taken_up = None
        self._model, self.params = self._run_model() if self._run_model is not None else None, self._run_params
        where = "inside the run under way" if here else "in another thread while a run was under way"
        self._recorder.note(
            f"run: {_METHODS[kind]} was called {where} and is not logged; give it a MemoryLogger of its own", say=True
        )
        return False

    def _try_growth(self) -> None:
        """Ask for memory growth, once a process, and say so where it was not granted."""
        if not self._memory_growth or self.growth is not None:
            return
        self.growth = enable_memory_growth()
        if self.growth.refused:
            self._recorder.note(f"memory growth: {self.growth.message}")
            warnings.warn(f"MemoryLogger: {self.growth.message}", stacklevel=3)

    def _print_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            print(line, flush=True)

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds settings and results; the model, open files and the driver stay with the original."""
        return {
            **self.__dict__,
            "_model": None,
            "_run_model": None,
            "_run_params": None,
            "_line": None,
            "_taken_up": None,
            "_call": None,
            "_guests": {},
            "growth": None,
        }
