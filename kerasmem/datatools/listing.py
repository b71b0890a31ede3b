"""List the datasets of a file, and problems that prevent training from them. No other file is opened."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, NoReturn

import h5py
import numpy as np

from kerasmem.datatools.fields import Packing, read_packing
from kerasmem.errors import DataError
from kerasmem.hdf5.format.filters import DecodeError
from kerasmem.hdf5.format.layout import DatasetLayout, one_line, quote
from kerasmem.hdf5.format.links import DAMAGED, shape_of, walk_objects
from kerasmem.hdf5.io.access import RemoteAccess
from kerasmem.hdf5.rows.paths import Access
from kerasmem.hdf5.rows.safe_reading import MOST_TEXT, read_attribute, read_names, text_of
from kerasmem.hdf5.rows.scan import close_file, find_dataset, missing_part, open_file, scan_dataset

MOST_LISTED = 5000  # groups and datasets, because a hostile file may hold millions
MOST_CONVERTED = 100_000  # groups and datasets of a file to convert
CLASS_NAMES = "class_names"
_MOST_NAMES = 100_000  # classes
_TARGETS = ("y", "label", "labels", "target", "targets", "class", "classes", "y_train", "codes")
_SPARSE = {"csr_matrix", "csc_matrix"}


class Column(NamedTuple):
    """Name, type and row shape of a dataset, and whether it holds codes of categories."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_codes: bool = False

    @property
    def folder(self) -> str:
        """Path of the group."""
        return self.name.rpartition("/")[0]

    @property
    def last_name(self) -> str:
        """Name in the group, in lowercase."""
        return self.name.rpartition("/")[2].lower()

    @property
    def is_named_target(self) -> bool:
        """Whether the name is one that targets usually have."""
        return self.last_name in _TARGETS

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def may_be_labels(self) -> bool:
        """Whether a row is one whole number."""
        return prod(self.shape) == 1 and np.dtype(self.dtype).kind in "iub"


