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
from kerasmem.datatools.listing import CLASS_NAMES, MOST_CONVERTED, Contents, Entry, list_contents, opened
from kerasmem.datatools.row_source import RowSource, even_pieces
from kerasmem.errors import DataError
from kerasmem.hdf5.format.filters import DecodeError, register_filters
from kerasmem.hdf5.format.layout import shown, type_name
from kerasmem.hdf5.rows.paths import Access, natural_order
from kerasmem.hdf5.rows.safe_reading import check_chunks
from kerasmem.hdf5.rows.scan import find_dataset
from kerasmem.streaming.data_source import read_windows
from kerasmem.units import format_count

_LEAST_GROUPS = 8
_SHAPES_SHOWN = 3
_NAMES_SHOWN = 3
_NUMBER = re.compile(r"[<>|][iufb]")  # how NumPy's texts for numbers begin


@dataclass(frozen=True)
class Repetition:
    """Groups with names that differ in numbers alone, a sample each.

    Args:
        title: number of the groups, and the first and last of them.
        stacked: an entry for each dataset of all groups, with a problem if it cannot be stacked.
        first: entries of the first group.
        outside: entries outside the groups.
    """

    title: str
    stacked: list[Entry]
    first: list[Entry]
    outside: list[Entry]


def find_repetition(entries: Sequence[Entry]) -> Repetition | None:
    """Return the largest set of at least eight groups that repeat one layout, or None."""
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
    title = f"{len(names):,} groups, {shown(names[0])} to {shown(names[-1])}"
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
        kinds[_SHAPES_SHOWN:] = ["…"] if len(kinds) > _SHAPES_SHOWN else []
        problem = f"differs among {count}, a sample each: {', '.join(kinds)}"
        return Entry(name, None, first.dtype, None, problem, "ragged")
    return Entry(
        name, (len(entries), *(first.shape or ())), first.dtype, None, "", "stack",
        stored_bytes=sum(entry.stored_bytes for entry in entries),
        packing=first.packing if all(entry.packing == first.packing for entry in entries) else None,
        parts=tuple(entry.name for entry in entries),
    )  # fmt: skip


