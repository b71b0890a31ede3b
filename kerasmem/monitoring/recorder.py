"""Turns the hooks of runs, epochs and batches into samples. Knows nothing of Keras.

If a reading or the disk fails, that part of the recording ends with one warning. No exception reaches the training.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from kerasmem.checks import choice, number, path, whole
from kerasmem.cluster import Worker
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.monitoring.device_reader import DeviceReader, RawReading
from kerasmem.monitoring.epoch_maxima import EpochMaxima
from kerasmem.monitoring.leak_watch import LeakWatch
from kerasmem.monitoring.logfile import format_of
from kerasmem.monitoring.run_log import Overhead, RunLog
from kerasmem.monitoring.sampler import BackgroundReading, CurrentPhase, Sampler
from kerasmem.monitoring.timeline import Sample, Timeline

Kind = Literal["train", "test", "predict"]
F = TypeVar("F", bound=Callable[..., Any])
_WRITE_SECONDS = 0.2  # between writes of batches
# phase, epoch, batch, steps, time of its end, readings of devices and host, and each device's peak before the batch
_Batch = tuple[str, int | None, int, int, float, RawReading, BackgroundReading, list[int | None]]
_SETTINGS = ("filename", "append", "update_freq", "nvml", "epoch_logs", "sampling", "leaks")


def _hook(hook: F) -> F:
    """Time a hook. After an unexpected exception, end the run's recording, but not the training."""
    name = hook.__name__

    @functools.wraps(hook)
    def guarded(recorder: Recorder, *args: Any) -> Any:
        start = recorder.clock()
        try:
            return hook(recorder, *args)
        except KerasmemError:
            raise
        except Exception as error:
            recorder.break_off(error)
            return None
        finally:
            recorder.seconds[name] += recorder.clock() - start

    return guarded  # type: ignore[return-value]


