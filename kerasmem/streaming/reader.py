"""Read rows of files into windows, or by their numbers."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kerasmem.hdf5.format.columns import Column
from kerasmem.hdf5.format.filters import Scratch
from kerasmem.hdf5.format.layout import DataLayout, Grid
from kerasmem.hdf5.rows.delivery import Delivery, RowRun, Slots, WantedRows, slice_slots
from kerasmem.hdf5.rows.jobs import DatasetRows, Job, ResidentRows, Task, prefetch
from kerasmem.hdf5.rows.open_files import OpenFiles
from kerasmem.hdf5.rows.paths import Access
from kerasmem.streaming.order import Blocks, EpochOrder, Segment

_Item = TypeVar("_Item", bound=Task)


@dataclass(eq=False)
class RowReader:
    """Read rows, opening files as needed. Thread-safe.

    Args:
        layout: layout of the files when the sequence was created.
        columns: columns to read, without duplicates.
        resident: names of datasets that are kept in memory as stored, such as labels.
        access: trust in the files, and access to URLs.
    """

    layout: DataLayout
    columns: Sequence[Column]
    resident: Collection[str]
    access: Access

    def __post_init__(self) -> None:
        self.rows_read = 0
        self.files = OpenFiles(self.layout, self.access)
        self._deliveries = [Delivery(column) for column in self.columns]
        self._by_dataset: dict[str, list[int]] = {}
        for number, column in enumerate(self.columns):
            self._by_dataset.setdefault(column.name, []).append(number)
        self._rows = {name: DatasetRows(self.files, name) for name in self._by_dataset}
        self._resident = {
            layout.name: ResidentRows(layout, self._rows[layout.name])
            for layout in self.layout.datasets
            if layout.name in self.resident
        }
        self._announcing = threading.Lock()
        self._now: tuple[int, int] | None = None  # key of the window announced last
        self._next: tuple[tuple[int, int], list[Job]] | None = None  # key and jobs of the next window, if announced

    def tasks(
        self,
        order: EpochOrder,
        window: int,
        arrays: Sequence[np.ndarray],
        *,
        in_file_order: bool,
        ahead: bool = True,
        alone: bool = False,
    ) -> list[Task]:
        """Return the tasks that fill a window. They may run in any order and in parallel.

        Args:
            order: the order of the epoch.
            window: number of the window in the epoch.
            arrays: one array per column, as long as the window.
            in_file_order: write the rows in the order of reading, not of delivery.
            ahead: whether no reader waits for this window, so the next one may be fetched in parallel.
            alone: whether the window is not part of an epoch.

        Raises:
            DataError: If a file is gone or has changed.
        """
        first_row = order.blocks.run(int(order.window_order(window)[0]))[0]
        with self.files.use(self.files[int(self.files.numbers(first_row))]):
            pass  # notices a file that is gone or has changed before anything is read
        rows = order.window_rows(window)
        slots = slice(0, rows) if in_file_order else _slots(order, window)
        self.rows_read += rows

        numbers = functools.cache(lambda: order.blocks.rows(order.window_order(window)))
        runs = functools.cache(lambda: self._runs(order, window, slots))
        wanted_rows = WantedRows(numbers, runs, slots)
        resident: list[Task] = []
        heavy = []
        for name in self._by_dataset:
            outputs = [(self._deliveries[number], arrays[number]) for number in self._by_dataset[name]]
            if name in self.resident:
                resident += self._resident[name].jobs(wanted_rows, outputs)
            else:
                heavy.append(self._rows[name].jobs(wanted_rows, outputs))
        jobs = _interleave(heavy)
        tasks: list[Task] = [*resident, *jobs]
        if alone:
            prefetch(jobs)
        elif heavy and self.files.remote:
            self._announce(order.key(window), jobs)
            if window + 1 < order.windows:
                if ahead:  # keeps the link busy while the rows of this window are unpacked and delivered
                    self._announce_next(order, window + 1)
                else:
                    tasks.append(lambda scratch: self._announce_next(order, window + 1))
        return tasks

    def read(self, rows: np.ndarray, grid: Grid) -> list[np.ndarray]:
        """Return rows in the order of `rows`, one array per column.

        Args:
            rows: row numbers.
            grid: cells of rows that are read together.

        Raises:
            DataError: If they cannot be read.
        """
        ascending, inverse = np.unique(rows, return_inverse=True)
        arrays = [np.empty((len(ascending), *column.row_shape), column.dtype) for column in self.columns]
        if len(ascending):
            blocks = Blocks(ascending, grid)
            order = EpochOrder(blocks, blocks.count, None, 0)
            scratch = Scratch()
            for task in self.tasks(order, 0, arrays, in_file_order=True, alone=True):
                task(scratch)
            self.check(order, 0, order.total)
        if np.array_equal(inverse, np.arange(len(rows))):
            return arrays
        return [array[inverse] for array in arrays]

    def check(self, order: EpochOrder | None = None, start: int = 0, stop: int = 0) -> None:
        """Check that no file was changed.

        Args:
            order: the order of an epoch, to check only the files of its rows `start` to `stop`. None checks all open
                files.
            start: first row.
            stop: row after the last.

        Raises:
            DataError: If a file was cut, replaced or rewritten since it was opened.
        """
        if order is None or len(self.layout.files) == 1:
            self.files.check()
        else:
            self.files.check(np.unique(self.files.numbers(order.rows(start, stop))).tolist())

    def close(self) -> None:
        """Close the files once no task reads from them. They are not opened again."""
        self.files.close()

    # ---- tasks

    def _announce(self, key: tuple[int, int], jobs: Sequence[Task]) -> None:
        """Prefetch the byte ranges of a window unless they are in flight."""
        with self._announcing:
            self._now, (known, in_flight), self._next = key, self._next or (None, []), None
            if known != key or len(in_flight) != len(jobs):
                prefetch(jobs)  # drops ranges that were announced for another window
                return
            for job, early in zip(jobs, in_flight, strict=True):
                if isinstance(job, Job):
                    job.claim = early.claim

    def _announce_next(self, order: EpochOrder, window: int) -> None:
        """Prefetch the byte ranges of the next window after all others."""
        key = order.key(window)
        with self._announcing:
            if key != self._now and (self._next is None or self._next[0] != key):
                runs = self._runs(order, window, _slots(order, window))
                heavy = [name for name in self._by_dataset if name not in self.resident]
                jobs = _interleave([self._rows[name].run_jobs(runs, ()) for name in heavy])
                prefetch(jobs)
                self._next = key, jobs

    def _runs(self, order: EpochOrder, window: int, slots: Slots) -> list[RowRun]:
        """Return the runs of rows of a window in the order of reading."""
        runs, done = [], 0
        for block in order.window_order(window).tolist():
            start, stop, picked = order.blocks.run(block)
            count = stop - start if picked is None else len(picked)
            runs.append(RowRun(start, stop, picked, slice_slots(slots, done, done + count)))
            done += count
        return _sort_by_delivery(runs) if self.files.remote and order.windows > 1 else runs


def _interleave(jobs: Sequence[Sequence[_Item]]) -> list[_Item]:
    """Interleave the jobs of several datasets."""
    turns = itertools.zip_longest(*jobs)
    return [job for turn in turns for job in turn if job is not None]


def _slots(order: EpochOrder, window: int) -> Slots:
    """Return the index in the order of delivery of each row in the order of reading."""
    rows = order.window_rows(window)
    delivered = order.slots(Segment(window, 0, rows))
    if delivered is None:
        return slice(0, rows)
    slots = np.empty(rows, np.int32)
    slots[delivered] = np.arange(rows, dtype=np.int32)
    return slots


def _sort_by_delivery(runs: Sequence[RowRun]) -> list[RowRun]:
    """Sort runs by the delivery of their first rows. Runs that are neighbors in the file stay together."""

    def first_slot(run: RowRun) -> int:
        return run.slots.start if isinstance(run.slots, slice) else int(run.slots.min())

    groups: list[list[RowRun]] = []
    for run in runs:
        if groups and groups[-1][-1].stop == run.start:
            groups[-1].append(run)
        else:
            groups.append([run])
    return [run for group in sorted(groups, key=lambda group: min(map(first_slot, group))) for run in group]
