"""Turns the beginnings and ends of runs, epochs and batches into samples, and writes them out.

Knows nothing of Keras: `MemoryLogger` translates Keras's hooks. A reading or a disk that fails ends that part
of the recording with one warning, and never reaches the training loop as an exception.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from kerasmem.checks import choice, number, path, whole
from kerasmem.cluster import Worker, own_path
from kerasmem.errors import KerasmemError, UsageError, warn_user
from kerasmem.monitoring.cost import Overhead, Timer
from kerasmem.monitoring.device_reader import DeviceReader, DeviceReading, RawReading
from kerasmem.monitoring.epoch_maxima import EpochMaxima
from kerasmem.monitoring.leak_watch import LeakWatch
from kerasmem.monitoring.logfile import LogFile, format_of, open_logs, write_waiting
from kerasmem.monitoring.sampler import BackgroundReading, CurrentPhase, Sampler
from kerasmem.monitoring.timeline import FORMAT_VERSION, PhasePeaks, Sample, Table, Timeline, pack
from kerasmem.processes.children import GOES_ON

Kind = Literal["train", "test", "predict"]
F = TypeVar("F", bound=Callable[..., Any])
_MOST_BYTES = 120_000_000  # of samples kept in memory, about a million; the file has all
_WRITE_SECONDS = 0.2  # from one writing of batches to the next
_begun: set[str] = set()  # families whose file has been begun in this process


class RawBatch(NamedTuple):
    """A batch that has ended, as its hook left it.

    Attributes:
        run, phase, epoch, batch, steps: as in `Sample`.
        clock: when it ended, in seconds of the recorder's clock.
        devices: readings of the devices.
        host: the latest background reading.
        between: each device's peak before the batch.
    """

    run: int
    phase: str
    epoch: int | None
    batch: int
    steps: int
    clock: float
    devices: RawReading
    host: BackgroundReading
    between: list[int | None]

    def samples(self, seconds: float, readings: list[DeviceReading]) -> list[Sample]:
        """Return the batch's rows, one a device."""
        head = (self.run, seconds, self.phase, self.epoch, self.batch, self.steps)
        return [
            Sample(*head, device, in_use, peak, before, *rest)
            for (device, in_use, peak, *rest), before in zip(readings, self.between, strict=True)
        ]


def _survives(hook: F) -> F:
    """End the recording, not the training, after an unexpected failure."""

    @functools.wraps(hook)
    def guarded(recorder: Recorder, *args: Any) -> Any:
        if recorder.broken:
            return None
        try:
            return hook(recorder, *args)
        except KerasmemError:
            raise
        except Exception as error:
            recorder.break_off(error)
            return None

    return guarded  # type: ignore[return-value]


