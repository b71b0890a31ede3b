"""HDF5 files as sources: datasets, columns of tables, a group per row, and sparse matrices made dense."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import h5py
import numpy as np

from kerasmem.datatools.fields import ColumnChoice, Field, Rows, check_name
from kerasmem.datatools.listing import (
    CLASS_NAMES,
    MOST_CONVERTED,
    Contents,
    Entry,
    list_contents,
    opened,
)
from kerasmem.datatools.packing import Packing
from kerasmem.datatools.repetition import find_repetition
from kerasmem.datatools.settings import ReadOptions
from kerasmem.datatools.sources.rows import RowSource, SideBySideSource, rows_in
from kerasmem.errors import DataError
from kerasmem.hdf5.format.filters import DecodeError, register_filters
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.rows.opening import check_chunks
from kerasmem.hdf5.rows.scan import find_dataset
from kerasmem.hdf5.rows.settings import Access
from kerasmem.streaming.data_source import read_windows
from kerasmem.units import format_count

_MOST_SPARSE = 1 << 22  # stored values of a sparse matrix added at a time
_NAMES_SHOWN = 3


class _EntrySource(RowSource):
    """Entries of one file, all with as many rows."""

    def __init__(self, path: str, entries: Sequence[Entry], access: Access, budget: int) -> None:
        super().__init__(shown(path), path)
        self._entries, self._access, self._budget = tuple(entries), access, budget
        self.fields = tuple(
            Field(check_name(entry.name, self.label), entry.dtype, (entry.shape or ())[1:], entry.class_names)
            for entry in entries
        )
        self.rows = entries[0].rows

    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield rows of the entries."""
        with contextlib.closing(self._windows(start, rows)) as windows:  # type: ignore[type-var]
            for window in windows:
                for first in range(0, rows_in(window), rows):
                    yield {name: values[first : first + rows] for name, values in window.items()}

    @abstractmethod
    def _windows(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield rows, more than `rows` at a time if that is faster."""


class _DenseSource(_EntrySource):
    """Datasets read as `H5ChunkSequence` reads them."""

    def _windows(self, start: int, rows: int) -> Iterator[Rows]:
        names = [field.name for field in self.fields]
        for _, window in read_windows(self.paths, names, start=start, access=self._access, budget=self._budget):
            yield window


class _SlicedSource(_EntrySource):
    """Entries that h5py reads slice by slice: table columns, stacked groups, last axes, sparse matrices."""

    def _windows(self, start: int, rows: int) -> Iterator[Rows]:
        step = max(rows, self._budget // sum(field.row_bytes for field in self.fields))
        register_filters()
        with opened(self.paths[0], self.label) as file:
            for first in range(start, self.rows, step):
                last = min(first + step, self.rows)
                read = [self._read(file, entry, first, last) for entry in self._entries]
                yield {field.name: values for field, values in zip(self.fields, read, strict=True)}

    def _read(self, file: h5py.File, entry: Entry, first: int, last: int) -> np.ndarray:
        name = entry.parts[0]
        if entry.kind == "stack":
            return np.stack([self._checked(file, part)[()] for part in entry.parts[first:last]])
        if entry.kind == "field":
            table = self._checked(file, name, range(first, last))
            return np.asarray(table.fields(entry.name.rpartition("/")[2])[first:last])
        if entry.kind == "csr_matrix":
            return self._read_sparse(file, entry, first, last)
        values = self._checked(file, name, range(first, last), axis=-1)[..., first:last]
        return values.T if entry.is_matlab else np.moveaxis(values, -1, 0)

    def _read_sparse(self, file: h5py.File, entry: Entry, first: int, last: int) -> np.ndarray:
        """Return rows of a sparse matrix, zeros and all. Values at one place add up, as in SciPy."""
        matrix = f"{self.label}: {shown(entry.name)}"
        data, indices, indptr = entry.parts
        bounds = self._checked(file, indptr, range(first, last + 1))[first : last + 1].astype(np.int64)
        stored = find_dataset(file, data).shape[0]
        if len(bounds) <= last - first or bounds[0] < 0 or (np.diff(bounds) < 0).any() or bounds[-1] > stored:
            raise DataError(f"{matrix}: its index of rows is damaged; write the file again")
        out = np.zeros((last - first, *(entry.shape or ())[1:]), entry.dtype)
        for low in range(int(bounds[0]), int(bounds[-1]), _MOST_SPARSE):
            high = min(low + _MOST_SPARSE, int(bounds[-1]))
            columns, values = (self._checked(file, part, range(low, high))[low:high] for part in (indices, data))
            if len(columns) < high - low or columns.min() < 0 or columns.max() >= out.shape[1]:
                raise DataError(f"{matrix}: it has values outside its {out.shape[1]:,} columns; it is damaged")
            rows = np.searchsorted(bounds, np.arange(low, high), side="right") - 1
            np.add.at(out, (rows, columns), values)
        return out

    def _checked(self, file: h5py.File, name: str, rows: range | None = None, axis: int = 0) -> h5py.Dataset:
        """Return a dataset after a check of the chunks with these rows."""
        dataset = find_dataset(file, name, trust_file=self._access.trust_file)
        if not self._access.trust_file:
            try:
                check_chunks(dataset, rows, axis)
            except DecodeError as error:
                raise DataError(f"{self.label}: dataset {shown(name)} cannot be read: {error}") from error
        return dataset


class _UnpackedSource(RowSource):
    """Unpack the values of a source, and count missing ones."""

    def __init__(self, source: RowSource, packings: Mapping[str, Packing], *, unpack: bool) -> None:
        super().__init__(source.label, *source.paths)
        self._source, self._packings = source, packings
        self.rows, self.notes = source.rows, source.notes
        self.fields = tuple(
            self._unpacked(field) if unpack and field.name in packings else field for field in source.fields
        )

    def _unpacked(self, field: Field) -> Field:
        packing, stored = self._packings[field.name], np.dtype(field.dtype)
        if not (packing.scales or packing.unsigned or stored.kind == "f"):
            return field  # whole numbers without a scale, such as labels, stay whole
        is_small = stored.itemsize <= (4 if stored.kind == "f" else 2)
        return replace(field, dtype="<f4" if is_small else "<f8", unpacked=field.dtype)

    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield rows, NaN for missing values."""
        for piece in self._source.pieces(start, rows):
            for field in self.fields:
                packing = self._packings.get(field.name)
                if packing is None:
                    continue
                values = piece[field.name]
                missing = int(np.count_nonzero(packing.is_missing(packing.stored(values))))
                if field.unpacked:
                    piece[field.name] = packing.unpack(values, field.dtype)
                become = "are missing and become NaN" if field.unpacked else "stand for no value and stay as they are"
                if missing:
                    self._losses[f"values of {shown(field.name)} {become}"] += missing
            yield piece


def open_hdf5(path: str, options: ReadOptions) -> RowSource:
    """Return the datasets of a file that have as many rows as its largest one.

    Raises:
        DataError: If none of them could be trained from.
    """
    access = Access(options.trust_file)
    contents = list_contents(path, access, MOST_CONVERTED)
    if not contents.complete:
        raise DataError(
            f"{shown(path)}: holds more than {MOST_CONVERTED:,} groups and datasets; write fewer and larger"
        )
    chosen, notes = _choose_entries(contents, options)
    dense = [entry for entry in chosen if entry.layout is not None]
    sliced = [entry for entry in chosen if entry.parts]
    sources: list[RowSource] = [_DenseSource(path, dense, access, options.budget)] if dense else []
    sources += [_SlicedSource(path, sliced, access, options.budget)] if sliced else []
    result = sources[0] if len(sources) == 1 else SideBySideSource(sources)
    notes += [
        f"{shown(entry.name)} is sparse in the source and dense here: {prod(entry.shape or ()):,} values"
        for entry in sliced
        if entry.kind == "csr_matrix"
    ]
    packings = {entry.name: entry.packing for entry in chosen if entry.packing is not None}
    if packings:
        result = _UnpackedSource(result, packings, unpack=options.unpack)
    result.label = shown(path)
    result.notes += notes
    return result


def _choose_entries(contents: Contents, options: ReadOptions) -> tuple[list[Entry], list[str]]:
    """Return the entries with equally many rows, and notes about those left out.

    Raises:
        DataError: If there are none, or the rows lie elsewhere.
    """
    wanted = options.columns
    entries, notes = _stacked(contents, wanted)
    if options.rows_axis == "last":
        entries = [_rows_last(entry) for entry in entries]
    read = [entry for entry in entries if wanted.reads(entry.name)]
    for entry in read:
        if entry.kind == "ragged":
            raise DataError(f"{shown(contents.path)}: {shown(entry.name)} {entry.problem}. {_PAD}")
    able = [entry for entry in read if entry.layout is not None or entry.parts]
    able = [entry for entry in able if entry.shape and 0 not in entry.shape]
    if not able:
        if any(entry.layout is not None or entry.parts for entry in entries):
            wanted.check()
        contents.refuse_unusable()
    largest = max(able, key=lambda entry: (prod(entry.shape or ()), entry.name))
    chosen = [entry for entry in able if entry.rows == largest.rows]
    if options.rows_axis == "first" and (other := contents.rows_on_last_axis(able)):
        raise DataError(f"{shown(contents.path)}: {other}")
    used = {part for entry in chosen for part in entry.parts} | {f"{entry.name}_{CLASS_NAMES}" for entry in chosen}
    used |= {f"{entry.name.removesuffix('codes')}categories" for entry in chosen if entry.kind == "codes"}
    reasons: dict[str, list[str]] = {}
    for entry in read:
        if entry not in chosen and entry.name not in used:
            rows = f"it has {format_count(entry.rows, 'row')}, and the others have {largest.rows:,}"
            reasons.setdefault(rows if entry in able else entry.problem, []).append(shown(entry.name))
    return chosen, notes + [f"left out: {_listed(names)} ({why})" for why, names in reasons.items()]


_PAD = "Pad them to one shape, or leave it out with drop (--drop)."


def _stacked(contents: Contents, wanted: ColumnChoice) -> tuple[list[Entry], list[str]]:
    """Return the entries, those of a group per sample stacked, unless groups are wanted one by one."""
    entries = list(contents.entries)
    repetition = find_repetition(entries)
    if repetition is None:
        return entries, []
    stacked = repetition.stacked()
    within, others = repetition.divide(entries)
    if not any(wanted.wants(entry.name) for entry in stacked) and any(wanted.wants(entry.name) for entry in within):
        return entries, []
    note = f"{repetition.title}, are a row each; columns of one group are read by their full names (--columns)"
    return [*stacked, *others], [note]


def _rows_last(entry: Entry) -> Entry:
    """Return a dataset of several axes with its last axis first, MATLAB's with all axes turned round."""
    if entry.layout is None or not entry.shape or len(entry.shape) < 2:
        return entry
    shape = entry.shape[::-1] if entry.is_matlab else (entry.shape[-1], *entry.shape[:-1])
    return replace(entry, shape=shape, layout=None, parts=(entry.name,))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
