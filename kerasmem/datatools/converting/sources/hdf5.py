"""HDF5 files as sources: the datasets that can be trained from, and sparse matrices by rows, made dense."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import h5py
import numpy as np

from kerasmem.datatools.converting.fields import ColumnChoice, Field, Rows, check_name
from kerasmem.datatools.converting.settings import ReadOptions
from kerasmem.datatools.converting.sources.row_source import RowSource, SideBySideSource, rows_in
from kerasmem.datatools.inspecting.listing import CLASS_NAMES, Contents, Entry, list_contents, opened, sparse_parts
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import shown
from kerasmem.hdf5.settings import Access
from kerasmem.streaming.file_order import read_windows

_MOST_SPARSE = 1 << 22  # stored values of a sparse matrix read at a time


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

    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield rows of the datasets."""
        wanted = [field.name for field in self.fields] if names is None else list(names)
        for _, window in read_windows(self.paths, wanted, start=start, access=self._access, budget=self._budget):
            for first in range(0, rows_in(window), rows):
                yield {name: values[first : first + rows] for name, values in window.items()}


class SparseSource(RowSource):
    """A sparse matrix by rows (AnnData's csr), made dense."""

    def __init__(self, path: str, entry: Entry) -> None:
        assert entry.shape is not None
        super().__init__(f"{shown(path)}: {shown(entry.name)}", path)
        self._name = entry.name
        self.rows, self._width = entry.shape
        self.fields = (Field(check_name(entry.name, shown(path)), entry.dtype, (self._width,)),)
        dense = self.rows * self._width * np.dtype(entry.dtype).itemsize
        self.notes = [f"{shown(entry.name)} is sparse in the source and dense here: {dense:,} bytes as stored there"]

    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield rows, zeros and all."""
        with opened(self.paths[0], None, f"{self.label}:") as file:
            data, indices, indptr = sparse_parts(file, self._name)
            bounds = indptr[:].astype(np.int64)
            wrong = (
                len(bounds) != self.rows + 1 or bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] > len(data)
            )
            if wrong or len(indices) != len(data):
                raise DataError(f"{self.label}: its index of rows is damaged; write the file again")
            for first in range(start, self.rows, rows):
                last = min(first + rows, self.rows)
                yield {self.fields[0].name: self._dense(data, indices, bounds[first : last + 1])}

    def _dense(self, data: h5py.Dataset, indices: h5py.Dataset, bounds: np.ndarray) -> np.ndarray:
        out = np.zeros((len(bounds) - 1, self._width), self.fields[0].dtype)
        for low in range(int(bounds[0]), int(bounds[-1]), _MOST_SPARSE):
            high = min(low + _MOST_SPARSE, int(bounds[-1]))
            columns = indices[low:high]
            if len(columns) and not (int(columns.min()) >= 0 and int(columns.max()) < self._width):
                raise DataError(f"{self.label}: it has values outside its {self._width:,} columns; it is damaged")
            rows = np.searchsorted(bounds, np.arange(low, high), side="right") - 1
            np.add.at(out, (rows, columns), data[low:high])  # as SciPy has it: what is there twice adds up
        return out


def open_hdf5(path: str, options: ReadOptions) -> RowSource:
    """Return the datasets of a file that have as many rows as its largest one.

    Raises:
        DataError: there is none that could be trained from.
    """
    access = Access(allow_external=options.allow_external, allow_hdf5_filters=options.allow_hdf5_filters)
    chosen, notes = _choose_entries(list_contents(path, access), options.columns)
    dense = [entry for entry in chosen if entry.layout is not None]
    sources: list[RowSource] = [DenseSource(path, dense, access, options.budget)] if dense else []
    sources += [SparseSource(path, entry) for entry in chosen if entry.layout is None]
    result = sources[0] if len(sources) == 1 else SideBySideSource(sources)
    result.label = shown(path)
    result.notes += notes
    return result


def _choose_entries(contents: Contents, wanted: ColumnChoice) -> tuple[list[Entry], list[str]]:
    """Return the datasets that make rows together, and what is said about those left out."""
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
            why = entry.problem or f"it has {rows(entry):,} rows, and the others have {size:,}"
            notes.append(f"left out: {shown(entry.name)} ({why})")
    return chosen, notes