class Recorder:
    """Records runs. A copy has the settings and the log file of the original, but no results yet.

    After a training step, the processor's caches hold none of a hook's code, so each line takes 5 to 10 times as long
    as in a loop. Batch hooks therefore store raw readings only. Every 0.2 s, at the end of an epoch, and when the
    timeline is read, they become samples and are written.

    Args:
        filename, append, update_freq, nvml, epoch_logs, sampling, leaks: as in `MemoryLogger`.
        clock: returns monotonic seconds.

    Attributes:
        log: rows, notes and phases so far.
        epoch: number of the epoch in progress, or None between epochs.
        run_peaks: largest peak of each device in the latest run that has ended.
        phase: phase of the training.
        seconds: time in each hook so far, by its name.
        leak_watch: watch over the epochs, or None without `leaks`.

    Raises:
        UsageError: If an argument is wrong.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str] | None,
        *,
        append: bool = False,
        update_freq: int = 1,
        nvml: bool | str = "auto",
        epoch_logs: bool | str = True,
        sampling: float = 20.0,
        leaks: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if filename is not None:
            if os.path.isdir(path("filename", filename)):
                folder = os.fspath(filename)
                raise UsageError(f"filename: {folder!r} is a folder; name a file in it, such as memory.csv")
            format_of(filename)
        self.filename = filename
        self.append = append
        self.update_freq = whole("update_freq", update_freq)
        self.nvml = choice("nvml", nvml, ("auto", True, False))
        self.epoch_logs = choice("epoch_logs", epoch_logs, (True, False, "bytes"))
        self.sampling = number("sampling", sampling, 0, 1000)
        self.leaks = leaks
        self.clock = clock
        self.log = RunLog(filename, append, self.write_quietly)
        self.epoch: int | None = None
        self.run_peaks: dict[str, int] = {}
        self.phase = CurrentPhase()
        self.leak_watch = LeakWatch("epochs") if leaks else None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._batches = 0
        self._leak_notes: tuple[str, ...] = ()  # of the latest run, which replaces those of earlier runs
        self._start: float | None = None  # time of the clock at the start of the timeline
        self._readable: set[str] = set()  # sizes that can be read
        self._reader: DeviceReader | None = None
        self._maxima: EpochMaxima | None = None
        self._sampler: Sampler | None = None
        self._open_batches: dict[str, tuple[int, list[int | None]]] = {}  # with the peaks before them
        self._next_batch: dict[str, int] = {}  # to record, by kind
        self._waiting: list[_Batch] = []  # recorded, but not written
        self._write_at = 0.0

    # ------------------------------------------------------------- results

    @property
    def timeline(self) -> Timeline:
        """The samples so far, as an immutable copy."""
        self._write_batches()
        return self.log.timeline()

    @property
    def notes(self) -> tuple[str, ...]:
        """Failed readings and their reasons."""
        return (*self.log.notes, *self._leak_notes)

    @property
    def overhead(self) -> Overhead:
        """Cost of the recording so far."""
        batch_seconds = self.seconds["begin_batch"] + self.seconds["end_batch"]
        return Overhead(sum(self.seconds.values()), batch_seconds, self._batches)

    # ---------------------------------------------------------------- runs

    @_hook
    def begin_run(self, worker: Worker | None = None) -> None:
        """Open the log file and the devices. The previous run must have ended.

        Args:
            worker: number of this process, if several train together.

        Raises:
            UsageError: If the file cannot be written.
        """
        self.phase.enter("between")
        if self._start is None:
            self._start = self.clock()
        self.log.open(worker)
        self._reader = DeviceReader(self._reader_note, self.nvml)
        sampler = Sampler(self.phase, self._reader.read_driver, self._reader_note, self.sampling)
        rows = self._reader.start_run(sampler.latest)
        self._readable = {name for row in rows for name, value in row._asdict().items() if value is not None}
        if "in_use_bytes" in self._readable:
            self._readable.add("peak_bytes")
        if "rss_bytes" in self._readable:
            self._readable.add("tree_bytes")
        self.log.begin_run()
        self._sampler = sampler
        sampler.start()

    @_hook
    def end_run(self) -> None:
        """End the run, if there is one. The next run opens the log file and the devices again."""
        self._end_sampler()
        if self.log.run is not None:
            if self.leak_watch is not None:
                report = self.leak_watch.report()
                is_conclusive = report.leaks or (report.iterations and report.too_short)
                self._leak_notes = tuple(f"leak: {text}" for text in report.explain()) if is_conclusive else ()
                for text in self._leak_notes:
                    self.log.add_object("note", text=text)
            self._write_batches()
            self.log.add_object("cost", **self.overhead.to_dict())
        self._release()

    def break_off(self, error: Exception) -> None:
        """End the run's recording because of an exception in it. Training continues."""
        self.write_quietly()
        self._end_sampler()
        self._release()
        self.log.add_note(f"logger: stopped by an unexpected {type(error).__name__}: {error}", warns=True)

    def _end_sampler(self) -> None:
        """Stop the background thread and keep its peaks."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()
            self._add_phases(sampler)

    def _add_phases(self, sampler: Sampler) -> None:
        """Record each phase's peaks since the epoch began."""
        sampler.read()
        self.log.add_phases(sampler.cut(self.log.run or 0, self.epoch))

    def _release(self) -> None:
        """Close the log file and release the devices."""
        self.log.end_run()
        reader, self._reader = self._reader, None
        if reader is not None:
            self.run_peaks = reader.end_run()
        self.epoch = self._maxima = None
        self._open_batches.clear()
        self._next_batch.clear()

    # -------------------------------------------------------------- epochs

    @_hook
    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch. Earlier readings belong to the previous epoch."""
        if self._reader is None or self._sampler is None:
            return
        self._sampler.start()  # it ends after a long time without hooks
        self._add_phases(self._sampler)
        self._write_batches()
        self.epoch = epoch
        self.begin_part("train", "between")
        self._reader.peaks()
        self._maxima = EpochMaxima(epoch, self._reader.names)

    @_hook
    def end_epoch(self) -> tuple[dict[str, float], str] | None:
        """Record the epoch's maxima. Return values for Keras's logs, and a line to print."""
        self._write_batches()
        maxima, self._maxima = self._maxima, None
        if maxima is None or self._reader is None or self._sampler is None:
            return None
        self._sampler.read()
        background = [self._sampler.largest(size) for size in ("rss_bytes", "tree_bytes", "swap_bytes")]
        self.phase.enter("epoch end")
        maxima.add(self._reader.read_rows(self._sampler.latest))
        self.log.add_rows(maxima.finish(self.log.run or 0, self._moment(), *background))
        if self.leak_watch is not None:
            self.leak_watch.sample(self.log.bytes)
        return maxima.logs(self._readable, in_bytes=self.epoch_logs == "bytes"), maxima.line()

    # ------------------------------------------------------------- batches

    def begin_part(self, kind: Kind, phase: str) -> None:
        """Enter a phase, and count batches of a kind from 0 again. Drop a batch that began after the last data."""
        self.phase.enter(phase)
        self._next_batch.pop(kind, None)
        self._open_batches.pop(kind, None)

    @_hook
    def begin_batch(self, kind: Kind, batch: int) -> None:
        """Read the peak since the previous reading, and start the batch's own, if the batch is recorded."""
        current = self.phase
        current.phase = "train batch" if kind == "train" else current.rest
        current.changes += 1
        if batch < self._next_batch.get(kind, 0) or self._reader is None:
            return
        self._open_batches[kind] = batch, self._reader.peaks()

    @_hook
    def end_batch(self, kind: Kind, phase: str, last: int) -> None:
        """Record the batch, or the batches up to `last` if an execution has several steps."""
        self._batches += 1
        current = self.phase
        current.phase, current.changes = current.rest, current.changes + 1
        if self._maxima is not None and kind == "train":
            self._maxima.steps = last + 1
        if kind not in self._open_batches or self._reader is None or self._sampler is None:
            return
        batch, between = self._open_batches.pop(kind)
        devices, host = self._reader.read(), self._sampler.latest
        self._next_batch[kind] = max(batch + self.update_freq, last + 1)
        now = self.clock()
        self._waiting.append((phase, self.epoch, batch, last - batch + 1, now, devices, host, between))
        if now >= self._write_at:
            self._write_batches()
            self._write_at = now + _WRITE_SECONDS

    def _write_batches(self) -> None:
        """Turn stored readings into rows, and write them."""
        waiting, self._waiting = self._waiting, []
        if not waiting or self._reader is None:
            return
        rows: list[Sample] = []
        for phase, epoch, batch, steps, clock, devices, host, between in waiting:
            head = (self.log.run or 0, self._moment(clock), phase, epoch, batch, steps)
            rows += self._reader.make_rows(head, devices, host, between)
        if self._maxima is not None:
            self._maxima.add(rows)
        self.log.add_rows(rows)

    def write_quietly(self) -> None:
        """Write the waiting batches without raising an exception."""
        with contextlib.suppress(Exception):
            self._write_batches()

    def _moment(self, now: float | None = None) -> float:
        now = self.clock() if now is None else now
        return int((now - (self._start or 0.0)) * 1e6) / 1e6  # whole microseconds, as in the file

    def _reader_note(self, text: str) -> None:
        self.log.add_note(text, warns=self.nvml is True and text.startswith("driver:"))

    # ------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": {name: getattr(self, name) for name in _SETTINGS}, "family": self.log.family}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["settings"])  # type: ignore[misc]
        self.log.family = state["family"]
