"""Turns the beginnings and ends of runs, epochs and batches into samples, and writes them out.

Knows nothing of Keras: `MemoryLogger` translates Keras's hooks. A reading or a disk that fails ends that part
of the recording with one warning, and never reaches the training loop as an exception.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from kerasmem.checks import choice, number, path, whole
from kerasmem.cluster import Worker, own_path
from kerasmem.devices.nvml import Nvml
from kerasmem.errors import UsageError, warn_user
from kerasmem.monitoring.batch_queue import BatchQueue, OpenBatch, RawBatch
from kerasmem.monitoring.cost import Overhead, costed
from kerasmem.monitoring.device_reader import DeviceReader
from kerasmem.monitoring.epoch_maxima import EpochMaxima
from kerasmem.monitoring.leak_watch import LeakWatch
from kerasmem.monitoring.logfile import LogFile, format_of
from kerasmem.monitoring.phases import CurrentPhase, PhasePeaks
from kerasmem.monitoring.sampler import Sampler
from kerasmem.monitoring.timeline import KINDS, PackedRows, Sample, Timeline
from kerasmem.processes.children import GOES_ON


@dataclass
class LoggerSettings:
    """What a logger is to do; `MemoryLogger` has the meaning of each.

    Raises:
        UsageError: an argument cannot be right.
    """

    filename: str | os.PathLike[str] | None
    append: bool
    update_freq: int
    nvml: Nvml | bool | str
    verbose: int
    reset_peaks: bool
    epoch_logs: bool | str
    sampling: float
    leaks: bool

    def __post_init__(self) -> None:
        if self.filename is not None and os.path.isdir(path("filename", self.filename)):
            folder = os.fspath(self.filename)
            raise UsageError(f"filename: {folder!r} is a folder; name a file in it, such as memory.csv")
        self.update_freq = whole("update_freq", self.update_freq)
        if not isinstance(self.nvml, Nvml):
            choice("nvml", self.nvml, ("auto", True, False))
        choice("epoch_logs", self.epoch_logs, (True, False, "bytes"))
        choice("verbose", self.verbose, (0, 1, False, True))
        self.sampling = number("sampling", self.sampling, 0, 1000)
        if self.filename is not None:
            format_of(self.filename)


Kind = Literal["train", "test", "predict"]
_PENDING = 64  # batches whose readings wait to be taken in
_MOST_SAMPLES = 1_000_000  # kept in memory, 108 bytes each; the file has all
_begun: set[str] = set()  # families whose file has been begun in this process


class Recorder:
    """Records runs. A copy has the settings and the log file of the original, and no results yet.

    Args:
        settings: the arguments of `MemoryLogger`, checked.
        clock: seconds that only go forward.

    Attributes:
        settings: as given; a copy opens its own connection to the driver.
        run: number of the run under way; None between runs.
        epoch: number of the epoch under way; None outside.
        worker: which of several this process is in the run; None where it trains alone.
        phase: that training is in.
        broken: True once an unexpected error has ended the recording.
        leak_watch: what watches for memory that epochs keep, where that is asked for.
    """

    def __init__(self, settings: LoggerSettings, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.run: int | None = None
        self.epoch: int | None = None
        self.broken = False
        self.total_seconds = self.batch_seconds = self.step_seconds = self._background_seconds = 0.0
        self.step_start: float | None = None
        self.batches = 0
        self.phase = CurrentPhase()
        self.worker: Worker | None = None
        self.settings = settings
        self._family = uuid.uuid4().hex  # shared by copies, which add to the same file
        self._file: LogFile | None = None
        self._rows = PackedRows(KINDS, _MOST_SAMPLES)
        self.leak_watch = LeakWatch("epochs") if settings.leaks else None
        self._leak_notes: tuple[str, ...] = ()  # of the latest run: the next one knows more
        self._notes: dict[str, None] = {}
        self._phases: list[PhasePeaks] = []
        self._next_run = 0
        self._zero: float | None = None  # the clock at the time line's zero
        self._peaks: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._known: set[str] = set()
        self._reader: DeviceReader | None = None
        self._maxima: EpochMaxima | None = None
        self._sampler: Sampler | None = None
        self._open: dict[str, OpenBatch] = {}
        self._due: dict[str, int] = {}
        self._pending = BatchQueue(self._take_in)

    # ------------------------------------------------------------- results

    @property
    def timeline(self) -> Timeline:
        """The samples so far, as an immutable copy."""
        self._pending.flush()
        return Timeline(self._rows.copy(), self._notes, self.phases)

    @property
    def phases(self) -> tuple[PhasePeaks, ...]:
        """What background readings found, epoch by epoch; the epoch under way is not in it."""
        return tuple(self._phases)

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be read, and why."""
        return (*self._notes, *self._leak_notes)

    @property
    def peaks(self) -> tuple[dict[str, int], dict[str, int]]:
        """Each device's largest peak in the latest run, and in the process."""
        return self._peaks if self._reader is None else (self._reader.run_peaks, self._reader.process_peaks)

    @property
    def overhead(self) -> Overhead:
        """What the recording cost so far."""
        background = self._background_seconds + (self._sampler.seconds if self._sampler is not None else 0.0)
        return Overhead(self.total_seconds, self.batch_seconds, self.batches, self.step_seconds, background)

    def note(self, text: str, *, say: bool = False) -> None:
        """Keep a sentence on what cannot be read, once; `say` warns too."""
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
            self.note(f"file: writing to {self.settings.filename} stopped: {reason}; .timeline goes on", say=True)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    # ---------------------------------------------------------------- runs

    @costed
    def begin_run(self, worker: Worker | None = None) -> None:
        """Open the file and the devices.

        Args:
            worker: which of several this process is.

        Raises:
            UsageError: the file cannot be written.
        """
        self.broken = False
        self._finish()  # of a run that broke off
        self.phase.enter("between")
        self.step_start = None
        if self._reader is not None and self._reader.pid != os.getpid():
            self._reader = None  # the parent's of this forked process
        if self._zero is None:
            self._zero = self.clock()
        self.worker = worker
        self._open_file(worker)
        if self._reader is None:
            asked = self.settings
            self._reader = DeviceReader(self._reader_note, nvml=asked.nvml, reset_peaks=asked.reset_peaks)
        sampling = self.settings.sampling
        behind = self._pending.flush_quietly if sampling else None
        sampler = Sampler(self.phase, self._reader.read_driver, self._reader_note, sampling, behind)
        readings = self._reader.start_run()
        self._known = {name for r in readings for name, value in r._asdict().items() if value is not None}
        if "in_use_bytes" in self._known:
            self._known.add("peak_bytes")
        if "rss_bytes" in self._known:
            self._known.add("tree_bytes")
        self.run = self._next_run
        self._next_run += 1
        if self._file is not None:
            ranks = {} if worker is None else {"rank": worker.rank, "ranks": worker.size}
            self._file.start_run(self.run, datetime.now(timezone.utc).isoformat(), tuple(self._notes), **ranks)
            self._file.behind = weakref.WeakMethod(self._pending.flush_quietly)
        self._sampler = sampler
        sampler.start()

    def _open_file(self, worker: Worker | None) -> None:
        """Open the log, under the worker's own name if there are several, to add to what this recorder has begun."""
        name = self.settings.filename
        if name is None:
            return
        has_begun = self._next_run > 0 or self._family in _begun
        append = self.settings.append or has_begun or bool(os.environ.get(GOES_ON))
        self._file = LogFile(own_path(Path(name), worker), append)
        self._next_run = max(self._next_run, self._file.next_run)
        _begun.add(self._family)

    @costed
    def end_run(self) -> None:
        """Close the files; the devices stay open for the next run."""
        self._finish()

    def break_off(self, error: Exception) -> None:
        """End the recording because of a fault in it; training goes on."""
        self.broken = True
        with contextlib.suppress(Exception):  # the fault that is being dealt with, most likely
            self._pending.flush()
        self._pending = BatchQueue(self._take_in)
        self._end_sampler()
        self._finish_files()
        self.note(f"logger: stopped by an unexpected {type(error).__name__}: {error}", say=True)

    def _finish(self) -> None:
        if self._sampler is not None:
            self._end_sampler()
        if self.run is not None:
            if self._reader is not None:
                self._reader.end_run()
            if self.leak_watch is not None:
                found = self.leak_watch.report()
                said = found.explain() if found.leaks or (found.iterations and found.too_short) else ()
                self._leak_notes = tuple(f"leak: {text}" for text in said)
                for text in self._leak_notes:
                    self._add_object("note", run=self.run, text=text)
            self._add_object("cost", run=self.run, **self.overhead.to_dict())
        self._finish_files()

    def _end_sampler(self) -> None:
        """Stop the background thread and keep what it found."""
        sampler, self._sampler = self._sampler, None
        if sampler is None or sampler.pid != os.getpid():  # the parent's of this forked process
            return
        sampler.stop()
        sampler.read()
        self._background_seconds += sampler.seconds
        self._keep_phases(sampler)

    def _keep_phases(self, sampler: Sampler) -> None:
        for peaks in sampler.cut(self.run or 0, self.epoch):
            self._phases.append(peaks)
            self._add_object("phase", **vars(peaks))

    def _finish_files(self) -> None:
        self._pending.flush()
        self._close_file()
        self.run = self.epoch = self._maxima = None
        self._open.clear()
        self._due.clear()

    def close(self) -> None:
        """End a run that broke off, and let go of everything; recording again opens it again."""
        self.end_run()
        if self._reader is not None:
            self._peaks = self.peaks
            self._reader.close()
            self._reader = None

    # -------------------------------------------------------------- epochs

    @costed
    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch's maxima; what came before belongs to the epoch before."""
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

    @costed
    def end_epoch(self) -> tuple[dict[str, float], str] | None:
        """Record the epoch's maxima; return what goes into Keras's logs, and a line for people."""
        self._pending.flush()
        maxima, self._maxima = self._maxima, None
        if maxima is None or self._reader is None:
            return None
        if self._sampler is not None:
            self._sampler.read()
            maxima.add_background(*map(self._sampler.largest, ("rss_bytes", "tree_bytes", "swap_bytes")))
        self.phase.enter("epoch end")
        maxima.add_after(self._reader.read())
        rows = maxima.rows(self.run or 0, self._moment())
        for row in rows:
            self._rows.append(row)
        self._add_rows(rows)
        if self.leak_watch is not None:
            self.leak_watch.sample(self._rows.held_bytes)
        return maxima.logs(self._known, in_bytes=self.settings.epoch_logs == "bytes"), maxima.line()

    # ------------------------------------------------------------- batches

    def begin_part(self, kind: Kind) -> None:
        """Count batches of a kind from 0 again; one that began and found its data at an end is forgotten."""
        self._due.pop(kind, None)
        self._open.pop(kind, None)

    @costed
    def begin_batch(self, kind: Kind, batch: int) -> None:
        """Read the peak since the reading before, and start the batch's own, if it is to be sampled."""
        self.phase.batch("train batch" if kind == "train" else self.phase.rest)
        if batch < self._due.get(kind, 0) or self._reader is None:
            return
        peaks = self._reader.peaks()
        for outer in self._open.values():  # its end hooks are running this batch: its own work is done
            if outer.settled is None:
                outer.settled = peaks
        self._open[kind] = OpenBatch(batch, peaks)

    @costed
    def end_batch(self, kind: Kind, phase: str, last: int, total: int | None = None) -> None:
        """Record the batch, or, with several steps an execution, the batches up to `last`.

        With several steps an execution, Keras counts beyond the last batch of the epoch; `total`, where it is
        known, is how many there are.
        """
        self.batches += 1
        current = self.phase
        current.phase, current.changes = current.rest, current.changes + 1
        opened = self._open.pop(kind, None)
        if total is not None and total > (0 if opened is None else opened.batch):
            last = min(last, total - 1)
        if opened is not None:
            last = max(last, opened.batch)
        if self._maxima is not None and kind == "train":
            self._maxima.steps = last + 1
        if opened is None or self._reader is None:
            return
        batch = opened.batch
        raw = self._reader.read_raw()
        self._due[kind] = max(batch + self.settings.update_freq, last + 1)
        steps = last - batch + 1
        queue = self._pending.batches
        ended = (self.run or 0, phase, self.epoch, batch, steps, self.clock(), raw, opened.between, opened.settled)
        queue.append(tuple.__new__(RawBatch, ended))  # the type's own way is a Python function more
        if len(queue) >= _PENDING or (self.settings.sampling == 0 and self._file is not None):
            self._pending.flush()

    def _take_in(self, batches: list[RawBatch]) -> None:
        """Take batches into rows, maxima and the file; also called in the background thread."""
        if self._reader is None:
            return
        taken: list[Sample] = []
        for batch in batches:
            samples = batch.samples(self._moment(batch.clock), self._reader.unpack(batch.raw))
            for sample in samples:
                self._rows.append(sample)
            if self._maxima is not None:
                self._maxima.add(samples, batch.where)
            taken += samples
        self._add_rows(taken)

    def _moment(self, now: float | None = None) -> float:
        now = self.clock() if now is None else now
        return int((now - (self._zero or 0.0)) * 1e6) / 1e6  # whole microseconds, as the file has them

    def _reader_note(self, text: str) -> None:
        self.note(text, say=self.settings.nvml is True and text.startswith("driver:"))

    # ------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        settings = self.settings
        if isinstance(settings.nvml, Nvml):
            settings = replace(settings, nvml="auto")
        return {"settings": settings, "family": self._family}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["settings"])  # type: ignore[misc]
        self._family = state["family"]

    def __del__(self) -> None:
        waiting = getattr(self, "_pending", None)  # None: it was never whole
        if waiting is not None:
            waiting.flush_quietly()