class Recorder:
    """Records runs. A copy has the settings and the log file of the original, and no results yet.

    A hook after a training step finds nothing of its code in the processor's caches, so that all it does takes five
    to ten times as long as in a loop. So it keeps its bare readings; they become samples, and are written, for many
    batches at once: every 0.2 s, at the end of an epoch, and when the timeline is read.

    Args:
        filename, append, update_freq, nvml, epoch_logs, sampling, leaks: as in `MemoryLogger`.
        clock: seconds that only go forward.

    Attributes:
        run: number of the run under way; None between runs.
        epoch: number of the epoch under way; None outside.
        run_peaks: largest peak of each device in the latest run that has ended.
        worker: number of this process in the run, or None if it trains alone.
        phase: that training is in.
        phases: largest sizes of background readings, epoch by epoch, without the epoch under way.
        broken: True once an unexpected error has ended the recording.
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
        self.run: int | None = None
        self.epoch: int | None = None
        self.run_peaks: dict[str, int] = {}
        self.broken = False
        self.phase = CurrentPhase()
        self.worker: Worker | None = None
        self.leak_watch = LeakWatch("epochs") if leaks else None
        self._hooks, self._batch_hooks = Timer(clock), Timer(clock)
        self._step_seconds = 0.0
        self._step_start: float | None = None
        self._batches = 0
        self._family = uuid.uuid4().hex  # shared by copies, which add to the same file
        self._file: LogFile | None = None
        self._tables: deque[Table] = deque([pack(())])
        self._held_bytes = 0  # of the tables
        self._leak_notes: tuple[str, ...] = ()  # of the latest run: the next one knows more
        self._notes: dict[str, None] = {}
        self.phases: list[PhasePeaks] = []
        self._next_run = 0
        self._zero: float | None = None  # the clock at the time line's zero
        self._known: set[str] = set()
        self._reader: DeviceReader | None = None
        self._maxima: EpochMaxima | None = None
        self._sampler: Sampler | None = None
        self._open: dict[str, tuple[int, list[int | None]]] = {}  # batches that have begun, and the peaks before them
        self._due: dict[str, int] = {}
        self._waiting: list[RawBatch] = []
        self._write_at = 0.0

    # ------------------------------------------------------------- results

    @property
    def timeline(self) -> Timeline:
        """The samples so far, as an immutable copy."""
        self._write_batches()
        return Timeline(np.concatenate(self._tables), self._notes, self.phases)

    @property
    def notes(self) -> tuple[str, ...]:
        """Failed readings and their reasons."""
        return (*self._notes, *self._leak_notes)

    @property
    def overhead(self) -> Overhead:
        """Cost of the recording so far."""
        batch_seconds = self._batch_hooks.seconds
        return Overhead(self._hooks.seconds + batch_seconds, batch_seconds, self._batches, self._step_seconds)

    def note(self, text: str, *, say: bool = False) -> None:
        """Keep a sentence on a failed reading once; `say` warns too."""
        if text in self._notes:
            return
        self._notes[text] = None
        if self.run is not None:
            self._add_object("note", run=self.run, text=text)
        if say:
            warn_user(f"MemoryLogger: {text}")

    def _add_object(self, kind: str, **values: Any) -> None:
        self._write(lambda file: file.add_object(kind, **values))

    def _add_rows(self, samples: Sequence[Sample]) -> None:
        """Keep samples and write them; beyond the limit the oldest are dropped."""
        self._tables.append(pack(samples))
        self._held_bytes += sys.getsizeof(self._tables[-1])
        while self._held_bytes > _MOST_BYTES:
            self._held_bytes -= sys.getsizeof(self._tables.popleft())
        self._write(lambda file: file.add(samples))

    def _write(self, action: Callable[[LogFile], None]) -> None:
        """Write to the log; a disk that fails ends the writing, not the training."""
        if self._file is None:
            return
        try:
            action(self._file)
        except OSError as error:
            self._close_file()
            reason = error.strerror or error
            self.note(f"file: writing to {self.filename} stopped: {reason}; .timeline goes on", say=True)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            open_logs.pop(file.path.resolve(), None)
            file.close()

    # ---------------------------------------------------------------- runs

    def begin_run(self, worker: Worker | None = None) -> None:
        """Open the file and the devices; a recording that had failed gets a new chance.

        Args:
            worker: number of this process, if several train together.

        Raises:
            UsageError: the file cannot be written.
        """
        self.broken = False
        with self._hooks:
            self._begin_run(worker)

    @_survives
    def _begin_run(self, worker: Worker | None) -> None:
        self._finish()  # of a run that broke off
        self.phase.enter("between")
        self._step_start = None
        if self._zero is None:
            self._zero = self.clock()
        self.worker = worker
        self._open_file(worker)
        self._reader = DeviceReader(self._reader_note, self.nvml)
        sampler = Sampler(self.phase, self._reader.read_driver, self._reader_note, self.sampling)
        readings = self._reader.start_run(sampler.latest)
        self._known = {name for r in readings for name, value in r._asdict().items() if value is not None}
        if "in_use_bytes" in self._known:
            self._known.add("peak_bytes")
        if "rss_bytes" in self._known:
            self._known.add("tree_bytes")
        self.run = self._next_run
        self._next_run += 1
        ranks = {} if worker is None else {"rank": worker.rank, "ranks": worker.size}
        started = datetime.now(timezone.utc).isoformat()
        notes = list(self._notes)
        self._add_object("run", format_version=FORMAT_VERSION, run=self.run, started=started, notes=notes, **ranks)
        self._sampler = sampler
        sampler.start()

    def _open_file(self, worker: Worker | None) -> None:
        """Open the log, under the worker's own name if there are several, to add to what this recorder has begun."""
        if self.filename is None:
            return
        target = own_path(Path(self.filename), worker)
        write_waiting(target)  # of a logger whose run broke off
        has_begun = self._next_run > 0 or self._family in _begun
        append = self.append or has_begun or bool(os.environ.get(GOES_ON))
        self._file = LogFile(target, append)
        open_logs[target.resolve()] = self.write_quietly
        self._next_run = max(self._next_run, self._file.next_run)
        _begun.add(self._family)

    @_survives
    def end_run(self) -> None:
        """Close the file and let go of the devices; recording again opens them again."""
        with self._hooks:
            self._finish()

    def break_off(self, error: Exception) -> None:
        """End the recording because of a fault in it; training goes on."""
        self.broken = True
        self.write_quietly()
        self._waiting = []
        self._end_sampler()
        self._finish_files()
        self.note(f"logger: stopped by an unexpected {type(error).__name__}: {error}", say=True)

    def _finish(self) -> None:
        self._end_sampler()
        if self.run is not None:
            if self.leak_watch is not None:
                report = self.leak_watch.report()
                is_telling = report.leaks or (report.iterations and report.too_short)
                self._leak_notes = tuple(f"leak: {text}" for text in report.explain()) if is_telling else ()
                for text in self._leak_notes:
                    self._add_object("note", run=self.run, text=text)
            self._write_batches()
            self._add_object("cost", run=self.run, **self.overhead.to_dict())
        self._finish_files()

    def _end_sampler(self) -> None:
        """Stop the background thread and keep its peaks."""
        sampler, self._sampler = self._sampler, None
        if sampler is None:
            return
        sampler.stop()
        sampler.read()
        self._keep_phases(sampler)

    def _keep_phases(self, sampler: Sampler) -> None:
        for peaks in sampler.cut(self.run or 0, self.epoch):
            self.phases.append(peaks)
            self._add_object("phase", **vars(peaks))

    def _finish_files(self) -> None:
        self._write_batches()
        self._close_file()
        reader, self._reader = self._reader, None
        if reader is not None:
            self.run_peaks = reader.end_run()
        self.run = self.epoch = self._maxima = None
        self._open.clear()
        self._due.clear()

    # -------------------------------------------------------------- epochs

    @_survives
    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch's maxima; earlier readings belong to the previous epoch."""
        with self._hooks:
            if self._sampler is not None:
                self._sampler.start()  # it may have given up in a long stretch without hooks
                self._sampler.read()
                self._keep_phases(self._sampler)
            self.phase.enter("between")
            self.epoch = epoch
            self.begin_part("train")
            if self._reader is not None:
                self._reader.peaks()
                self._maxima = EpochMaxima(epoch, self._reader.names)

    @_survives
    def end_epoch(self) -> tuple[dict[str, float], str] | None:
        """Record the epoch's maxima; return values for Keras's logs, and a line to print."""
        with self._hooks:
            self._write_batches()
            maxima, self._maxima = self._maxima, None
            if maxima is None or self._reader is None or self._sampler is None:
                return None
            self._sampler.read()
            maxima.add_background(*map(self._sampler.largest, ("rss_bytes", "tree_bytes", "swap_bytes")))
            self.phase.enter("epoch end")
            maxima.add_after(self._reader.read(self._sampler.latest))
            rows = maxima.rows(self.run or 0, self._moment())
            self._add_rows(rows)
            if self.leak_watch is not None:
                self.leak_watch.sample(self._held_bytes)
            return maxima.logs(self._known, in_bytes=self.epoch_logs == "bytes"), maxima.line()

    # ------------------------------------------------------------- batches

    def begin_part(self, kind: Kind) -> None:
        """Count batches of a kind from 0 again; one that began and found its data at an end is forgotten."""
        self._due.pop(kind, None)
        self._open.pop(kind, None)

    @_survives
    def begin_batch(self, kind: Kind, batch: int) -> None:
        """Read the peak since the reading before, and start the batch's own, if it is to be sampled."""
        with self._batch_hooks:
            self._step_start = self._batch_hooks.start
            self.phase.batch("train batch" if kind == "train" else self.phase.rest)
            if batch < self._due.get(kind, 0) or self._reader is None:
                return
            self._open[kind] = batch, self._reader.peaks()

    @_survives
    def end_batch(self, kind: Kind, phase: str, last: int) -> None:
        """Record the batch, or, with several steps an execution, the batches up to `last`."""
        with self._batch_hooks:
            self._end_batch(kind, phase, last)
        if self._step_start is not None:
            self._step_seconds += self._batch_hooks.end - self._step_start
            self._step_start = None

    def _end_batch(self, kind: Kind, phase: str, last: int) -> None:
        self._batches += 1
        current = self.phase
        current.phase, current.changes = current.rest, current.changes + 1
        if self._maxima is not None and kind == "train":
            self._maxima.steps = last + 1
        if kind not in self._open or self._reader is None or self._sampler is None:
            return
        batch, between = self._open.pop(kind)
        devices, host = self._reader.read_raw(), self._sampler.latest
        self._due[kind] = max(batch + self.update_freq, last + 1)
        now = self.clock()
        ended = (self.run or 0, phase, self.epoch, batch, last - batch + 1, now, devices, host, between)
        self._waiting.append(RawBatch._make(ended))
        if now >= self._write_at:
            self._write_batches()
            self._write_at = now + _WRITE_SECONDS

    def _write_batches(self) -> None:
        """Take batches that wait into rows, maxima and the file."""
        waiting, self._waiting = self._waiting, []
        if not waiting or self._reader is None:
            return
        written: list[Sample] = []
        for batch in waiting:
            samples = batch.samples(self._moment(batch.clock), self._reader.unpack(batch.devices, batch.host))
            if self._maxima is not None:
                self._maxima.add(samples)
            written += samples
        self._add_rows(written)

    def write_quietly(self) -> None:
        """Write the waiting batches, and raise nothing."""
        with contextlib.suppress(Exception):
            self._write_batches()

    def _moment(self, now: float | None = None) -> float:
        now = self.clock() if now is None else now
        return int((now - (self._zero or 0.0)) * 1e6) / 1e6  # whole microseconds, as the file has them

    def _reader_note(self, text: str) -> None:
        self.note(text, say=self.nvml is True and text.startswith("driver:"))

    # ------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        settings = ("filename", "append", "update_freq", "nvml", "epoch_logs", "sampling", "leaks")
        return {"settings": {name: getattr(self, name) for name in settings}, "family": self._family}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["settings"])  # type: ignore[misc]
        self._family = state["family"]
