"""A run's memory over time: `Sample`, one reading; `Timeline`, all of them."""

from __future__ import annotations

import itertools
import operator
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kerasmem.errors import InputError, UsageError, check_format
from kerasmem.monitoring.phases import PhasePeaks, largest_known
from kerasmem.records import MOST_ROWS, frame_of, html_table
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
        steps: batches in the step: 1, more with `steps_per_execution` (where the data's length is not known,
            Keras counts the last step as full); in an "epoch" row, batches in the epoch.
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
SIZES = tuple(name for name in COLUMNS if name.endswith("_bytes"))
BATCH_PHASES = ("train", "validation", "evaluate", "predict")


def _kind(annotation: object) -> str:
    text = str(annotation)
    return "text" if "str" in text else "float" if "float" in text else "int"


KINDS = tuple(_kind(annotation) for annotation in Sample.__annotations__.values())


class Timeline:
    """The readings of one or more runs, in the order they were made. Immutable.

    Args:
        samples: the readings; packed rows are taken as they are, so nobody else may change them.
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

    notes: tuple[str, ...]
    phases: tuple[PhasePeaks, ...]
    _rows: PackedRows

    def __init__(
        self, samples: Iterable[Sample] | PackedRows = (), notes: Iterable[str] = (), phases: Iterable[PhasePeaks] = ()
    ) -> None:
        rows = samples if isinstance(samples, PackedRows) else PackedRows(KINDS, rows=samples)
        vars(self).update(notes=tuple(notes), phases=tuple(phases), _rows=rows)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All readings, as a new tuple; to walk through a long run, iterate over the timeline itself."""
        return tuple(self)

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return each field of `Sample` as an array: numbers as float64, NaN where not known, and texts as objects."""
        return {name: self._rows.column(place) for place, name in enumerate(COLUMNS)}

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
        rows = self._select(field, phase=phase, epoch=epoch, device=device, run=run)
        return largest_known(getattr(row, field) for row in rows)

    def largest(
        self, field: str = "peak_bytes", *, phase: str | None = None, epoch: int | None = None,
        device: str | None = None, run: int | None = None,
    ) -> Sample | None:  # fmt: skip
        """Return the batch with the largest value of a size, the first where several tie.

        Takes the arguments of `max`; "epoch" rows do not compete unless `phase` asks for them.
        """
        rows = self._select(field, phase=phase, epoch=epoch, device=device, run=run)
        known = (row for row in rows if getattr(row, field) is not None and (phase or row.phase != "epoch"))
        return max(known, key=operator.attrgetter(field), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the timeline as plain data: column names, then a list for each row."""
        return {
            "format_version": FORMAT_VERSION,
            "columns": list(COLUMNS),
            "rows": [list(row) for row in self],
            "notes": list(self.notes),
            "phases": [peaks.to_dict() for peaks in self.phases],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timeline:
        """Return the timeline that `to_dict` described; columns that are missing are unknown.

        Raises:
            InputError: the data is not a timeline, or one of a newer kerasmem.
        """
        check_format("timeline", data, FORMAT_VERSION)
        try:
            columns = list(data["columns"])
            samples = [make_sample(dict(zip(columns, row, strict=True))) for row in data["rows"]]
            phases = [PhasePeaks.from_dict(peaks) for peaks in data.get("phases", ())]
            return cls(samples, map(str, data.get("notes", ())), phases)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"timeline: not rows of the columns named ({error})") from error

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sample]:
        return map(Sample._make, self._rows)

    def __getitem__(self, index: int) -> Sample:
        return Sample._make(self._rows[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        beside = self.notes == other.notes and self.phases == other.phases
        return beside and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Timeline does not change")

    def __reduce__(self) -> tuple[Any, ...]:
        return Timeline, (self._rows, self.notes, self.phases)

    @property
    def peak(self) -> int | None:
        """The largest allocator peak, in bytes; None where it is not known."""
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

    def _select(self, field: str, **where: Any) -> Iterator[Sample]:
        if field not in SIZES:
            raise UsageError(f"field: {field!r} is no size; choose one of {', '.join(SIZES)}")
        wanted = [(name, value) for name, value in where.items() if value is not None]
        return (row for row in self if all(getattr(row, name) == value for name, value in wanted))


def make_sample(values: Mapping[str, Any]) -> Sample:
    """Return a sample from a mapping; unknown names are ignored, missing sizes are None.

    Raises:
        KeyError: run, time or phase is missing or not known.
        ValueError: a value is not of its column's kind.
    """
    row: list[Any] = []
    for name, kind in zip(COLUMNS, KINDS, strict=True):
        value = values.get(name)
        if value is None and name in ("run", "time", "phase"):
            raise KeyError(name)
        if value is not None:
            value = {"int": int, "float": float, "text": str}[kind](value)
            if (kind == "int" and not -(2**63) < value < 2**63) or (kind == "float" and abs(value) > _MOST_SECONDS):
                raise ValueError(f"{name} is beyond any log's")
        row.append(value)
    return Sample._make(row)


_UNKNOWN = -(2**63)  # inside the integer arrays only; outside, unknown is None


class PackedRows:
    """Rows of one layout, held as one array a column.

    Args:
        kinds: for each column "float", "int" (None allowed) or "text" (None allowed; few distinct values).
        keep: rows to hold at most; the oldest are dropped, some thousands at a time. None holds all.
        rows: the first ones.
    """

    def __init__(self, kinds: Sequence[str], keep: int | None = None, rows: Iterable[Iterable[Any]] = ()) -> None:
        self._kinds = tuple(kinds)
        self._columns: list[array[Any]] = [array({"float": "d", "int": "q", "text": "H"}[kind]) for kind in kinds]
        self._codes: dict[str | None, int] = {}  # of texts, in the order of their numbers
        self._keep = keep
        for row in rows:
            self.append(row)

    def append(self, row: Iterable[Any]) -> None:
        """Add a row at the end."""
        for kind, column, value in zip(self._kinds, self._columns, row, strict=True):
            if kind == "text":
                column.append(self._codes.setdefault(value, len(self._codes)))
            else:
                column.append(_UNKNOWN if value is None else value)
        if self._keep is not None and len(self) >= self._keep + max(1, self._keep // 8):
            self._drop(len(self) - self._keep)

    def copy(self) -> PackedRows:
        """Return an independent copy, one memory copy a column."""
        twin = PackedRows(self._kinds, self._keep)
        twin._columns = [column[:] for column in self._columns]
        twin._codes = dict(self._codes)
        return twin

    def column(self, place: int) -> np.ndarray[Any, Any]:
        """Return a column as an array: numbers as float64, NaN where they are None, and texts as objects."""
        held = np.array(self._columns[place])
        if self._kinds[place] == "text":
            return np.array(list(self._codes), dtype=object)[held]
        return np.where(held == _UNKNOWN, np.nan, held)

    @property
    def held_bytes(self) -> int:
        """Bytes that the columns take from the system, room for more rows included."""
        return sum(map(sys.getsizeof, self._columns))

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError("row index out of range")
        place = index % len(self)
        return next(self._unpacked([column[place : place + 1] for column in self._columns]))

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self._unpacked(self._columns)

    def _unpacked(self, columns: list[array[Any]]) -> Iterator[tuple[Any, ...]]:
        texts = list(self._codes)
        values = (
            (texts[value] for value in column)
            if kind == "text"
            else (None if value == _UNKNOWN else value for value in column)
            for kind, column in zip(self._kinds, columns, strict=True)
        )
        return zip(*values, strict=True)

    def _drop(self, count: int) -> None:
        for column in self._columns:
            del column[:count]
