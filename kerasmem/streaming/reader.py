"""The rows of files into windows: what has to be read for each, and which values are refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kerasmem.errors import DataError
from kerasmem.hdf5.columns import Column
from kerasmem.hdf5.direct.delivery import Delivery, Places, RowRun, ScatterRead, Scratch, can_scatter, part_of
from kerasmem.hdf5.files import Claims, DatasetRows, OpenFiles, ResidentRows
from kerasmem.hdf5.grid import Grid
from kerasmem.hdf5.layout import DataLayout, shown
from kerasmem.hdf5.settings import Access
from kerasmem.streaming.order import EpochOrder, Segment

_CELL_BYTES = 64 * 1024  # of a dataset without chunks that is kept in memory, read at a time

Task = Callable[[Scratch], None]
"""A part of the filling of a window that any thread may do, with its own buffers."""


@dataclass(eq=False)
class RowReader:
    """Reads windows of rows; opens files as they are needed. Any number of threads may read at a time.

    Args:
        layout: what the files looked like when the sequence was made.
        columns: what to read, each once.
        resident: datasets small enough to be kept in memory as stored, such as labels.
        check_finite: raise at NaN or infinity.
        access: as in `scan_files`.
    """

    layout: DataLayout
    columns: Sequence[Column]
    resident: Collection[str]
    check_finite: bool
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
        self._next: tuple[tuple[int, int], list[Claims]] | None = None  # the window to come, announced already

    @property
    def bytes_read(self) -> int:
        """Bytes taken from the files so far; for what HDF5 itself reads, the bytes of the rows."""
        return self.files.bytes_read

    def tasks(self, order: EpochOrder, window: int, arrays: Sequence[np.ndarray], *, in_file_order: bool) -> list[Task]:
        """Return what has to be done to fill a window; the tasks may run in any order and all at once.

        Args:
            order: the order of the epoch.
            window: which window of it.
            arrays: the window's array of each column, as long as the window has rows.
            in_file_order: leave the rows in the order of the blocks, in place of that of delivery.

        Raises:
            DataError: the file has gone or has changed.
        """
        self.check()
        self._make_resident(order.blocks.run(int(order.window_order(window)[0]))[0])
        rows = order.window_rows(window)
        places = slice(0, rows) if in_file_order else _places(order, window)
        self.rows_read += rows
        tasks = [
            self._from_resident(name, order, window, places, arrays)
            for name in self._by_dataset
            if name in self.resident
        ]
        heavy = []
        for name in self._by_dataset:
            if name not in self.resident:
                straight = self._straight(name, order, window, places, arrays)
                if straight is None:
                    heavy.append(name)
                else:
                    tasks += straight
        if heavy:
            runs = list(_runs(order, window, places))
            claims = self._announce(heavy, order, window, runs) if self.files.remote else itertools.repeat([])
            needs = ((name, run) for run in runs for name in heavy)
            tasks += [self._from_file(*need, arrays, claim) for need, claim in zip(needs, claims, strict=False)]
        return tasks

    def check(self) -> None:
        """Raise if a file is no longer what it was.

        Raises:
            DataError: it was cut, replaced or rewritten since it was opened.
        """
        self.files.check()

    def close(self) -> None:
        """Close the files; the next read opens them again. No task may be running."""
        self._resident = {}
        self._next = None
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
        self, name: str, order: EpochOrder, window: int, places: Places, arrays: Sequence[np.ndarray]
    ) -> list[Task] | None:
        """Return the tasks for a dataset whose rows are delivered as they lie in the files; None for others."""
        number, *others = self._by_dataset[name]
        column, target = self.columns[number], arrays[number]
        if others or not self._deliveries[number].plain or not can_scatter(column.row_bytes):
            return None
        rows = order.blocks.rows(order.window_order(window))
        plans = self._rows[name].plan(rows, places, target)
        if plans is None:
            return None
        return [self._share(name, plan, share) for plan in plans for share in plan.shares()]

    def _share(self, name: str, plan: ScatterRead, share: tuple[int, int]) -> Task:
        def task(scratch: Scratch) -> None:
            self._rows[name].read_scattered(plan, share)
            if self.check_finite:
                column = self.columns[self._by_dataset[name][0]]
                values = plan.target[part_of(plan.places, *share)]
                self._refuse_not_finite(column, plan.rows[slice(*share)], values)

        return task

    def _announce(self, names: Sequence[str], order: EpochOrder, window: int, runs: Sequence[RowRun]) -> list[Claims]:
        """Have fetched what the tasks of a window will read, and after it what those of the next one will.

        The link is idle neither while the last rows of a window are put into place nor while they are waited for.
        """
        with self._announcing:
            key, (known, claims) = order.key(window), self._next or (None, [])
            if known != key:
                self._next = None  # another reader than the one foreseen: what was announced is dropped
                claims = self._claims(names, runs)
            if window + 1 < order.windows:
                coming = list(_runs(order, window + 1, slice(0, order.window_rows(window + 1))))
                self._next = order.key(window + 1), self._claims(names, coming)
            else:
                self._next = None
            return claims

    def _claims(self, names: Sequence[str], runs: Sequence[RowRun]) -> list[Claims]:
        """Return the claims of the tasks, in their order: run by run, and name by name for each."""
        by_name = [self._rows[name].claims(runs) for name in names]
        return [claims for each in zip(*by_name, strict=True) for claims in each]

    def _from_file(self, name: str, run: RowRun, arrays: Sequence[np.ndarray], claims: Claims) -> Task:
        dataset = self._rows[name]
        numbers = self._by_dataset[name]
        outputs = [(self._deliveries[number], arrays[number]) for number in numbers]

        def task(scratch: Scratch) -> None:
            dataset.read(run, outputs, scratch, claims)
            if self.check_finite:
                rows = np.arange(run.start, run.stop) if run.picked is None else run.start + run.picked
                for number in numbers:
                    self._refuse_not_finite(self.columns[number], rows, arrays[number][run.places])

        return task

    def _from_resident(
        self, name: str, order: EpochOrder, window: int, places: Places, arrays: Sequence[np.ndarray]
    ) -> Task:
        resident = self._resident[name]
        numbers = self._by_dataset[name]

        def task(scratch: Scratch) -> None:
            rows = order.blocks.rows(order.window_order(window))
            resident.load(rows, scratch)
            for number in numbers:
                self._deliveries[number].put(resident.values, rows, arrays[number], places, scratch)
                if self.check_finite:
                    self._refuse_not_finite(self.columns[number], rows, arrays[number][places])

        return task

    def _refuse_not_finite(self, column: Column, rows: np.ndarray, values: np.ndarray) -> None:
        if values.dtype.kind != "f":
            return
        finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        if finite.all():
            return
        bad = rows[~finite]
        where = f"row {bad[0]:,}" if len(bad) == 1 else f"{len(bad):,} rows from {bad[0]:,} to {bad[-1]:,}"
        narrower = np.dtype(column.stored).kind == "f" and np.dtype(column.stored).itemsize > values.itemsize
        too_large = f" (values too large for {column.dtype} become infinity)" if narrower or column.scale else ""
        raise DataError(
            f"{shown(self.layout.file_of(int(bad[0])).path)}: dataset {shown(column.name)} holds NaN or infinity in "
            f"{where}; clean them, leave them out with `rows`, or pass nan_policy='ignore'{too_large}"
        )


def _runs(order: EpochOrder, window: int, places: Places) -> Iterator[RowRun]:
    """Return the runs of rows that a window's blocks are."""
    done = 0
    for block in order.window_order(window).tolist():
        start, stop, picked = order.blocks.run(block)
        count = stop - start if picked is None else len(picked)
        yield RowRun(start, stop, picked, part_of(places, done, done + count))
        done += count


def _places(order: EpochOrder, window: int) -> Places:
    """Return where each row goes, in the order in which the window's blocks have them."""
    rows = order.window_rows(window)
    delivered = order.places(Segment(window, 0, rows))
    if delivered is None:
        return slice(0, rows)
    places = np.empty(rows, np.int32)
    places[delivered] = np.arange(rows, dtype=np.int32)
    return places
