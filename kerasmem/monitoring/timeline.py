"""Memory over time: a `Timeline` of `Sample`s, and the peaks of each phase."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.records import MOST_ROWS, Record, frame_of, html_table
from kerasmem.units import format_size, printable

FORMAT_VERSION = 1


class Sample(NamedTuple):
    """One reading of one device, and of the host at the same moment.

    Sizes are bytes, or None if unknown; `Timeline.notes` has the reason.

    Attributes:
        run: number of the fit, evaluate or predict, from 0.
        time: seconds since the logger's first run began.
        phase: "train", "validation", "evaluate" or "predict" for a batch; "epoch" for the maxima of an epoch, including
            validation and the time between batches.
        epoch: Keras's number of the epoch, from 0; None outside `fit`.
        batch: number of the first batch of the step, from 0 in each epoch; None in an "epoch" row.
        steps: batches in the step: 1, or more with `steps_per_execution` (Keras counts the last step as full); in an
            "epoch" row, batches in the epoch.
        device: logical device, such as "GPU:0", or None if the backend names none.
        in_use_bytes: in use by the allocator after the batch.
        peak_bytes: the allocator's peak during the batch.
        between_peak_bytes: the allocator's peak between the previous row and this batch: data loading, other callbacks,
            skipped batches (`update_freq`); in an "epoch" row, the largest in the epoch.
        reserved_bytes: reserved by the allocator, in use or not.
        driver_used_bytes: in use on the card, by all processes, from the latest background reading of the driver.
        driver_total_bytes: memory of the card, from the driver.
        rss_bytes: resident memory of this process, from the latest background reading.
        swap_bytes: memory of this process in swap, from the latest background reading.
    """

    run: int
    time: float
    phase: str
    epoch: int | None
    batch: int | None
    steps: int | None
    device: str | None
    in_use_bytes: int | None
    peak_bytes: int | None
    between_peak_bytes: int | None
    reserved_bytes: int | None
    driver_used_bytes: int | None
    driver_total_bytes: int | None
    rss_bytes: int | None
    swap_bytes: int | None


COLUMNS = Sample._fields
_MOST_SECONDS = 1e12  # 30,000 years
_MOST = 2**53  # the largest integer that a float represents exactly
SIZES = tuple(name for name in COLUMNS if name.endswith("_bytes"))
BATCH_PHASES = ("train", "validation", "evaluate", "predict")
TEXTS = ("phase", "device")
_TABLE = np.dtype([(name, object if name in TEXTS else float) for name in COLUMNS])
Table = np.ndarray[Any, Any]
TABLE_ROWS = 65536


def pack(samples: Iterable[Sample]) -> Table:
    """Return samples as a structured array of 120 bytes per row. Unknown numbers are NaN."""
    return np.fromiter(samples, dtype=_TABLE)


def _unpack(row: Sequence[Any]) -> Sample:
    run, time, phase, epoch, batch, steps, device, *sizes = row
    return Sample._make([int(run), time, phase, *map(known_int, (epoch, batch, steps)), device, *map(known_int, sizes)])


def known_int(value: float) -> int | None:
    """Return a number of a table as an integer, or None if it is NaN."""
    return None if value != value else int(value)


_PHASE_SIZES = ("rss_bytes", "tree_bytes", "swap_bytes", "driver_used_bytes")


@dataclass(frozen=True)
class PhasePeaks(Record, what="phase"):
    """The largest sizes of background readings in one phase of one epoch, in bytes.

    Attributes:
        run: number of the run, as in `Sample`.
        epoch: Keras's number of the epoch; None before the first, and outside `fit`. An epoch includes the callbacks at
            its end.
        phase: one of `PHASES`, or None for a peak between two readings (the kernel keeps the process's peak, but not
            its time).
        readings: number of background readings in this phase.
        rss_bytes: resident in this process.
        tree_bytes: resident in this process and its subprocesses, such as PyDataset's workers; shared pages count for
            each.
        swap_bytes: memory of this process in swap.
        driver_used_bytes: in use on the fullest card, by all processes.
    """

    run: int
    epoch: int | None
    phase: str | None
    readings: int
    rss_bytes: int | None = None
    tree_bytes: int | None = None
    swap_bytes: int | None = None
    driver_used_bytes: int | None = None

    def joined(self, other: PhasePeaks) -> PhasePeaks:
        """Return the larger of each size, and the readings of both."""
        readings = self.readings + other.readings
        sizes = [largest_known((getattr(self, name), getattr(other, name))) for name in _PHASE_SIZES]
        return PhasePeaks(self.run, self.epoch, self.phase, readings, *sizes)


def largest_known(values: Iterable[int | None]) -> int | None:
    """Return the largest known value, or None if all are unknown."""
    return max((value for value in values if value is not None), default=None)


class Timeline:
    """The readings of one or more runs, in the order they were made. Immutable.

    Args:
        samples: the readings, or a table from `pack`.
        notes: failed readings and their reasons.
        phases: peaks of background readings in each phase of each epoch.

    Attributes:
        notes: failed readings and their reasons.
        phases: peaks of background readings in each phase of each epoch. CSV files do not contain them.

    Examples:
        >>> timeline = Timeline([Sample(0, 0.5, "train", 0, 7, 1, "GPU:0", 100, 900, *[None] * 6)])
        >>> timeline.max("peak_bytes"), timeline.largest("peak_bytes").batch
        (900, 7)
    """

    def __init__(
        self, samples: Iterable[Sample] | Table = (), notes: Iterable[str] = (), phases: Iterable[PhasePeaks] = ()
    ) -> None:
        self._table = samples if isinstance(samples, np.ndarray) else pack(samples)
        self.notes = tuple(notes)
        self.phases = tuple(phases)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All readings, as a new tuple. For a long run, iterate over the timeline instead."""
        return tuple(self)

    def tables(self) -> Iterator[Table]:
        """Yield the readings in tables of some thousand rows."""
        return (self._table[start : start + TABLE_ROWS] for start in range(0, len(self), TABLE_ROWS))

    def max(
        self, field: str = "peak_bytes", *, phase: str | None = None, epoch: int | None = None,
        device: str | None = None, run: int | None = None,
    ) -> int | None:  # fmt: skip
        """Return the largest value of a size.

        Args:
            field: a size of `Sample`, such as "rss_bytes". Defaults to "peak_bytes".
            phase: only rows of this phase. Defaults to all rows, "epoch" rows included.
            epoch: only rows of this epoch.
            device: only rows of this device.
            run: only rows of this run.

        Returns:
            Bytes, or None if the size is unknown in all these rows.

        Raises:
            UsageError: If `field` is not a size.
        """
        row = self.largest(field, phase=phase, epoch=epoch, device=device, run=run)
        return None if row is None else getattr(row, field)

    def largest(
        self, field: str = "peak_bytes", *, phase: str | None = None, epoch: int | None = None,
        device: str | None = None, run: int | None = None,
    ) -> Sample | None:  # fmt: skip
        """Return the row with the largest value of a size, the first if several are equal.

        Takes the arguments of `max`. If the largest value was reached between batches, the row is of phase "epoch".
        """
        if field not in SIZES:
            raise UsageError(f"field must be one of {', '.join(SIZES)}; got {field!r}.")
        criteria = {"phase": phase, "epoch": epoch, "device": device, "run": run}
        wanted = [(name, value) for name, value in criteria.items() if value is not None]
        rows = (row for row in self if all(getattr(row, name) == value for name, value in wanted))
        known = (row for row in rows if getattr(row, field) is not None)
        return max(known, key=operator.attrgetter(field), default=None)

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Sample]:
        return (_unpack(row.item()) for row in self._table)

    def __getitem__(self, index: int) -> Sample:
        return _unpack(self._table[index].item())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        return (self.notes, self.phases, self.samples) == (other.notes, other.phases, other.samples)

    @property
    def peak(self) -> int | None:
        """Largest allocator peak, in bytes, or None if unknown."""
        return self.max()

    def to_frame(self) -> Any:
        """Return the readings as a `pandas.DataFrame`, one row each, sizes in bytes.

        Raises:
            UsageError: If pandas is not installed.
        """
        return frame_of([row._asdict() for row in self])

    def __str__(self) -> str:
        row, position = self.largest(), []
        if row is not None:
            counts = (("epoch", row.epoch), ("batch", row.batch))
            numbers = [f"{name} {count + 1}" for name, count in counts if count is not None]
            position = [f"in {printable(row.phase, 40)}", *numbers]
        return ", ".join([f"{len(self):,} readings", f"peak {format_size(self.peak)}", *position])

    def __repr__(self) -> str:
        return f"<Timeline: {self}>"

    def _repr_html_(self) -> str:
        return html_table(str(self), [row._asdict() for row in itertools.islice(self, MOST_ROWS)], len(self))


def make_sample(values: Mapping[str, Any]) -> Sample:
    """Return a sample from a mapping. Unknown names are ignored, missing sizes are None.

    Raises:
        KeyError: If run, time or phase is missing or None.
        ValueError: If a value is of the wrong kind or too large.
    """
    row: list[Any] = []
    for name in COLUMNS:
        value = values.get(name)
        if value is None and name in ("run", "time", "phase"):
            raise KeyError(name)
        if value is not None:
            if name in TEXTS:
                value = sys.intern(str(value))
            else:
                value = float(value) if name == "time" else int(value)
                if not abs(value) <= (_MOST_SECONDS if name == "time" else _MOST):
                    raise ValueError(f"{name} is too large")
        row.append(value)
    return Sample._make(row)
