"""HDF5 files as sources: the datasets that can be trained from, and sparse matrices by rows, made dense."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from kerasmem.datatools.fields import ColumnChoice, Field, Rows, check_name
from kerasmem.datatools.listing import CLASS_NAMES, Contents, Entry, list_contents, opened, sparse_parts
from kerasmem.datatools.settings import ReadOptions
from kerasmem.datatools.sources.rows import RowSource, SideBySideSource, rows_in
from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.rows.settings import Access
from kerasmem.streaming.file_order import read_windows
from kerasmem.units import format_count

_MOST_SPARSE = 1 << 22  # stored values of a sparse matrix added at a time


class DenseSource(RowSource):
    """Datasets of one file, read as `H5ChunkSequence` reads them."""

    def __init__(self, path: str, entries: Sequence[Entry], access: Access, budget: int) -> None:
        super().__init__(shown(path), path)
        self._access, self._budget = access, budget
        shapes = [entry.shape or (0,) for entry in entries]
        self.fields = tuple(
            Field(check_name(entry.name, self.label), entry.dtype, shape[1:], entry.class_names)
            for entry, shape in zip(entries, shapes, strict=True)
        )
        self.rows = shapes[0][0]

    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield rows of the datasets."""
        wanted = [field.name for field in self.fields]
        for _, window in read_windows(self.paths, wanted, start=start, access=self._access, budget=self._budget):
            for first in range(0, rows_in(window), rows):
                yield {name: values[first : first + rows] for name, values in window.items()}


class SparseSource(RowSource):
    """A sparse matrix by rows (AnnData's csr), made dense."""

    def __init__(self, path: str, entry: Entry, access: Access, budget: int) -> None:
        assert entry.shape is not None
        super().__init__(shown(path), path)
        self._matrix = f"{self.label}: {shown(entry.name)}"
        self._name, self._access, self._budget = entry.name, access, budget
        self.rows, self._width = entry.shape
        self.fields = (Field(check_name(entry.name, shown(path)), entry.dtype, (self._width,)),)
        dense = self.rows * self._width * np.dtype(entry.dtype).itemsize
        self.notes = [f"{shown(entry.name)} is sparse in the source and dense here: {dense:,} bytes as stored there"]

    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield rows, zeros and all."""
        bounds = self._bounds()
        stored = self._stored(int(bounds[start]), int(bounds[-1]))
        held = next(stored, None)
        for first in range(start, self.rows, rows):
            last = min(first + rows, self.rows)
            out = np.zeros((last - first, self._width), self.fields[0].dtype)
            while held is not None and held[0] < bounds[last]:
                at, columns, values = held
                taken = min(len(columns), int(bounds[last]) - at)
                self._add(out, bounds[first : last + 1], at, columns[:taken], values[:taken])
                rest = (at + taken, columns[taken:], values[taken:])
                held = rest if taken < len(columns) else next(stored, None)
            yield {self.fields[0].name: out}

    def _bounds(self) -> np.ndarray:
        """Return the offset of the values of each row, and the end of the last."""
        with opened(self.paths[0], f"{self._matrix}:") as file:
            data, indices, indptr = sparse_parts(file, self._name)
            count, same = len(data), len(indices) == len(data) and len(indptr) == self.rows + 1
        windows = self._read("indptr", 0, None) if same else iter(())
        found = np.concatenate([np.zeros(0, np.int64), *(window["indptr"].astype(np.int64) for window in windows)])
        if not same or found[0] != 0 or (np.diff(found) < 0).any() or found[-1] > count:
            raise DataError(f"{self._matrix}: its index of rows is damaged; write the file again")
        return found

    def _stored(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield number, columns and values of the stored entries from `start` to before `stop`."""
        if start < stop:
            for window in self._read("data", start, stop, "indices"):
                yield start, window["indices"], window["data"]
                start += len(window["data"])

    def _read(self, name: str, start: int, stop: int | None, *more: str) -> Iterator[Rows]:
        """Yield windows of parts of the matrix, by their names in it."""
        names = {f"{self._name}/{part}": part for part in (name, *more)}
        windows = read_windows(
            self.paths, list(names), start=start, stop=stop, access=self._access, budget=self._budget
        )
        for _, window in windows:
            yield {names[each]: values for each, values in window.items()}

    def _add(self, out: np.ndarray, bounds: np.ndarray, at: int, columns: np.ndarray, values: np.ndarray) -> None:
        if len(columns) and not (int(columns.min()) >= 0 and int(columns.max()) < self._width):
            raise DataError(f"{self._matrix}: it has values outside its {self._width:,} columns; it is damaged")
        for low in range(0, len(columns), _MOST_SPARSE):
            part = slice(low, low + _MOST_SPARSE)
            numbers = np.arange(at + low, at + low + len(columns[part]))
            rows = np.searchsorted(bounds, numbers, side="right") - 1
            np.add.at(out, (rows, columns[part]), values[part])  # as SciPy has it: what is there twice adds up


def open_hdf5(path: str, options: ReadOptions) -> RowSource:
    """Return the datasets of a file that have as many rows as its largest one.

    Raises:
        DataError: there is none that could be trained from.
    """
    access = Access(options.trust_file)
    chosen, notes = _choose_entries(list_contents(path, access), options.columns)
    dense = [entry for entry in chosen if entry.layout is not None]
    sources: list[RowSource] = [DenseSource(path, dense, access, options.budget)] if dense else []
    sources += [SparseSource(path, entry, access, options.budget) for entry in chosen if entry.layout is None]
    result = sources[0] if len(sources) == 1 else SideBySideSource(sources)
    result.label = shown(path)
    result.notes += notes
    return result


def _choose_entries(contents: Contents, wanted: ColumnChoice) -> tuple[list[Entry], list[str]]:
    """Return the datasets with equally many rows, and notes about those left out."""
    read = [entry for entry in contents.entries if wanted.reads(entry.name)]
    able = [entry for entry in read if entry.layout is not None or entry.sparse == "csr_matrix"]
    able = [entry for entry in able if entry.shape and 0 not in entry.shape]
    if not able:
        if any(entry.layout is not None for entry in contents.entries):
            wanted.check()
        contents.refuse_unusable()

    def rows(entry: Entry) -> int:
        return entry.shape[0] if entry.shape else 0

    size = rows(max(able, key=lambda entry: (prod(entry.shape or ()), entry.name)))
    chosen = [entry for entry in able if rows(entry) == size]
    notes = []
    for entry in read:
        if entry not in chosen and not entry.name.endswith(f"_{CLASS_NAMES}"):
            why = entry.problem or f"it has {format_count(rows(entry), 'row')}, and the others have {size:,}"
            notes.append(f"left out: {shown(entry.name)} ({why})")
    return chosen, notes
