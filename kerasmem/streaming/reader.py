"""The rows of a file into windows: which dataset is read how, and what is wrong when it cannot be."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import h5py
import numpy as np

from kerasmem.errors import DataError
from kerasmem.streaming.columns import Column
from kerasmem.streaming.direct.codecs import EXTRA, register_filters
from kerasmem.streaming.direct.delivery import Delivery, Places
from kerasmem.streaming.direct.handle import FileHandle, open_handle
from kerasmem.streaming.direct.opening import open_source
from kerasmem.streaming.direct.scratch import Scratch
from kerasmem.streaming.direct.sources import Hdf5Source, Run, Source, part_of
from kerasmem.streaming.layout import DatasetLayout, FileLayout, shown
from kerasmem.streaming.order import EpochOrder, Segment
from kerasmem.streaming.scan import find_dataset, open_file, rows_of

Task = Callable[[Scratch], None]
"""A part of the filling of a window that any thread may do, with its own buffers."""


class RowReader:
    """Reads windows of rows; opens the file at the first. Any number of threads may read at a time.

    Args:
        layout: what the file looked like when the sequence was made.
        columns: what to read, each once.
        resident: datasets small enough to be kept in memory as stored, such as labels.
        check_finite: raise at NaN or infinity.
        allow_external: as in `scan_file`.
        allow_missing: as in `scan_file`.
    """

    def __init__(
        self,
        layout: FileLayout,
        columns: Sequence[Column],
        *,
        resident: Mapping[str, int],
        check_finite: bool,
        allow_external: bool,
        allow_missing: bool,
    ) -> None:
        self.rows_read = 0
        self._layout = layout
        self._check_finite = check_finite
        self._allow_external = allow_external
        self._allow_missing = allow_missing
        self._columns = tuple(columns)
        self._deliveries = [Delivery(column) for column in columns]
        self._by_dataset: dict[str, list[int]] = {}
        for number, column in enumerate(columns):
            self._by_dataset.setdefault(column.name, []).append(number)
        self._resident_names = frozenset(resident)
        self._resident: dict[str, _Resident] = {}
        self._opening = threading.RLock()
        self._file: h5py.File | None = None
        self._handle: FileHandle | None = None
        self._sources: dict[str, Source] = {}
        self._bytes_before = 0
        self._spoiled = ""

    @property
    def bytes_read(self) -> int:
        """Bytes taken from the file so far; for what HDF5 itself reads, the bytes of the rows."""
        with self._opening:
            return self._bytes_before + self._bytes_now()

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
        self._open()
        self.check()
        rows = order.window_rows(window)
        places = slice(0, rows) if in_file_order else _places(order, window)
        self.rows_read += rows
        tasks = [
            self._from_resident(name, order, window, places, arrays)
            for name in self._by_dataset
            if name in self._resident_names
        ]
        heavy = [name for name in self._by_dataset if name not in self._resident_names]
        if heavy:
            done = 0
            for block in order.window_order(window).tolist():
                start, stop = order.blocks.span(block)
                picked = order.blocks.picked(block)
                count = stop - start if picked is None else len(picked)
                run = Run(start, stop, picked, part_of(places, done, done + count))
                tasks += [self._from_file(name, run, arrays) for name in heavy]
                done += count
        return tasks

    def check(self) -> None:
        """Raise if the file is no longer what it was: HDF5 itself gives zeros for what was cut off.

        Raises:
            DataError: the file was cut, replaced or written anew since it was opened.
        """
        with self._opening:
            handle = self._handle
            if handle is None:
                return
            self._spoiled = self._spoiled or handle.changed()
            if not self._spoiled and handle.grown():
                self._look_again(handle)
            if self._spoiled:
                raise DataError(f"{shown(self._layout.path)}: {self._spoiled}")

    def close(self) -> None:
        """Close the file; the next read opens it again. No task may be running."""
        with self._opening:
            self._bytes_before += self._bytes_now()
            self._sources = {}
            self._resident = {}
            self._spoiled = ""
            file, self._file = self._file, None
            handle, self._handle = self._handle, None
            if handle is not None:
                handle.close()
            if file is not None:
                file.close()

    # ---- tasks

    def _from_file(self, name: str, run: Run, arrays: Sequence[np.ndarray]) -> Task:
        source = self._sources[name]
        numbers = self._by_dataset[name]
        outputs = [(self._deliveries[number], arrays[number]) for number in numbers]

        def task(scratch: Scratch) -> None:
            source.read(run, outputs, scratch)
            if self._check_finite:
                rows = np.arange(run.start, run.stop) if run.picked is None else run.start + run.picked
                for number in numbers:
                    self._refuse_not_finite(self._columns[number], rows, arrays[number][run.places])

        return task

    def _from_resident(
        self, name: str, order: EpochOrder, window: int, places: Places, arrays: Sequence[np.ndarray]
    ) -> Task:
        resident = self._resident[name]
        numbers = self._by_dataset[name]

        def task(scratch: Scratch) -> None:
            rows = np.concatenate([order.blocks.rows(block) for block in order.window_order(window).tolist()])
            resident.load(rows, scratch)
            for number in numbers:
                self._deliveries[number].put(resident.values, rows, arrays[number], places, scratch)
                if self._check_finite:
                    self._refuse_not_finite(self._columns[number], rows, arrays[number][places])

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
            f"{shown(self._layout.path)}: dataset {shown(column.name)} holds NaN or infinity in {where}; "
            f"clean them, leave them out with `rows`, or pass nan_policy='ignore'{too_large}"
        )

    # ---- the file

    def _open(self) -> None:
        with self._opening:
            if self._file is not None:
                return
            file = open_file(self._layout.path)
            try:
                self._handle = open_handle(self._layout.path, self._layout.size)
                self._refuse_other_file(file, self._handle)
                for layout in self._layout.datasets:
                    self._sources[layout.name] = self._open_source(file, layout)
                for layout in self._layout.datasets:
                    if layout.name in self._resident_names:
                        self._resident[layout.name] = _Resident(layout, self._sources[layout.name])
            except BaseException:
                file.close()
                self.close()
                raise
            self._file = file

    def _refuse_other_file(self, file: h5py.File, handle: FileHandle) -> None:
        """Refuse a file that was replaced between the two times it was opened."""
        try:
            other = os.fstat(file.id.get_vfd_handle())
        except (OSError, RuntimeError, TypeError):
            return
        if (other.st_ino, other.st_dev) != (handle.seen.st_ino, handle.seen.st_dev):
            raise DataError(f"{shown(self._layout.path)}: the file was replaced while it was being opened; try again")

    def _open_source(self, file: h5py.File, layout: DatasetLayout) -> Source:
        assert self._handle is not None
        dataset = find_dataset(file, layout.name, allow_external=self._allow_external)
        try:
            shape, dtype = rows_of(dataset)
            same = shape == layout.shape and dtype.str == layout.dtype and dataset.chunks == layout.chunks
        except TypeError:  # no shape, or a type that NumPy lacks
            shape, dtype, same = dataset.shape, np.dtype("V"), False
        if not same:
            raise DataError(
                f"{shown(self._layout.path)}: dataset {shown(layout.name)} has changed since the sequence "
                f"was made: it was {layout.shape} {layout.dtype} and is {shape} {dtype.str}; "
                "make the sequence again"
            )
        creation = dataset.id.get_create_plist()
        if EXTRA & {creation.get_filter(number)[0] for number in range(creation.get_nfilters())}:
            register_filters()
        if layout.chunks is not None:
            # Whole chunks are read, so that caching them would only cost a copy.
            access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
            access.set_chunk_cache(1, 0, 1.0)
            dataset = h5py.Dataset(h5py.h5d.open(file.id, layout.name.encode("utf-8", "surrogateescape"), access))

        def refuse(start: int, stop: int, reason: str, error: BaseException | None) -> NoReturn:
            changed = self._handle.changed() if self._handle is not None else ""
            raise DataError(
                f"{shown(self._layout.path)}: rows {start:,} to {stop:,} of dataset {shown(layout.name)} "
                f"cannot be read: {reason}. {changed or _DAMAGED}"
            ) from error

        try:
            return open_source(
                file, dataset, shape, dtype, self._handle, allow_missing=self._allow_missing, refuse=refuse
            )
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            refuse(0, layout.rows, " ".join(str(error).split()), error)

    def _look_again(self, handle: FileHandle) -> None:
        """Open a file that has grown once more; what was there has to lie where it lay."""
        self._bytes_before += self._bytes_now()
        before, self._sources = self._sources, {}
        file, self._file = self._file, None
        self._handle = None  # tasks of another window may still be reading: it goes with the last of them
        if file is not None:
            file.close()
        try:
            self._open()
            same = all(self._sources[name].lies_where(source) for name, source in before.items())
        except DataError as error:
            self._spoiled = handle.changed() or f"the file was written to while in use ({error})"
            return
        if not same:
            self._spoiled = "the file was written anew while in use; make the sequence again"

    def _bytes_now(self) -> int:
        through_hdf5 = sum(source.bytes_read for source in self._sources.values() if isinstance(source, Hdf5Source))
        return through_hdf5 + (0 if self._handle is None else self._handle.bytes_read)


class _Resident:
    """A dataset in memory as stored, read part by part as rows are needed."""

    def __init__(self, layout: DatasetLayout, source: Source) -> None:
        stored = np.dtype(layout.dtype)
        self.values = np.empty(layout.shape, stored)
        self._source = source
        self._cell = layout.chunk_rows if layout.chunks else max(1, _CELL_BYTES // max(1, layout.row_bytes))
        self._there = np.zeros(-(-layout.rows // self._cell), bool)
        self._delivery = Delivery(Column(layout.name, layout.row_shape, layout.dtype, stored.str))
        self._loading = threading.Lock()

    def load(self, rows: np.ndarray, scratch: Scratch) -> None:
        """Read what is still missing of the cells in which the rows lie."""
        with self._loading:
            needed = np.unique(rows // self._cell)
            missing = needed[~self._there[needed]]
            breaks = np.flatnonzero(np.diff(missing) > 1) + 1
            for cells in np.split(missing, breaks):
                if len(cells):
                    start = int(cells[0]) * self._cell
                    stop = min((int(cells[-1]) + 1) * self._cell, len(self.values))
                    run = Run(start, stop, None, slice(start, stop))
                    self._source.read(run, [(self._delivery, self.values)], scratch)
                    self._there[cells] = True


def _places(order: EpochOrder, window: int) -> Places:
    """Return where each row goes, in the order in which the window's blocks have them."""
    rows = order.window_rows(window)
    delivered = order.places(Segment(window, 0, rows))
    if delivered is None:
        return slice(0, rows)
    places = np.empty(rows, np.int32)
    places[delivered] = np.arange(rows, dtype=np.int32)
    return places


_CELL_BYTES = 64 * 1024
_DAMAGED = "The data is damaged there, or a filter it needs is missing; `rows` can leave the rows out"
