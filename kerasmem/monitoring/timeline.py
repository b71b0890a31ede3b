"""A run's memory over time: `Sample`, one reading; `Timeline`, all of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from kerasmem.errors import InputError, UsageError, check_format
from kerasmem.monitoring.phases import PhasePeaks, largest_known
from kerasmem.monitoring.rows import PackedRows

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
        rss_bytes: RAM that this process holds.
        swap_bytes: what of this process is in swap.
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
SIZES = tuple(name for name in COLUMNS if name.endswith("_bytes"))
BATCH_PHASES = ("train", "validation", "evaluate", "predict")


def _kind(annotation: object) -> str:
    text = str(annotation)
    return "text" if "str" in text else "float" if "float" in text else "int"


KINDS = tuple(_kind(annotation) for annotation in Sample.__annotations__.values())


class Timeline:
    """The readings of one or more runs, in the order they were made. Immutable.

    Args:
        samples: the readings.
        notes: what could not be read, and why.
        phases: what background readings found in each phase of each epoch.

    Example:
        >>> timeline = Timeline([Sample(0, 0.5, "train", 0, 7, 1, "GPU:0", 100, 900, *[None] * 6)])
        >>> timeline.max("peak_bytes"), timeline.largest("peak_bytes").batch
        (900, 7)
    """

    __slots__ = ("_notes", "_phases", "_rows")
    _notes: tuple[str, ...]
    _phases: tuple[PhasePeaks, ...]
    _rows: PackedRows

    def __init__(
        self, samples: Iterable[Sample] = (), notes: Iterable[str] = (), phases: Iterable[PhasePeaks] = ()
    ) -> None:
        rows = PackedRows(KINDS)
        for sample in samples:
            rows.append(sample)
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "_notes", tuple(notes))
        object.__setattr__(self, "_phases", tuple(phases))

    @classmethod
    def of_rows(cls, rows: PackedRows, notes: Iterable[str], phases: Iterable[PhasePeaks]) -> Timeline:
        """Return a timeline over rows that nobody else changes."""
        timeline = cls((), notes, phases)
        object.__setattr__(timeline, "_rows", rows)
        return timeline

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All readings, as a new tuple; to walk through a long run, iterate over the timeline itself."""
        return tuple(self)

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be read, and why."""
        return self._notes

    @property
    def phases(self) -> tuple[PhasePeaks, ...]:
        """What background readings found in each phase of each epoch; CSV files do not hold it."""
        return self._phases

    @property
    def dropped(self) -> int:
        """How many of the oldest readings were dropped to bound the memory that the timeline takes."""
        return self._rows.dropped

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
        rows = self._select(field, phase, epoch, device, run)
        return largest_known(getattr(row, field) for row in rows)

    def largest(
        self, field: str = "peak_bytes", *, phase: str | None = None, epoch: int | None = None,
        device: str | None = None, run: int | None = None,
    ) -> Sample | None:  # fmt: skip
        """Return the batch with the largest value of a size, the first where several tie.

        Takes the arguments of `max`; "epoch" rows do not compete unless `phase` asks for them.
        """
        best: Sample | None = None
        for row in self._select(field, phase, epoch, device, run):
            value = getattr(row, field)
            if value is None or (phase is None and row.phase == "epoch"):
                continue
            if best is None or value > getattr(best, field):
                best = row
        return best

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
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"timeline: not rows of the columns named ({error})") from error
        return cls(samples, data.get("notes", ()), phases)

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
        return Timeline.of_rows, (self._rows, self.notes, self.phases)

    def __repr__(self) -> str:
        return f"<Timeline: {len(self)} samples, peak {self.max('peak_bytes')} B>"

    def _select(
        self, field: str, phase: str | None, epoch: int | None, device: str | None, run: int | None
    ) -> Iterator[Sample]:
        if field not in SIZES:
            raise UsageError(f"field: {field!r} is no size; choose one of {', '.join(SIZES)}")
        for row in self:
            if (
                (phase is None or row.phase == phase)
                and (epoch is None or row.epoch == epoch)
                and (device is None or row.device == device)
                and (run is None or row.run == run)
            ):
                yield row


def make_sample(values: Mapping[str, Any]) -> Sample:
    """Return a sample from a mapping; unknown names are ignored, missing sizes are None.

    Raises:
        KeyError: run, time or phase is missing.
        ValueError: a value is not of its column's kind.
    """
    row: list[Any] = []
    for name, kind in zip(COLUMNS, KINDS, strict=True):
        value = values[name] if name in ("run", "time", "phase") else values.get(name)
        if value is not None:
            value = {"int": int, "float": float, "text": str}[kind](value)
        row.append(value)
    return Sample._make(row)
