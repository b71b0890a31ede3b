"""HDF5 files as sources: datasets, columns of tables, a group per row, and sparse matrices made dense."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import h5py
import numpy as np

from kerasmem.datatools.conversion_settings import ReadOptions
from kerasmem.datatools.fields import Field, Rows
from kerasmem.datatools.listing import CLASS_NAMES, MOST_CONVERTED, Contents, Entry, list_contents, open_h5
from kerasmem.datatools.row_source import RowSource, even_pieces
from kerasmem.errors import DataError
from kerasmem.hdf5.format.filters import DecodeError, register_filters
from kerasmem.hdf5.format.layout import quote, type_name
from kerasmem.hdf5.rows.paths import Access, natural_order
from kerasmem.hdf5.rows.safe_reading import check_chunks
from kerasmem.hdf5.rows.scan import find_dataset
from kerasmem.streaming.data_source import read_windows
from kerasmem.units import format_count

_LEAST_GROUPS = 8
_MOST_SHOWN = 3  # shapes or names in a message
_NUMBER = re.compile(r"[<>|][iufb]")  # beginning of NumPy's type strings of numbers


@dataclass(frozen=True)
class Repetition:
    """Groups of one sample each, with names that differ only in their numbers.

    Args:
        title: number of groups, and names of the first and last.
        stacked: one entry per dataset that all groups have, with a problem if it cannot be stacked.
        first: entries of the first group.
        outside: entries outside the groups.
    """

    title: str
    stacked: list[Entry]
    first: list[Entry]
    outside: list[Entry]


def find_repetition(entries: Sequence[Entry]) -> Repetition | None:
    """Return the largest set of at least eight groups with one layout, or None."""
    layouts: dict[str, dict[str, dict[str, Entry]]] = {}
    for entry in entries:
        for slash in re.finditer("/", entry.name):
            group, member = entry.name[: slash.start()], entry.name[slash.end() :]
            parent, _, last = group.rpartition("/")
            layout = f"{parent}/{re.sub(r'[0-9]+', '0', last)}"
            if re.search("[0-9]", last):
                layouts.setdefault(layout, {}).setdefault(group, {})[member] = entry
    groups = max(layouts.values(), key=len, default={})
    names = sorted(groups, key=natural_order)
    if len(names) < _LEAST_GROUPS:
        return None
    parent = names[0].rpartition("/")[0]
    stacked = [
        _stack(f"{parent}/{member}".lstrip("/"), [groups[name][member] for name in names])
        for member in groups[names[0]]
        if all(member in members for members in groups.values())
    ]
    if not stacked:
        return None
    title = f"{len(names):,} groups, {quote(names[0])} to {quote(names[-1])}"
    inside = {entry.name for members in groups.values() for entry in members.values()}
    outside = [entry for entry in entries if entry.name not in inside]
    return Repetition(title, stacked, list(groups[names[0]].values()), outside)


def _stack(name: str, entries: Sequence[Entry]) -> Entry:
    first, count = entries[0], f"{len(entries):,} groups"
    for entry in entries:
        if entry.layout is None and not (entry.shape == () and _NUMBER.match(entry.dtype)):
            return Entry(name, None, first.dtype, None, f"in {count}: {entry.problem}")
    kinds = list(dict.fromkeys(f"{type_name(entry.dtype)} {entry.shape}" for entry in entries))
    if len(kinds) > 1:
        kinds[_MOST_SHOWN:] = ["…"] if len(kinds) > _MOST_SHOWN else []
        problem = f"differs among {count}, a sample each: {', '.join(kinds)}"
        return Entry(name, None, first.dtype, None, problem, "ragged")
    return Entry(
        name, (len(entries), *(first.shape or ())), first.dtype, None, "", "stack",
        stored_bytes=sum(entry.stored_bytes for entry in entries),
        packing=first.packing if all(entry.packing == first.packing for entry in entries) else None,
        parts=tuple(entry.name for entry in entries),
    )  # fmt: skip


class Hdf5Source(RowSource):
    """The datasets of a file with as many rows as its largest one.

    Args:
        path: the file.
        options: columns to read, and options for reading.

    Raises:
        DataError: If no dataset can be trained from.
    """

    def __init__(self, path: str, options: ReadOptions) -> None:
        super().__init__(quote(path), path)
        self._access, self._budget = Access(options.trust_file), options.budget
        contents = list_contents(path, self._access, MOST_CONVERTED)
        if not contents.complete:
            most = f"{MOST_CONVERTED:,} groups and datasets"
            raise DataError(f"{self.label}: holds more than {most}; write fewer and larger ones")
        entries, self.notes = _choose_entries(contents, options)
        self.rows = entries[0].rows
        self._dense = [entry.name for entry in entries if entry.layout is not None]
        self._sliced = [entry for entry in entries if entry.layout is None]
        self._packings = {entry.name: entry.packing for entry in entries if entry.packing is not None}
        self.fields = tuple(_field(entry, unpack=options.unpack) for entry in entries)

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield rows, unpacked if that is set."""
        stop, access, budget = self.first + self.rows, self._access, self._budget
        windows: list[Iterator[Rows]] = []
        if self._dense:
            dense = read_windows(self.paths, self._dense, start=self.first, stop=stop, access=access, budget=budget)
            windows.append(window for _, window in dense)
        if self._sliced:
            windows.append(self._sliced_windows(rows))
        for parts in zip(*(even_pieces(stream, rows) for stream in windows), strict=True):
            piece = {name: values for part in parts for name, values in part.items()}
            for field in self.fields:
                if field.name in self._packings:
                    piece[field.name] = self._unpack(field, piece[field.name])
            yield piece

    def _unpack(self, field: Field, values: np.ndarray) -> np.ndarray:
        """Count missing values, and unpack values if that is set."""
        packing = self._packings[field.name]
        missing = int(np.count_nonzero(packing.is_missing(packing.apply_sign(values))))
        outcome = "become NaN" if field.stored_dtype else "stay as stored"
        if missing:
            self.losses[f"values of {quote(field.name)} are missing and {outcome}"] += missing
        return packing.unpack(values, field.dtype) if field.stored_dtype else values

    def _sliced_windows(self, rows: int) -> Iterator[Rows]:
        """Yield rows of the entries that h5py reads slice by slice."""
        row_bytes = sum(prod((entry.shape or ())[1:]) * np.dtype(entry.dtype).itemsize for entry in self._sliced)
        step = max(rows, self._budget // row_bytes)
        register_filters()
        with open_h5(self.paths[0], self.label) as file:
            for start in range(self.first, self.first + self.rows, step):
                stop = min(start + step, self.first + self.rows)
                yield {entry.name: self._read(file, entry, start, stop) for entry in self._sliced}

    def _read(self, file: h5py.File, entry: Entry, start: int, stop: int) -> np.ndarray:
        name = entry.parts[0]
        if entry.kind == "stack":
            return np.stack([self._open_dataset(file, part)[()] for part in entry.parts[start:stop]])
        if entry.kind == "field":
            table = self._open_dataset(file, name, range(start, stop))
            return np.asarray(table.fields(entry.name.rpartition("/")[2])[start:stop])
        if entry.kind == "csr_matrix":
            return self._read_sparse(file, entry, start, stop)
        values = self._open_dataset(file, name, range(start, stop), axis=-1)[..., start:stop]
        return values.T if entry.is_matlab else np.moveaxis(values, -1, 0)

    def _read_sparse(self, file: h5py.File, entry: Entry, start: int, stop: int) -> np.ndarray:
        """Return rows of a sparse matrix as a dense one. Duplicate values are added up, as in SciPy."""
        matrix = f"{self.label}: {quote(entry.name)}"
        data, indices, indptr = entry.parts
        bounds = self._open_dataset(file, indptr, range(start, stop + 1))[start : stop + 1].astype(np.int64)
        stored = find_dataset(file, data).shape[0]
        if len(bounds) <= stop - start or bounds[0] < 0 or (np.diff(bounds) < 0).any() or bounds[-1] > stored:
            raise DataError(f"{matrix}: its index of rows is damaged; write the file again")
        dense = np.zeros((stop - start, *(entry.shape or ())[1:]), entry.dtype)
        low, high = int(bounds[0]), int(bounds[-1])
        if high - low > dense.size:
            raise DataError(f"{matrix}: it has more values than rows and columns; write the file again")
        columns, values = (self._open_dataset(file, part, range(low, high))[low:high] for part in (indices, data))
        if len(columns) < high - low or ((columns < 0) | (columns >= dense.shape[1])).any():
            raise DataError(f"{matrix}: it has values outside its {dense.shape[1]:,} columns; write the file again")
        np.add.at(dense, (np.repeat(np.arange(stop - start), np.diff(bounds)), columns), values)
        return dense

    def _open_dataset(self, file: h5py.File, name: str, rows: range | None = None, axis: int = 0) -> h5py.Dataset:
        """Return a dataset. Unless the file is trusted, check the chunks with these rows first."""
        dataset = find_dataset(file, name, trust_file=self._access.trust_file)
        if not self._access.trust_file:
            try:
                check_chunks(dataset, rows, axis)
            except DecodeError as error:
                raise DataError(f"{self.label}: dataset {quote(name)} cannot be read: {error}") from error
        return dataset


def _field(entry: Entry, *, unpack: bool) -> Field:
    """Return the field of an entry, in the type of its physical values with `unpack`."""
    field = Field(entry.name, entry.dtype, (entry.shape or ())[1:], entry.class_names)
    packing, stored = entry.packing, np.dtype(entry.dtype)
    if not unpack or packing is None or not (packing.scales or packing.unsigned or stored.kind == "f"):
        return field  # keeps whole numbers without a scale, such as labels
    is_small = stored.itemsize <= (4 if stored.kind == "f" else 2)
    return replace(field, dtype="<f4" if is_small else "<f8", stored_dtype=field.dtype)


def _choose_entries(contents: Contents, options: ReadOptions) -> tuple[list[Entry], list[str]]:
    """Return the entries with as many rows as the largest one, and notes about those left out.

    Raises:
        DataError: If no entry can be read, or the rows are on another axis or in ragged groups.
    """
    choice = options.columns
    repetition = find_repetition(contents.entries)
    entries = [*repetition.stacked, *repetition.outside] if repetition else list(contents.entries)
    notes = [f"{repetition.title}, are one row each"] if repetition else []
    stored = [entry for entry in entries if choice.reads(entry.name)]
    read = [_rows_first(entry, options.rows_axis) for entry in stored]
    for entry in read:
        if entry.kind == "ragged":
            pad = "Pad them to one shape, or leave it out with drop (--drop)."
            raise DataError(f"{quote(contents.path)}: {quote(entry.name)} {entry.problem}. {pad}")
    usable = [entry for entry in read if (entry.layout is not None or entry.parts) and 0 not in (entry.shape or (0,))]
    if not usable:
        if entries and not read:
            choice.refuse_empty(quote(contents.path))
        contents.refuse_unusable()
    largest = max(usable, key=lambda entry: (prod(entry.shape or ()), entry.name))
    selection = [entry for entry in usable if entry.rows == largest.rows]
    if options.rows_axis == "first" and (problem := contents.rows_on_last_axis(stored)):
        raise DataError(f"{quote(contents.path)}: {problem}")
    used = {part for entry in selection for part in entry.parts} | {
        f"{entry.name}_{CLASS_NAMES}" for entry in selection
    }
    used |= {f"{entry.name.removesuffix('codes')}categories" for entry in selection if entry.kind == "codes"}
    reasons: dict[str, list[str]] = {}
    for entry in read:
        if entry not in selection and entry.name not in used:
            rows = f"it has {format_count(entry.rows, 'row')}, and the others have {largest.rows:,}"
            reasons.setdefault(rows if entry in usable else entry.problem, []).append(quote(entry.name))
    for reason, names in reasons.items():
        more = f" and {len(names) - _MOST_SHOWN:,} more" if len(names) > _MOST_SHOWN else ""
        notes.append(f"left out: {', '.join(names[:_MOST_SHOWN])}{more} ({reason})")
    return selection, notes


def _rows_first(entry: Entry, rows_axis: str) -> Entry:
    """Return a dataset with the rows on axis 0. If MATLAB's rows are on the last axis, reverse all its axes.

    A vector of MATLAB has one number per row, whether it is stored as 1×n or n×1.
    """
    if entry.layout is None or not entry.shape or len(entry.shape) < 2:
        return entry
    is_last = entry.is_matlab_column or (rows_axis == "last" and not (entry.is_matlab and entry.shape[1:] == (1,)))
    if not is_last:
        return entry
    shape = entry.shape[::-1] if entry.is_matlab else (entry.shape[-1], *entry.shape[:-1])
    return replace(entry, shape=shape, layout=None, parts=(entry.name,))
