"""Turns the beginnings and ends of runs, epochs and batches into samples, and writes them out.

Knows nothing of Keras: `MemoryLogger` translates Keras's hooks. A reading or a disk that fails ends that part
of the recording with one warning, and never reaches the training loop as an exception.
"""

from __future__ import annotations

import functools
import os
import uuid
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeVar

from kerasmem.devices.nvml import Nvml
from kerasmem.errors import KerasmemError
from kerasmem.monitoring.board import Board
from kerasmem.monitoring.cost import Overhead
from kerasmem.monitoring.logfile import Format, LogFile
from kerasmem.monitoring.maxima import Maxima
from kerasmem.monitoring.meter import DeviceReading, Meter
from kerasmem.monitoring.rows import PackedRows
from kerasmem.monitoring.timeline import KINDS, Sample, Timeline

Kind = Literal["train", "test", "predict"]
F = TypeVar("F", bound=Callable[..., Any])
_begun: set[str] = set()  # families whose file has been begun in this process


def _hook(method: F) -> F:
    """Count the method's time as the recorder's cost, and keep its failures out of the training loop."""
    is_batch = method.__name__.endswith("_batch")
    starts = method.__name__ == "begin_run"  # a new run gets a new chance

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any) -> Any:
        if self.broken and not starts:
            return None
        start = self.clock()
        try:
            return method(self, *args)
        except KerasmemError:
            raise
        except Exception as error:
            self.broken = True
            self._finish_files()
            self.note(f"logger: stopped by an unexpected {type(error).__name__}: {error}", say=True)
            return None
        finally:
            spent = self.clock() - start
            self.total_seconds += spent
            if is_batch:
                self.batch_seconds += spent

    return guarded  # type: ignore[return-value]


class _OpenBatch:
    """A sampled batch that has begun: its number, the peaks before it, and its own if known early."""

    __slots__ = ("batch", "between", "settled")

    def __init__(self, batch: int, between: list[int | None]) -> None:
        self.batch = batch
        self.between = between
        self.settled: list[int | None] | None = None