@dataclass(frozen=True)
class Entry:
    """One dataset, one column of a table, or one sparse matrix of several datasets.

    Args:
        name: full path in the file.
        shape: shape, or None if it has none.
        dtype: NumPy's type string, or a description of other types.
        layout: storage layout if the dataset can be trained from, or None.
        problem: reason why it cannot be trained from, or "".
        kind: "csr_matrix", "csc_matrix", "field" of a table, "codes" of categories, "stack" of one group per row,
            "ragged" for groups that cannot be stacked, or "" for others.
        class_names: names of its classes, or None if the file has none.
        stored_bytes: bytes in the file.
        packing: encoding of its values, or None.
        parts: datasets from which h5py reads it slice by slice, or () if it is read differently or not at all.
        is_matlab: whether MATLAB wrote it. MATLAB's first axis is HDF5's last.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    layout: DatasetLayout | None
    problem: str = ""
    kind: str = ""
    class_names: tuple[str, ...] | None = None
    stored_bytes: int = 0
    packing: Packing | None = None
    parts: tuple[str, ...] = ()
    is_matlab: bool = False

    @property
    def rows(self) -> int:
        """Length of axis 0."""
        return self.shape[0] if self.shape else 0

    @property
    def is_matlab_column(self) -> bool:
        """Whether it is a column vector of MATLAB, stored as one row."""
        return self.is_matlab and self.shape is not None and len(self.shape) == 2 and self.shape[0] == 1

    @property
    def column(self) -> Column:
        """The facts from which its role is guessed. Packed values count as floating point."""
        dtype = "<f4" if self.packing is not None and self.packing.scales else self.dtype
        return Column(self.name, dtype, (self.shape or (0,))[1:], self.kind == "codes")


_COLUMN = "is a column of a table; kerasmem data convert writes it as a dataset"


@dataclass(frozen=True)
class Contents:
    """Datasets in one file.

    Args:
        path: absolute path of the file.
        entries: the datasets.
        complete: whether the list is complete.
    """

    path: str
    entries: tuple[Entry, ...]
    complete: bool = True

    @property
    def usable(self) -> dict[str, Entry]:
        """The datasets that can be trained from, by name."""
        return {entry.name: entry for entry in self.entries if entry.layout is not None}

    def with_rows_of(self, name: str) -> list[Entry]:
        """Return the datasets with as many rows as the dataset `name`."""
        usable = self.usable
        return [entry for entry in usable.values() if entry.rows == usable[name].rows]

    def rows_on_last_axis(self, entries: Sequence[Entry]) -> str:
        """Describe MATLAB arrays that have the same number of rows only on their last axis, or return "".

        MATLAB's first axis, often that of the samples, is HDF5's last.
        """
        arrays = [entry.layout for entry in entries if entry.is_matlab and entry.layout is not None]
        arrays = sorted((array for array in arrays if prod(array.shape) > 1), key=lambda array: -prod(array.shape))
        if not arrays:
            return ""
        largest, *others = arrays
        matching = [array for array in others if array.shape[-1] == largest.shape[-1] > 1]
        if not matching or any(array.rows == largest.rows for array in others):
            return ""
        shapes = f"{quote(largest.name)} {largest.shape} and {quote(matching[0].name)} {matching[0].shape}"
        return (
            f"{shapes} have equally many rows on their last axis, MATLAB's first. Pass rows_axis='last' "
            "(--rows-axis last) to kerasmem data convert"
        )

    def refuse_unusable(self) -> NoReturn:
        """Raise the error for a file without a dataset that can be trained from."""
        largest = sorted(self.entries, key=lambda entry: -entry.stored_bytes)[:5]
        problems = "; ".join(f"{quote(entry.name)}: {entry.problem}" for entry in largest)
        raise DataError(f"{quote(self.path)}: holds no dataset that can be trained from. {problems}".rstrip(". "))


def list_contents(path: str, access: Access | None = None, most: int = MOST_LISTED) -> Contents:
    """List the datasets of a file.

    Args:
        path: the file.
        access: trust in the file, and access to URLs. Defaults to no trust.
        most: largest number of groups and datasets to list.

    Raises:
        DataError: If the file cannot be read.
    """
    access = access or Access()
    with open_h5(path, f"{quote(path)}: its list of datasets", access.remote) as file:
        return Contents(path, *_Listing(file, path, access).list(most))


@contextlib.contextmanager
def open_h5(path: str, label: str, remote: RemoteAccess | None = None) -> Iterator[h5py.File]:
    """Open a file, and close it after the block.

    Raises:
        DataError: If h5py cannot open the file, or fails in the block. The message begins with `label`.
    """
    file = open_file(path, remote)
    try:
        yield file
    except DataError:
        raise
    except DAMAGED as error:
        raise DataError(f"{label} cannot be read: {one_line(str(error))}") from error
    finally:
        close_file(file)


class _Listing:
    """Lists the datasets of an open file."""

    def __init__(self, file: h5py.File, path: str, access: Access) -> None:
        self._file, self._path, self._access = file, path, access
        self._characters = 0  # of all class names
        self._names: set[str] = set()

    def list(self, most: int) -> tuple[tuple[Entry, ...], bool]:
        """Return the datasets sorted by name, and whether the list is complete."""
        objects, complete = walk_objects(self._file, most)
        self._names = set(objects)
        groups = {name: item for name, item in objects.items() if isinstance(item, h5py.Group) and "indptr" in item}
        kinds = {name: text_of(self._attribute(item, "encoding-type")) for name, item in groups.items()}
        sparse = {name: kind for name, kind in kinds.items() if kind in _SPARSE}
        inside = tuple(f"{name}/" for name in sparse)
        entries = [self._sparse_entry(objects[name], name, kind) for name, kind in sparse.items()]
        for name, item in objects.items():
            if isinstance(item, h5py.Dataset) and not name.startswith(inside):
                entries += [self._entry(item, name), *self._table_columns(item, name)]
        return tuple(sorted(entries, key=lambda entry: entry.name)), complete

    def _attribute(self, item: Any, name: str) -> Any:
        return read_attribute(item, name, trust_file=self._access.trust_file)

    def _entry(self, item: h5py.Dataset, name: str) -> Entry:
        shape: tuple[int, ...] | None = None
        dtype, layout, problem, stored = "", None, "", 0
        try:
            shape = shape_of(item)
            dtype = item.dtype.str if item.dtype.names is None and item.dtype.kind != "O" else str(item.dtype)
        except DAMAGED as error:
            problem = one_line(str(error))
        try:
            layout = scan_dataset(self._file, self._path, name, self._access)
        except DataError as error:
            label = f"{quote(self._path)}: dataset {quote(name)}"
            message = one_line(str(error)).removeprefix(label).removeprefix(quote(self._path))
            problem = message.lstrip(": ").strip() or problem
        if layout is None:
            with contextlib.suppress(*DAMAGED):
                stored = int(item.id.get_storage_size())
            return Entry(name, shape, one_line(dtype, 200), None, problem, stored_bytes=stored)
        numbers = np.dtype(layout.dtype)
        is_codes = name.endswith("/codes") and f"{name.removesuffix('codes')}categories" in self._names
        if is_codes and numbers.kind == "i":
            packing: Packing | None = Packing(missing=(-1,))  # AnnData's code for a row without a category
        else:
            packing = read_packing(functools.partial(self._attribute, item), numbers)
        return Entry(
            name, layout.shape, layout.dtype, layout, "", "codes" if is_codes else "", self._class_names(item, name),
            layout.stored_bytes, packing, is_matlab=self._attribute(item, "MATLAB_class") is not None,
        )  # fmt: skip

    def _table_columns(self, item: h5py.Dataset, name: str) -> Iterator[Entry]:
        """Yield the columns of a table that hold numbers or arrays of numbers."""
        with contextlib.suppress(*DAMAGED, DataError):
            dtype, shape = item.dtype, shape_of(item)
            if dtype.names is None or not shape:
                return
            find_dataset(self._file, name, trust_file=self._access.trust_file)
            missing = self._describe_missing(item)
            for column in dtype.names:
                kind = dtype[column]
                if kind.base.kind in "iufb" and "/" not in column:
                    path = f"{name}/{column}"
                    problem, parts = (missing, ()) if missing else (_COLUMN, (name,))
                    yield Entry(path, shape + kind.shape, kind.base.str, None, problem, "field", parts=parts)

    def _describe_missing(self, item: h5py.Dataset) -> str:
        """Describe parts of a dataset that were never written. Return "" if none are, or the file is trusted."""
        missing = "" if self._access.trust_file else missing_part(self._file, item)
        return f"is not complete: {missing}" if missing else ""

    def _class_names(self, item: h5py.Dataset, name: str) -> tuple[str, ...] | None:
        """Return class names from an attribute, the dataset `NAME_class_names`, or AnnData's categories.

        Return None if the names of the whole file take too much memory.
        """
        names: Sequence[str] | None = None
        value = self._attribute(item, CLASS_NAMES)
        if isinstance(value, np.ndarray) and value.ndim == 1 and 0 < value.size <= _MOST_NAMES:
            names = [text_of(entry) or str(entry) for entry in value.tolist()]
        datasets = {f"{name}_{CLASS_NAMES}", f"{name.removesuffix('codes')}categories"} & self._names
        if value is None and datasets:
            with contextlib.suppress(*DAMAGED, DataError, DecodeError):
                names = read_names(find_dataset(self._file, min(datasets)), _MOST_NAMES)
        self._characters += sum(map(len, names or ()))
        return tuple(names) if names and self._characters <= MOST_TEXT else None

    def _sparse_entry(self, item: h5py.Group, name: str, kind: str) -> Entry:
        try:
            names = tuple(f"{name}/{part}" for part in ("data", "indices", "indptr"))
            parts = [find_dataset(self._file, part) for part in names]
            missing = next(filter(None, map(self._describe_missing, parts)), "")
            if missing:
                raise ValueError(missing)
            extents = self._attribute(item, "shape")
            if not isinstance(extents, np.ndarray) or extents.dtype.kind not in "iu" or extents.shape != (2,):
                raise ValueError("its shape is missing")
            shape = tuple(int(extent) for extent in extents)
            stored = sum(int(part.id.get_storage_size()) for part in parts)
            values = int(parts[0].shape[0])
            dtype = parts[0].dtype.str
        except DAMAGED as error:
            return Entry(name, None, "", None, f"a sparse matrix that cannot be read: {one_line(str(error))}", kind)
        is_by_rows = kind == "csr_matrix"
        remedy = "`kerasmem data convert` writes it dense" if is_by_rows else "write it by rows (csr)"
        problem = f"a sparse matrix of {values:,} values, stored by {'rows' if is_by_rows else 'columns'}; {remedy}"
        return Entry(name, shape, dtype, None, problem, kind, stored_bytes=stored, parts=names if is_by_rows else ())
