"""Blocks of rows from the file into given arrays, converted on the way."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from math import prod

import h5py
import numpy as np

from kerasmem.errors import DataError
from kerasmem.streaming.columns import Column
from kerasmem.streaming.layout import DatasetLayout, FileLayout, shown
from kerasmem.streaming.scan import find_dataset, open_file, rows_of
from kerasmem.units import KIB


class RowReader:
    """Reads runs of rows; opens the file at the first read. Use it from one thread at a time.

    Args:
        layout: what the file looked like when the sequence was made.
        columns: what to read, each once.
        cache_bytes: HDF5 chunk cache by dataset; none for those not named, whose chunks are read whole.
        block_rows: the longest run that will be asked for.
        check_finite: raise at NaN or infinity.
        allow_external: as in `scan_file`.
    """

    def __init__(
        self,
        layout: FileLayout,
        columns: Sequence[Column],
        *,
        cache_bytes: Mapping[str, int],
        block_rows: int,
        check_finite: bool,
        allow_external: bool,
    ) -> None:
        self.rows_read = 0
        self.reads = 0
        self._layout = layout
        self._columns = tuple(columns)
        self._cache_bytes = dict(cache_bytes)
        self._block_rows = block_rows
        self._check_finite = check_finite
        self._allow_external = allow_external
        self._cells = {
            d.name: d.chunk_rows if d.chunks else max(1, _SKIP_BYTES // d.row_bytes) for d in layout.datasets
        }
        self._file: h5py.File | None = None
        self._datasets: dict[str, h5py.Dataset] = {}
        self._scratch: np.ndarray | None = None
        scaled = any(column.scale is not None for column in columns)
        self._values = np.empty(_PIECE if scaled else 0)

    def read(self, start: int, stop: int, picked: np.ndarray | None, into: Sequence[np.ndarray]) -> None:
        """Read rows `start` to `stop` of every column.

        Args:
            start: first row.
            stop: row after the last.
            picked: which of them to deliver, counted from `start`; None for all.
            into: one array a column, as long as rows are delivered.

        Raises:
            DataError: the file has gone, changed or is damaged, or a value is not finite.
        """
        self.reads += 1
        self.rows_read += stop - start
        if self._file is None:
            self._open()
        for column, target in zip(self._columns, into, strict=True):
            for first, last in self._runs(column, start, picked, len(target)):
                if picked is None:
                    self._read_column(column, start, stop, None, target)
                    continue
                run = picked[first:last]
                whole = run[-1] - run[0] + 1 == len(run)
                at, end = start + int(run[0]), start + int(run[-1]) + 1
                self._read_column(column, at, end, None if whole else run - run[0], target[first:last])
            if self._check_finite:
                self._refuse_not_finite(column, start, picked, target)
        # HDF5 gives zeros for what lies past the end of a file that was cut while open.
        changed = self._size_changed()
        if changed:
            raise DataError(f"{shown(self._layout.path)}: reading rows {start:,} to {stop:,}: {changed}")

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        self._datasets.clear()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> None:
        file = open_file(self._layout.path)
        try:
            self._datasets = {layout.name: self._open_dataset(file, layout) for layout in self._layout.datasets}
        except BaseException:
            self._datasets.clear()
            file.close()
            raise
        self._file = file

    def _open_dataset(self, file: h5py.File, layout: DatasetLayout) -> h5py.Dataset:
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
        if layout.chunks is None:
            return dataset
        # A block holds its chunks whole, so caching them would only cost a copy; the others get their own.
        access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        cache = self._cache_bytes.get(layout.name, 0)
        chunk = max(1, layout.row_bytes * layout.chunk_rows)
        access.set_chunk_cache(min(1_000_003, 10 * max(1, cache // chunk) + 1), cache, 1.0)
        return h5py.Dataset(h5py.h5d.open(file.id, layout.name.encode("utf-8", "surrogateescape"), access))

    def _runs(self, column: Column, start: int, picked: np.ndarray | None, count: int) -> list[tuple[int, int]]:
        """Return the parts of a scattered selection, read one by one so that chunks between stay unread."""
        if picked is None:
            return [(0, count)]
        breaks = np.flatnonzero(np.diff((start + picked) // self._cells[column.name]) > 1) + 1
        bounds = [0, *breaks.tolist(), count]
        return list(itertools.pairwise(bounds))

    def _read_column(
        self, column: Column, start: int, stop: int, picked: np.ndarray | None, target: np.ndarray
    ) -> None:
        try:
            self._convert(column, start, stop, picked, target)
        except (OSError, RuntimeError, KeyError) as error:
            raise DataError(
                f"{shown(self._layout.path)}: rows {start:,} to {stop:,} of dataset {shown(column.name)} "
                f"cannot be read: {' '.join(str(error).split())}. {self._size_changed() or _DAMAGED}"
            ) from error

    def _convert(self, column: Column, start: int, stop: int, picked: np.ndarray | None, target: np.ndarray) -> None:
        dataset = self._datasets[column.name]
        dtype = dataset.dtype
        if picked is None and not column.converts and dtype.metadata is None and dtype.subdtype is None:
            dataset.read_direct(target, np.s_[start:stop])
            return
        raw = self._raw(stop - start, dataset)
        if dtype.subdtype is None:
            dataset.read_direct(raw, np.s_[start:stop])
        else:
            _read_array_type(dataset, start, stop, raw)
        if picked is not None and column.scale is None and raw.dtype == target.dtype:
            np.take(raw, picked, axis=0, out=target, mode="clip")
        elif picked is None and column.scale is None:
            np.copyto(target, raw, casting="unsafe")
        else:
            self._convert_piecewise(column, raw, picked, target)

    def _convert_piecewise(
        self, column: Column, raw: np.ndarray, picked: np.ndarray | None, target: np.ndarray
    ) -> None:
        """Pick and scale rows, a piece that fits the processor's cache at a time.

        Values are scaled as float64 whatever comes in and goes out, and rounded once: float32 has no room
        for times in nanoseconds or for 40-bit numbers, and no exponents for small factors of large values.
        """
        step = max(1, _PIECE // max(1, raw[0].size))
        for at in range(0, len(target), step):
            out = target[at : at + step]
            if picked is None:
                rows = raw[at : at + step]
            elif step == 1:
                rows = raw[picked[at] : picked[at] + 1]
            else:
                rows = raw[picked[at : at + step]]
            if column.scale is None:
                np.copyto(out, rows, casting="unsafe")
                continue
            source, out = rows.reshape(-1), out.reshape(-1)
            for first in range(0, len(source), _PIECE):
                piece = source[first : first + _PIECE]
                values = self._values[: len(piece)]
                np.multiply(piece, column.scale, out=values, dtype=np.float64, casting="unsafe")
                if column.offset:
                    values += column.offset
                np.copyto(out[first : first + _PIECE], values, casting="unsafe")

    def _raw(self, rows: int, dataset: h5py.Dataset) -> np.ndarray:
        """Return a buffer for rows as stored, the same memory each time."""
        if self._scratch is None:
            largest = max(layout.row_bytes for layout in self._layout.datasets)
            self._scratch = np.empty(largest * self._block_rows, np.uint8)
        shape, dtype = rows_of(dataset)
        shape = (rows, *shape[1:])
        size = prod(shape) * dtype.itemsize
        return self._scratch[:size].view(dtype).reshape(shape)

    def _refuse_not_finite(self, column: Column, start: int, picked: np.ndarray | None, target: np.ndarray) -> None:
        if target.dtype.kind != "f":
            return
        finite = np.isfinite(target.reshape(len(target), -1)).all(axis=1)
        if finite.all():
            return
        bad = np.flatnonzero(~finite)
        bad = start + (bad if picked is None else picked[bad])
        where = f"row {bad[0]:,}" if len(bad) == 1 else f"{len(bad):,} rows from {bad[0]:,} to {bad[-1]:,}"
        narrower = np.dtype(column.stored).kind == "f" and np.dtype(column.stored).itemsize > target.itemsize
        too_large = f" (values too large for {column.dtype} become infinity)" if narrower or column.scale else ""
        raise DataError(
            f"{shown(self._layout.path)}: dataset {shown(column.name)} holds NaN or infinity in {where}; "
            f"clean them, leave them out with `rows`, or pass nan_policy='ignore'{too_large}"
        )

    def _size_changed(self) -> str:
        try:
            handle = self._file.id.get_vfd_handle() if self._file is not None else None
            size = os.fstat(handle).st_size if isinstance(handle, int) else os.path.getsize(self._layout.path)
        except (OSError, RuntimeError, TypeError) as error:
            return f"the file has gone ({error})"
        if size < self._layout.size:
            return (
                f"the file was cut while in use: it had {self._layout.size:,} bytes and has {size:,}; "
                "write it again and make the sequence again"
            )
        return ""


def _read_array_type(dataset: h5py.Dataset, start: int, stop: int, into: np.ndarray) -> None:
    """Read rows whose every element is an array (PyTables writes such), which `read_direct` cannot."""
    extent = (stop - start, *dataset.shape[1:])
    there = dataset.id.get_space()
    there.select_hyperslab((start, *[0] * (len(extent) - 1)), extent)
    dataset.id.read(h5py.h5s.create_simple(extent), there, into, h5py.h5t.py_create(dataset.dtype))


_PIECE = 32 * KIB  # values converted at a time
_SKIP_BYTES = 64 * KIB  # in data without chunks, shorter gaps are read along
_DAMAGED = "The data is damaged there, or a filter it needs is missing; `rows` can leave the rows out"
