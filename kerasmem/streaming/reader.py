"""Read rows of files into windows."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kerasmem.hdf5.format.columns import Column
from kerasmem.hdf5.format.filters import Scratch
from kerasmem.hdf5.format.grid import Grid
from kerasmem.hdf5.format.layout import DataLayout
from kerasmem.hdf5.rows.delivery import Delivery, Places, RowRun, ScatterRead, can_scatter, part_of
from kerasmem.hdf5.rows.files import Claims, DatasetRows, OpenFiles, ResidentRows
from kerasmem.hdf5.rows.settings import Access
from kerasmem.streaming.order import EpochOrder, Segment

_CELL_BYTES = 64 * 1024  # of a dataset without chunks that is kept in memory, read at a time

Task = Callable[[Scratch], Places | None]
"""A part of the filling of a window that any thread may do, with its own buffers; returns which rows it brought."""


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
        self._rows = {name: DatasetRows(self.files, self.layout.starts, name) for name in self._by_dataset}
        self._resident: dict[str, ResidentRows] = {}
        self._announcing = threading.Lock()
        self._now: tuple[int, int] | None = None  # the window announced last
        self._next: tuple[tuple[int, int], list[Claims]] | None = None  # the window to come, announced already

    @property
    def bytes_read(self) -> int:
        """Bytes taken from the files so far. For datasets read by HDF5, the bytes of the rows."""
        return self.files.bytes_read

    @property
    def checked_at_once(self) -> bool:
        """Whether unchanged files can be recognized without a request."""
        return not self.files.remote or self.files.proves_versions

    def tasks(
        self,
        order: EpochOrder,
        window: int,
        arrays: Sequence[np.ndarray],
        *,
        in_file_order: bool,
        ahead: bool = True,
    ) -> list[Task]:
        """Return the tasks that fill a window. They may run in any order and at once.

        Args:
            order: the order of the epoch.
            window: which window of it.
            arrays: the window's array of each column, as long as the window has rows.
            in_file_order: leave the rows in the order of the blocks, in place of that of delivery.
            ahead: whether the window to come may be fetched along with this one, for which nobody waits yet.

        Raises:
            DataError: If the file has gone or has changed.
        """
        self.check()
        self._make_resident(order.blocks.run(int(order.window_order(window)[0]))[0])
        rows = order.window_rows(window)
        places = slice(0, rows) if in_file_order else _places(order, window)
        self.rows_read += rows

        @functools.cache
        def numbers() -> np.ndarray:
            return order.blocks.rows(order.window_order(window))

        resident = [name for name in self._by_dataset if name in self.resident]
        tasks = [self._from_resident(name, numbers(), places, arrays) for name in resident]
        heavy = []
        for name in self._by_dataset:
            if name not in self.resident:
                straight = self._straight(name, numbers, places, arrays)
                if straight is None:
                    heavy.append(name)
                else:
                    tasks += straight
        if heavy:
            runs = self._runs(order, window, places)
            remote = self.files.remote
            claims = self._announce(heavy, order.key(window), runs) if remote else itertools.repeat([])
            needs = ((name, run) for run in runs for name in heavy)
            tasks += [self._from_file(*need, arrays, claim) for need, claim in zip(needs, claims, strict=False)]
        if heavy and self.files.remote and window + 1 < order.windows:
            if ahead:  # the link is idle neither while the last rows are put into place nor while they are waited for
                self._foresee(heavy, order, window + 1)
            else:
                tasks.append(lambda scratch: self._foresee(heavy, order, window + 1))
        return tasks

    def check(self) -> None:
        """Raise if a file was changed.

        Raises:
            DataError: If it was cut, replaced or rewritten since it was opened.
        """
        self.files.check()

    def close(self) -> None:
        """Close the files for good, after the tasks that read from them."""
        self.files.close()

    def _make_resident(self, row: int) -> None:
        number = int(np.searchsorted(self.layout.starts, row, side="right")) - 1
        with self.files.use(number):  # so that a file that has gone or changed is found before anything is read
            pass
        for layout in self.layout.datasets:
            if layout.name in self.resident and layout.name not in self._resident:
                if layout.chunks:
                    grid = self.layout.chunk_grid(layout.name)
                else:
                    cell = max(1, _CELL_BYTES // max(1, layout.row_bytes))
                    grid = Grid([cell] * len(self.layout.files), self.layout.starts)
                self._resident[layout.name] = ResidentRows(layout, grid, self._rows[layout.name])

    # ---- tasks

    def _straight(
        self, name: str, numbers: Callable[[], np.ndarray], places: Places, arrays: Sequence[np.ndarray]
    ) -> list[Task] | None:
        """Return the tasks for a dataset delivered as it lies in the files; None for others."""
        number, *others = self._by_dataset[name]
        column, target = self.columns[number], arrays[number]
        if others or not self._deliveries[number].plain or not can_scatter(column.row_bytes):
            return None
        plans = self._rows[name].plan(numbers(), places, target)
        if plans is None:
            return None
        return [self._share(name, plan, share) for plan in plans for share in plan.shares()]

    def _share(self, name: str, plan: ScatterRead, share: tuple[int, int]) -> Task:
        def task(scratch: Scratch) -> Places:
            self._rows[name].read_scattered(plan, share)
            return part_of(plan.places, *share)

        return task

    def _announce(self, names: Sequence[str], key: tuple[int, int], runs: Sequence[RowRun]) -> Sequence[Claims]:
        """Prefetch the ranges of a window unless they are in flight."""
        with self._announcing:
            self._now, (known, claims), self._next = key, self._next or (None, []), None
            # Where it is another window than the one foreseen, what was announced is dropped.
            return claims if known == key else self._claims(names, runs)

    def _foresee(self, names: Sequence[str], order: EpochOrder, window: int) -> None:
        """Prefetch the ranges of the next window after all announced so far."""
        key = order.key(window)
        with self._announcing:
            if key != self._now and (self._next is None or self._next[0] != key):
                self._next = key, self._claims(names, self._runs(order, window, _places(order, window)))

    def _runs(self, order: EpochOrder, window: int, places: Places) -> list[RowRun]:
        """Return the runs of rows of a window in the order of reading."""
        runs, done = [], 0
        for block in order.window_order(window).tolist():
            start, stop, picked = order.blocks.run(block)
            count = stop - start if picked is None else len(picked)
            runs.append(RowRun(start, stop, picked, part_of(places, done, done + count)))
            done += count
        return _by_need(runs) if self.files.remote and order.windows > 1 else runs

    def _claims(self, names: Sequence[str], runs: Sequence[RowRun]) -> list[Claims]:
        """Return the claims of the tasks, in their order: run by run, and name by name for each."""
        by_name = [self._rows[name].claims(runs) for name in names]
        return [claims for each in zip(*by_name, strict=True) for claims in each]

    def _from_file(self, name: str, run: RowRun, arrays: Sequence[np.ndarray], claims: Claims) -> Task:
        dataset = self._rows[name]
        outputs = [(self._deliveries[number], arrays[number]) for number in self._by_dataset[name]]

        def task(scratch: Scratch) -> Places:
            dataset.read(run, outputs, scratch, claims)
            return run.places

        return task

    def _from_resident(self, name: str, rows: np.ndarray, places: Places, arrays: Sequence[np.ndarray]) -> Task:
        resident = self._resident[name]
        needs = resident.needs(rows)

        def task(scratch: Scratch) -> Places:
            resident.load(needs, scratch)
            for number in self._by_dataset[name]:
                self._deliveries[number].put(resident.values, rows, arrays[number], places, scratch)
            return places

        return task


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
