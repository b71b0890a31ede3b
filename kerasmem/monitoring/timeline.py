"""A run's memory over time: `Sample`, one reading; `Timeline`, all of them."""

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

    Sizes are bytes; None where a size is not known (`Timeline.notes` has the reason).

    Attributes:
        run: number of the fit, evaluate or predict, from 0.
        time: seconds since the logger's first run began.
        phase: "train", "validation", "evaluate" or "predict" for a batch; "epoch" for the row that sums an
            epoch up (its sizes are the epoch's largest, validation and everything between batches included).
        epoch: Keras's number of the epoch, from 0; None outside `fit`.
        batch: number of the first batch of the step, from 0 in each epoch; None in an "epoch" row.
        steps: batches in the step: 1, more with `steps_per_execution` (Keras counts the last step as full); in an
            "epoch" row, batches in the epoch.
        device: logical device, such as "GPU:0"; None where the backend names none.
        in_use_bytes: handed out by the allocator after the batch.
        peak_bytes: the largest handed out at once during the batch.
        between_peak_bytes: the largest handed out at once since the previous row and before this batch: data
            loading, other callbacks, batches that were skipped (`update_freq`); in an "epoch" row, the largest of
            these in the epoch.
        reserved_bytes: taken by the allocator from the device, handed out or not.
        driver_used_bytes: in use on the card, by all processes, as the driver said when it was last asked: by the
            background readings, and at the beginning and end of epochs.
        driver_total_bytes: the card's memory, as the driver says.
        rss_bytes: RAM that this process holds, as the latest background reading found it.
        swap_bytes: what of this process is in swap, likewise.
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
_MOST_SECONDS = 1e12  # 30,000 years, which leaves room for what is made of them
_MOST = 2**53  # the largest number that a float holds to the unit
SIZES = tuple(name for name in COLUMNS if name.endswith("_bytes"))
BATCH_PHASES = ("train", "validation", "evaluate", "predict")
TEXTS = ("phase", "device")
_TABLE = np.dtype([(name, object if name in TEXTS else float) for name in COLUMNS])
Table = np.ndarray[Any, Any]
TABLE_ROWS = 65536


def pack(samples: Iterable[Sample]) -> Table:
    """Return samples as a structured array of 120 bytes a row; an unknown number is NaN."""
    return np.fromiter(samples, dtype=_TABLE)


def _unpack(row: Sequence[Any]) -> Sample:
    run, time, phase, epoch, batch, steps, device, *sizes = row
    return Sample._make([int(run), time, phase, *map(_whole, (epoch, batch, steps)), device, *map(_whole, sizes)])


def _whole(value: float) -> int | None:
    return None if value != value else int(value)


_PHASE_SIZES = ("rss_bytes", "tree_bytes", "swap_bytes", "driver_used_bytes")


@dataclass(frozen=True)
class PhasePeaks(Record, what="phase"):
    """The largest sizes that background readings found in one phase of one epoch, in bytes.

    Attributes:
        run: number of the run, as in `Sample`.
        epoch: Keras's number of the epoch; None before the first, and outside `fit`. What callbacks do at an
            epoch's end belongs to that epoch.
        phase: one of `PHASES`; None for a peak between two readings (the kernel keeps the process's largest size,
            but not when that was).
        readings: background readings in this phase.
        rss_bytes: resident in this process.
        tree_bytes: resident in this process and those under it, as PyDataset's workers; shared pages count for each.
        swap_bytes: what of this process was in swap.
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
        samples: the readings, or a table that `pack` returned.
        notes: what could not be read, and why.
        phases: what background readings found in each phase of each epoch.

    Attributes:
        notes: what could not be read, and why.
        phases: what background readings found in each phase of each epoch; CSV files do not hold it.

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
        """All readings, as a new tuple; to walk through a long run, iterate over the timeline itself."""
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
            field: a size of `Sample`, such as "peak_bytes" or "rss_bytes".
            phase: only rows of this phase; by default every row, the "epoch" rows included.
            epoch: only rows of this epoch.
            device: only rows of this device.
            run: only rows of this run.

        Returns:
            Bytes, or None where no such row has the size.

        Raises:
            UsageError: `field` is no size.
        """
        row = self.largest(field, phase=phase, epoch=epoch, device=device, run=run)
        return None if row is None else getattr(row, field)

    def largest(
        self, field: str = "peak_bytes", *, phase: str | None = None, epoch: int | None = None,
        device: str | None = None, run: int | None = None,
    ) -> Sample | None:  # fmt: skip
        """Return the row with the value that `max` returns, the first if several tie.

        Takes the arguments of `max`. If the largest value was reached between batches, it is an "epoch" row.
        """
        if field not in SIZES:
            raise UsageError(f"field: {field!r} is no size; choose one of {', '.join(SIZES)}")
        where = {"phase": phase, "epoch": epoch, "device": device, "run": run}
        wanted = [(name, value) for name, value in where.items() if value is not None]
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
        return self.max("peak_bytes")

    def to_frame(self) -> Any:
        """Return the readings as a `pandas.DataFrame`, a row a reading, sizes in bytes.

        Raises:
            UsageError: pandas is not installed.
        """
        return frame_of([row._asdict() for row in self])

    def __str__(self) -> str:
        at, where = self.largest("peak_bytes"), []
        if at is not None:
            counts = (("epoch", at.epoch), ("batch", at.batch))
            where = [
                f"in {printable(at.phase, 40)}",
                *(f"{name} {count + 1}" for name, count in counts if count is not None),
            ]
        return ", ".join([f"{len(self):,} readings", f"peak {format_size(self.peak)}", *where])

    def __repr__(self) -> str:
        return f"<Timeline: {self}>"

    def _repr_html_(self) -> str:
        return html_table(str(self), [row._asdict() for row in itertools.islice(self, MOST_ROWS)], len(self))


def make_sample(values: Mapping[str, Any]) -> Sample:
    """Return a sample from a mapping; unknown names are ignored, missing sizes are None.

    Raises:
        KeyError: run, time or phase is missing or not known.
        ValueError: a value is not of its column's kind.
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
                    raise ValueError(f"{name} is beyond any log's")
        row.append(value)
    return Sample._make(row)