class Recorder:
    """Records runs. The arguments are those of `MemoryLogger`, checked.

    Attributes:
        clock: seconds that only go forward.
        run: number of the run under way; None between runs.
        epoch: number of the epoch under way; None outside.
        broken: True once an unexpected error has ended the recording.
    """

    _meter: Meter | None
    _file: LogFile | None
    _board: Board | None
    _maxima: Maxima | None
    _open: dict[str, _OpenBatch]
    _due: dict[str, int]

    def __init__(
        self,
        path: Path | None,
        format: Format,
        *,
        every: int,
        append: bool,
        board: str | None,
        nvml: Nvml | bool | str,
        devices: Sequence[str] | None,
        reset_peaks: bool,
        keep: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self.run: int | None = None
        self.epoch: int | None = None
        self.broken = False
        self.total_seconds = self.batch_seconds = 0.0
        self.batches = 0
        self._path, self._format, self._append = path, format, append
        self._family = uuid.uuid4().hex  # copies have the same, for they write to the same file
        self._board_folder = board
        self._every = every
        self._nvml, self._devices, self._reset_peaks = nvml, devices, reset_peaks
        self._rows = PackedRows(KINDS, keep)
        self._notes: dict[str, None] = {}
        self._next_run = 0
        self._elapsed = 0.0  # of the time line, when it was last stopped
        self._zero: float | None = None  # the clock at the time line's zero
        self._peaks: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._known: set[str] = set()
        self._drop_handles()

    # ------------------------------------------------------------- results

    @property
    def timeline(self) -> Timeline:
        """The samples so far, as an immutable copy."""
        return Timeline._of(self._rows.copy(), self._notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be read, and why."""
        return tuple(self._notes)

    @property
    def peaks(self) -> tuple[dict[str, int], dict[str, int]]:
        """Each device's largest peak in the latest run, and in the process."""
        return self._peaks if self._meter is None else (self._meter.run_peaks, self._meter.process_peaks)

    @property
    def overhead(self) -> Overhead:
        """What the recording cost so far."""
        return Overhead(self.total_seconds, self.batch_seconds, self.batches)

    def note(self, text: str, *, say: bool = False) -> None:
        """Keep a sentence on what cannot be read, once; `say` warns too."""
        if text in self._notes:
            return
        self._notes[text] = None
        if self._file is not None and self.run is not None:
            try:
                self._file.add_object("note", run=self.run, text=text)
            except OSError as error:
                self._stop_file(error)
        if say:
            warnings.warn(f"MemoryLogger: {text}", stacklevel=2)

    # ---------------------------------------------------------------- runs

    @_hook
    def begin_run(self, busy: Callable[[], bool] | None = None) -> None:
        """Open the file and the devices.

        Args:
            busy: whether the run is still going on, where that can be told.

        Raises:
            UsageError: the file cannot be written, or is another recorder's that is busy.
        """
        self.broken = False
        self._finish()
        if self._meter is not None and self._meter.pid != os.getpid():
            self._meter = None  # the parent's of this forked process
        if self._zero is None:
            self._zero = self.clock() - self._elapsed
        if self._path is not None:
            append = self._append or self._next_run > 0 or self._family in _begun
            self._file = LogFile(self._path, self._format, append=append, busy=busy)
            _begun.add(self._family)
            self._next_run = max(self._next_run, self._file.next_run)
        if self._board is None and self._board_folder is not None:
            self._board = Board(self._board_folder)
        if self._meter is None:
            self._meter = Meter(self._meter_note, devices=self._devices, nvml=self._nvml, reset_peaks=self._reset_peaks)
        readings, host = self._meter.start_run()
        self._known = {name for r in readings for name, value in r._asdict().items() if value is not None}
        if "in_use_bytes" in self._known:
            self._known.add("peak_bytes")
        self._known |= {name for name, value in (host._asdict() if host else {}).items() if value is not None}
        self.run = self._next_run
        self._next_run += 1
        if self._file is not None:
            self._file.start_run(self.run, datetime.now(timezone.utc).isoformat(), self.notes)

    @_hook
    def end_run(self) -> None:
        """Close the files; the devices stay open for the next run."""
        self._finish()

    def _finish(self) -> None:
        if self.run is not None and self._meter is not None:
            self._meter.end_run()
        self._finish_files()

    def _finish_files(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        self._file = self.run = self.epoch = self._maxima = None
        self._open.clear()
        self._due.clear()

    def close(self) -> None:
        """End a run that broke off, and let go of everything; recording again opens it again."""
        self.end_run()
        if self._meter is not None:
            self._peaks = self.peaks
            self._meter.close()
            self._meter = None

    # -------------------------------------------------------------- epochs

    @_hook
    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch's maxima."""
        self.epoch = epoch
        self.begin_part("train")
        if self._meter is not None:
            self._meter.peaks()
            self._maxima = Maxima(epoch, self._meter.names)

    @_hook
    def end_epoch(self) -> tuple[dict[str, float], str] | None:
        """Record the epoch's maxima; return what goes into Keras's logs, and a line for people."""
        maxima, self._maxima = self._maxima, None
        if maxima is None or self._meter is None:
            return None
        readings, host = self._meter.read()
        maxima.add([r._replace(peak_bytes=None) for r in readings], [r.peak_bytes for r in readings], host)
        self._write(maxima.rows(self.run or 0, self._moment()))
        return maxima.logs(self._known), maxima.line()

    # ------------------------------------------------------------- batches

    def begin_part(self, kind: Kind) -> None:
        """Begin to count batches of a kind anew; one that began and found its data at an end is forgotten."""
        self._due.pop(kind, None)
        self._open.pop(kind, None)

    @_hook
    def begin_batch(self, kind: Kind, batch: int) -> None:
        """Read the peak since the reading before, and start the batch's own, if it is to be sampled."""
        if batch < self._due.get(kind, 0) or self._meter is None:
            return
        peaks = self._meter.peaks()
        for outer in self._open.values():  # its end hooks are running this batch: its own work is done
            if outer.settled is None:
                outer.settled = peaks
        self._open[kind] = _OpenBatch(batch, peaks)

    @_hook
    def end_batch(self, kind: Kind, phase: str, last: int, total: int | None = None) -> None:
        """Record the batch, or, with several steps an execution, the batches up to `last`.

        With several steps an execution, Keras counts beyond the last batch of the epoch; `total`, where it is
        known, is how many there are.
        """
        self.batches += 1
        opened = self._open.pop(kind, None)
        if total is not None and total > (0 if opened is None else opened.batch):
            last = min(last, total - 1)
        if opened is not None:
            last = max(last, opened.batch)
        if self._maxima is not None and kind == "train":
            self._maxima.steps = last + 1
        if opened is None or self._meter is None:
            return
        batch = opened.batch
        self._due[kind] = max(batch + self._every, last + 1)
        readings, host = self._meter.read()
        if opened.settled is not None:
            pairs = zip(readings, opened.settled, strict=True)
            readings = [reading._replace(peak_bytes=peak) for reading, peak in pairs]
        if self._maxima is not None:
            where = f"in batch {batch}" if phase == "train" else f"in {phase} batch {batch}"
            self._maxima.add(readings, opened.between, host, where)
        head = (self.run or 0, self._moment(), phase, self.epoch, batch, last - batch + 1)
        tail = host or (None, None)
        self._write([Sample(*head, *_sizes(r, before), *tail) for r, before in zip(readings, opened.between)])  # noqa: B905

    def _moment(self) -> float:
        return round(self.clock() - (self._zero or 0.0), 6)  # as the file has it

    def _write(self, samples: list[Sample]) -> None:
        for sample in samples:
            self._rows.append(sample)
        if self._file is not None:
            try:
                self._file.add(samples)
            except OSError as error:
                self._stop_file(error)
        if self._board is not None:
            try:
                self._board.add(samples)
            except OSError as error:
                self._board = self._board_folder = None
                self.note(f"tensorboard: writing stopped: {error.strerror or error}", say=True)

    def _stop_file(self, error: OSError) -> None:
        """A disk that is full ends the writing, not the training."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
        reason = error.strerror or error
        self.note(f"file: writing to {self._path} stopped: {reason}; .timeline goes on", say=True)

    def _meter_note(self, text: str) -> None:
        self.note(text, say=self._nvml is True and text.startswith("driver:"))

    # ------------------------------------------------------------- copies

    def _drop_handles(self) -> None:
        self._meter = self._file = self._board = self._maxima = None
        self._open, self._due = {}, {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds settings and results, and no handle: it opens its own when it records."""
        state = dict(self.__dict__)
        state["_peaks"] = self.peaks
        state["_elapsed"] = self._elapsed if self._zero is None else self._moment()
        for name in ("_meter", "_file", "_board", "_maxima", "_open", "_due"):
            del state[name]
        state["_zero"] = state["run"] = state["epoch"] = None
        if isinstance(self._nvml, Nvml):
            state["_nvml"] = "auto"
        state["_rows"] = self._rows.copy()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._drop_handles()


def _sizes(reading: DeviceReading, before: int | None) -> tuple[Any, ...]:
    device, in_use, peak, reserved, used, total = reading
    return device, in_use, peak, before, reserved, used, total