class Hdf5Source(RowSource):
    """The datasets of a file that have as many rows as its largest one.

    Args:
        path: the file.
        options: columns to read, and how.

    Raises:
        DataError: If none of them could be trained from.
    """

    def __init__(self, path: str, options: ReadOptions) -> None:
        super().__init__(shown(path), path)
        self._access, self._budget = Access(options.trust_file), options.budget
        contents = list_contents(path, self._access, MOST_CONVERTED)
        if not contents.complete:
            most = f"{MOST_CONVERTED:,} groups and datasets"
            raise DataError(f"{self.label}: holds more than {most}; write fewer and larger")
        entries, self.notes = _choose_entries(contents, options)
        self.rows = entries[0].rows
        self._dense = [entry.name for entry in entries if entry.layout is not None]
        self._sliced = [entry for entry in entries if entry.layout is None]
        self._packings = {entry.name: entry.packing for entry in entries if entry.packing is not None}
        self.fields = tuple(_field(entry, unpack=options.unpack) for entry in entries)

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield rows, unpacked, NaN for missing values."""
        stop, access, budget = self.first + self.rows, self._access, self._budget
        windows: list[Iterator[Rows]] = []
        if self._dense:  # as `H5ChunkSequence` reads them
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
        """Return physical values if they are wanted, and count missing ones."""
        packing = self._packings[field.name]
        missing = int(np.count_nonzero(packing.is_missing(packing.stored(values))))
        become = "are missing and become NaN" if field.unpacked else "stand for no value and stay as they are"
        if missing:
            self.losses[f"values of {shown(field.name)} {become}"] += missing
        return packing.unpack(values, field.dtype) if field.unpacked else values

    def _sliced_windows(self, rows: int) -> Iterator[Rows]:
        """Yield rows of the other entries, which h5py reads slice by slice."""
        row_bytes = sum(prod((entry.shape or ())[1:]) * np.dtype(entry.dtype).itemsize for entry in self._sliced)
        step = max(rows, self._budget // row_bytes)
        register_filters()
        with opened(self.paths[0], self.label) as file:
            for first in range(self.first, self.first + self.rows, step):
                last = min(first + step, self.first + self.rows)
                yield {entry.name: self._read(file, entry, first, last) for entry in self._sliced}

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
        """Return rows of a sparse matrix, zeros and all. Values of one row and column add up, as in SciPy."""
        matrix = f"{self.label}: {shown(entry.name)}"
        data, indices, indptr = entry.parts
        bounds = self._checked(file, indptr, range(first, last + 1))[first : last + 1].astype(np.int64)
        stored = find_dataset(file, data).shape[0]
        if len(bounds) <= last - first or bounds[0] < 0 or (np.diff(bounds) < 0).any() or bounds[-1] > stored:
            raise DataError(f"{matrix}: its index of rows is damaged; write the file again")
        out = np.zeros((last - first, *(entry.shape or ())[1:]), entry.dtype)
        low, high = int(bounds[0]), int(bounds[-1])
        if high - low > out.size:
            raise DataError(f"{matrix}: it has more values than rows and columns; write the file again")
        columns, values = (self._checked(file, part, range(low, high))[low:high] for part in (indices, data))
        if len(columns) < high - low or ((columns < 0) | (columns >= out.shape[1])).any():
            raise DataError(f"{matrix}: it has values outside its {out.shape[1]:,} columns; it is damaged")
        np.add.at(out, (np.repeat(np.arange(last - first), np.diff(bounds)), columns), values)
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


def _field(entry: Entry, *, unpack: bool) -> Field:
    """Return the field of an entry, in the type of its physical values if they are wanted."""
    field = Field(entry.name, entry.dtype, (entry.shape or ())[1:], entry.class_names)
    packing, stored = entry.packing, np.dtype(entry.dtype)
    if not unpack or packing is None or not (packing.scales or packing.unsigned or stored.kind == "f"):
        return field  # whole numbers without a scale, such as labels, stay whole
    is_small = stored.itemsize <= (4 if stored.kind == "f" else 2)
    return replace(field, dtype="<f4" if is_small else "<f8", unpacked=field.dtype)


def _choose_entries(contents: Contents, options: ReadOptions) -> tuple[list[Entry], list[str]]:
    """Return the entries with equally many rows, and notes about those left out.

    Raises:
        DataError: If there are none, or the rows lie elsewhere.
    """
    wanted = options.columns
    repetition = find_repetition(contents.entries)
    entries = [*repetition.stacked, *repetition.outside] if repetition else list(contents.entries)
    notes = [f"{repetition.title}, are a row each"] if repetition else []
    stored = [entry for entry in entries if wanted.reads(entry.name)]
    read = [_rows_first(entry, options.rows_axis) for entry in stored]
    for entry in read:
        if entry.kind == "ragged":
            pad = "Pad them to one shape, or leave it out with drop (--drop)."
            raise DataError(f"{shown(contents.path)}: {shown(entry.name)} {entry.problem}. {pad}")
    able = [entry for entry in read if (entry.layout is not None or entry.parts) and 0 not in (entry.shape or (0,))]
    if not able:
        if entries and not read:
            wanted.refuse_empty(shown(contents.path))
        contents.refuse_unusable()
    largest = max(able, key=lambda entry: (prod(entry.shape or ()), entry.name))
    chosen = [entry for entry in able if entry.rows == largest.rows]
    if options.rows_axis == "first" and (other := contents.rows_on_last_axis(stored)):
        raise DataError(f"{shown(contents.path)}: {other}")
    used = {part for entry in chosen for part in entry.parts} | {f"{entry.name}_{CLASS_NAMES}" for entry in chosen}
    used |= {f"{entry.name.removesuffix('codes')}categories" for entry in chosen if entry.kind == "codes"}
    reasons: dict[str, list[str]] = {}
    for entry in read:
        if entry not in chosen and entry.name not in used:
            rows = f"it has {format_count(entry.rows, 'row')}, and the others have {largest.rows:,}"
            reasons.setdefault(rows if entry in able else entry.problem, []).append(shown(entry.name))
    for reason, names in reasons.items():
        more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
        notes.append(f"left out: {', '.join(names[:_NAMES_SHOWN])}{more} ({reason})")
    return chosen, notes


def _rows_first(entry: Entry, rows_axis: str) -> Entry:
    """Return a dataset whose axis 0 has the rows. MATLAB's axes are reversed if its rows are on the last axis.

    A vector of MATLAB has one number per row, whether it is stored as 1×n or n×1.
    """
    if entry.layout is None or not entry.shape or len(entry.shape) < 2:
        return entry
    is_last = entry.is_matlab_column or (rows_axis == "last" and not (entry.is_matlab and entry.shape[1:] == (1,)))
    if not is_last:
        return entry
    shape = entry.shape[::-1] if entry.is_matlab else (entry.shape[-1], *entry.shape[:-1])
    return replace(entry, shape=shape, layout=None, parts=(entry.name,))
