"""Read rows of files into windows."""

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
from kerasmem.hdf5.rows.delivery import Delivery, Places, RowRun, WantedRows, part_of
from kerasmem.hdf5.rows.jobs import DatasetRows, Job, ResidentRows, Task, prefetch
from kerasmem.hdf5.rows.open_files import OpenFiles
from kerasmem.hdf5.rows.paths import Access
from kerasmem.streaming.order import Blocks, EpochOrder, Segment

_Item = TypeVar("_Item", bound=Task)


@dataclass(eq=False)
class RowReader:
    """Read windows of rows, opening files as needed. Any number of threads may read at a time.

    Args:
        layout: what the files looked like when the sequence was made.
        columns: what to read, each once.
        resident: datasets small enough to be kept in memory as stored, such as labels.
        access: as in `scan_files`.
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
        self._now: tuple[int, int] | None = None  # the window announced last
        self._next: tuple[tuple[int, int], list[Job]] | None = None  # the window to come, announced already

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
        """Return the tasks that fill a window. They may run in any order and at once.

        Args:
            order: the order of the epoch.
            window: which window of it.
            arrays: the window's array of each column, as long as the window has rows.
            in_file_order: leave the rows in the order of the blocks, in place of that of delivery.
            ahead: whether the window to come may be fetched along with this one, for which nobody waits yet.
            alone: whether the window is no part of an epoch that is read.

        Raises:
            DataError: If the file has gone or has changed.
        """
        row = order.blocks.run(int(order.window_order(window)[0]))[0]
        with self.files.use(self.files[int(self.files.numbers(row))]):
            pass  # a file that has gone or has changed is noticed before anything is read
        rows = order.window_rows(window)
        places = slice(0, rows) if in_file_order else _places(order, window)
        self.rows_read += rows

        numbers = functools.cache(lambda: order.blocks.rows(order.window_order(window)))
        runs = functools.cache(lambda: self._runs(order, window, places))
        wanted = WantedRows(numbers, runs, places)
        resident: list[Task] = []
        heavy = []
        for name in self._by_dataset:
            outputs = [(self._deliveries[number], arrays[number]) for number in self._by_dataset[name]]
            if name in self.resident:
                resident += self._resident[name].jobs(wanted, outputs)
            else:
                heavy.append(self._rows[name].jobs(wanted, outputs))
        jobs = _in_turn(heavy)
        tasks: list[Task] = [*resident, *jobs]
        if alone:
            prefetch(jobs)
        elif heavy and self.files.remote:
            self._announce(order.key(window), jobs)
        if heavy and self.files.remote and window + 1 < order.windows:
            if ahead:  # the link is idle neither while the last rows are put into place nor while they are waited for
                self._foresee(order, window + 1)
            else:
                tasks.append(lambda scratch: self._foresee(order, window + 1))
        return tasks

    def read(self, rows: np.ndarray, grid: Grid) -> list[np.ndarray]:
        """Return some rows in their order, an array a column.

        Args:
            rows: numbers of rows.
            grid: cells of rows that are read together.

        Raises:
            DataError: If they cannot be read.
        """
        rising, places = np.unique(rows, return_inverse=True)
        arrays = [np.empty((len(rising), *column.row_shape), column.dtype) for column in self.columns]
        if len(rising):
            blocks = Blocks(rising, grid)
            order = EpochOrder(blocks, blocks.count, None, 0)
            scratch = Scratch()
            for task in self.tasks(order, 0, arrays, in_file_order=True, alone=True):
                task(scratch)
            self.check(order, 0, order.total)
        if np.array_equal(places, np.arange(len(rows))):
            return arrays
        return [array[places] for array in arrays]

    def check(self, order: EpochOrder | None = None, start: int = 0, stop: int = 0) -> None:
        """Raise if a file was changed.

        Args:
            order: the order of an epoch, to check the files of its rows `start` to `stop`; None for all open files.
            start: first row.
            stop: row after the last.

        Raises:
            DataError: If it was cut, replaced or rewritten since it was opened.
        """
        if order is None or len(self.layout.files) == 1:
            self.files.check()
        else:
            self.files.check(np.unique(self.files.numbers(order.rows(start, stop))).tolist())

    def close(self) -> None:
        """Close the files for good, after the tasks that read from them."""
        self.files.close()

    # ---- tasks

    def _announce(self, key: tuple[int, int], jobs: Sequence[Task]) -> None:
        """Prefetch the ranges of a window unless they are in flight."""
        with self._announcing:
            self._now, (known, foreseen), self._next = key, self._next or (None, []), None
            if known != key or len(foreseen) != len(jobs):
                prefetch(jobs)  # what was announced for another window is dropped
                return
            for job, early in zip(jobs, foreseen, strict=True):
                if isinstance(job, Job):
                    job.claim = early.claim

    def _foresee(self, order: EpochOrder, window: int) -> None:
        """Prefetch the ranges of the next window after all announced so far."""
        key = order.key(window)
        with self._announcing:
            if key != self._now and (self._next is None or self._next[0] != key):
                runs = self._runs(order, window, _places(order, window))
                heavy = [name for name in self._by_dataset if name not in self.resident]
                jobs = _in_turn([self._rows[name].run_jobs(runs, ()) for name in heavy])
                prefetch(jobs)
                self._next = key, jobs

    def _runs(self, order: EpochOrder, window: int, places: Places) -> list[RowRun]:
        """Return the runs of rows of a window in the order of reading."""
        runs, done = [], 0
        for block in order.window_order(window).tolist():
            start, stop, picked = order.blocks.run(block)
            count = stop - start if picked is None else len(picked)
            runs.append(RowRun(start, stop, picked, part_of(places, done, done + count)))
            done += count
        return _by_need(runs) if self.files.remote and order.windows > 1 else runs


def _in_turn(jobs: Sequence[Sequence[_Item]]) -> list[_Item]:
    """Return the jobs of several datasets, the first of each, then the second."""
    turns = itertools.zip_longest(*jobs)
    return [job for turn in turns for job in turn if job is not None]


def _places(order: EpochOrder, window: int) -> Places:
    """Return the place of each row, in the order of the window's blocks."""
    rows = order.window_rows(window)
    delivered = order.places(Segment(window, 0, rows))
    if delivered is None:
        return slice(0, rows)
    places = np.empty(rows, np.int32)
    places[delivered] = np.arange(rows, dtype=np.int32)
    return places


def _by_need(runs: Sequence[RowRun]) -> list[RowRun]:
    """Sort runs by the delivery of their first rows. Neighbours in the file stay together."""

    def need(run: RowRun) -> int:
        return run.places.start if isinstance(run.places, slice) else int(run.places.min())

    groups: list[list[RowRun]] = []
    for run in runs:
        if groups and groups[-1][-1].stop == run.start:
            groups[-1].append(run)
        else:
            groups.append([run])
    return [run for group in sorted(groups, key=lambda group: min(map(need, group))) for run in group]
