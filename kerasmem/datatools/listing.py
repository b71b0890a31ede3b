"""List the datasets of a file, and problems that keep them from training. No other file is opened."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import h5py
import numpy as np

from kerasmem.errors import DataError
from kerasmem.hdf5.format.filters import DecodeError
from kerasmem.hdf5.format.layout import DatasetLayout, one_line, shown
from kerasmem.hdf5.format.links import DAMAGED, encoded, shape_of, walk_objects
from kerasmem.hdf5.rows.scan import close_file, find_dataset, look_at, open_file
from kerasmem.hdf5.rows.settings import Access
from kerasmem.hdf5.rows.texts import MOST_TEXT, read_attribute, read_names, text_of
from kerasmem.streaming.file_order import read_windows

MOST_LISTED = 5000  # objects looked at: a hostile file may hold millions
CHECKSUM = "kerasmem_crc32"
CLASS_NAMES = "class_names"
_MOST_NAMES = 100_000  # classes
_SPARSE = {"csr_matrix", "csc_matrix"}


@dataclass(frozen=True)
class Entry:
    """One dataset, or one sparse matrix that lies in several.

    Args:
        name: full path in the file.
        shape: shape; None where there is none.
        dtype: NumPy's text for the type, or what it is in words.
        layout: how it is stored, where it can be trained from.
        problem: why it cannot; "" where it can.
        sparse: "csr_matrix" or "csc_matrix" for a sparse matrix.
        class_names: what the numbers in it stand for, where the file says so.
        stored_bytes: bytes taken in the file.
        checksum: CRC-32 of its rows that was written along with it.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    layout: DatasetLayout | None
    problem: str = ""
    sparse: str = ""
    class_names: tuple[str, ...] | None = None
    stored_bytes: int = 0
    checksum: int | None = None


@dataclass(frozen=True)
class Contents:
    """What a file holds.

    Args:
        path: absolute path.
        size: bytes of the file.
        entries: the datasets.
        complete: whether all were looked at.
    """

    path: str
    size: int
    entries: tuple[Entry, ...]
    complete: bool = True

    @property
    def usable(self) -> dict[str, DatasetLayout]:
        """The datasets that can be trained from, by name."""
        return {entry.name: entry.layout for entry in self.entries if entry.layout is not None}

    def with_rows_of(self, name: str) -> list[DatasetLayout]:
        """Return the datasets with as many rows as one of them."""
        usable = self.usable
        return [layout for layout in usable.values() if layout.rows == usable[name].rows]

    def refuse_unusable(self) -> NoReturn:
        """Raise the error for a file that holds nothing that could be trained from."""
        largest = sorted(self.entries, key=lambda entry: -entry.stored_bytes)[:5]
        problems = "; ".join(f"{shown(entry.name)}: {entry.problem}" for entry in largest)
        raise DataError(f"{shown(self.path)}: holds nothing that could be trained from. {problems}".rstrip(". "))


def list_contents(path: str, access: Access | None = None) -> Contents:
    """List the datasets of a file.

    Raises:
        DataError: the file cannot be read.
    """
    access = access or Access()
    with opened(path, f"{shown(path)}: its list of datasets") as file:
        entries, complete = _Listing(file, path, access).list()
    return Contents(path, os.path.getsize(path), entries, complete)


@contextlib.contextmanager
def opened(path: str, what: str) -> Iterator[h5py.File]:
    """Yield a file; errors of h5py say that `what` cannot be read.

    Raises:
        DataError: so it is.
    """
    file = open_file(path)
    try:
        yield file
    except DataError:
        raise
    except DAMAGED as error:
        raise DataError(f"{what} cannot be read: {one_line(str(error))}") from error
    finally:
        close_file(file)


def checksums(path: str, names: Sequence[str]) -> dict[str, int]:
    """Return the CRC-32 of datasets' values in order, little-endian, whatever their chunks, in one pass through a file.

    It tells whether a dataset still holds what was written. The datasets have equally many rows.
    """
    values = dict.fromkeys(names, 0)
    for _, window in read_windows([path], names):
        for name, array in window.items():
            if array.dtype.byteorder == ">":
                array = array.astype(array.dtype.newbyteorder("<"))
            values[name] = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, values[name])
    return values


class _Listing:
    """Lists a file that is open."""

    def __init__(self, file: h5py.File, path: str, access: Access) -> None:
        self._file, self._path, self._access = file, path, access
        self._characters = 0  # of all class names

    def list(self) -> tuple[tuple[Entry, ...], bool]:
        """Return the datasets by name, and whether the list is complete."""
        objects, complete = walk_objects(self._file, MOST_LISTED)
        groups = {name: item for name, item in objects.items() if isinstance(item, h5py.Group) and "indptr" in item}
        kinds = {name: text_of(self._attribute(item, "encoding-type")) for name, item in groups.items()}
        sparse = {name: kind for name, kind in kinds.items() if kind in _SPARSE}
        inside = tuple(f"{name}/" for name in sparse)
        entries = [self._sparse(objects[name], name, kind) for name, kind in sparse.items()]
        entries += [
            self._entry(item, name)
            for name, item in objects.items()
            if isinstance(item, h5py.Dataset) and not name.startswith(inside)
        ]
        return tuple(sorted(entries, key=lambda entry: entry.name)), complete

    def _attribute(self, item: Any, name: str) -> Any:
        return read_attribute(item, name, trust_file=self._access.trust_file)

    def _entry(self, item: h5py.Dataset, name: str) -> Entry:
        shape: tuple[int, ...] | None = None
        dtype, layout, problem, stored = "", None, "", 0
        try:
            shape = shape_of(item)
            stored = int(item.id.get_storage_size())
            dtype = item.dtype.str if item.dtype.names is None and item.dtype.kind != "O" else str(item.dtype)
        except DAMAGED as error:
            problem = one_line(str(error))
        try:
            layout = look_at(self._file, self._path, name, self._access)
            shape, dtype = layout.shape, layout.dtype
        except DataError as error:
            here = f"{shown(self._path)}: dataset {shown(name)}"
            problem = (
                one_line(str(error)).removeprefix(here).removeprefix(shown(self._path)).lstrip(": ").strip() or problem
            )
        names = crc32 = None
        if layout is not None:
            names, found = self._class_names(item, name), self._attribute(item, CHECKSUM)
            crc32 = int(found) if isinstance(found, np.integer) else None
        return Entry(name, shape, one_line(dtype, 200), layout, problem, "", names, stored, crc32)

    def _class_names(self, item: h5py.Dataset, name: str) -> tuple[str, ...] | None:
        """Return class names, unless those of the whole file take too much memory."""
        names = self._read_class_names(item, name)
        self._characters += sum(map(len, names or ()))
        return names if self._characters <= MOST_TEXT else None

    def _read_class_names(self, item: h5py.Dataset, name: str) -> tuple[str, ...] | None:
        """Return class names from an attribute, `NAME_class_names`, or AnnData's categories."""
        value = self._attribute(item, CLASS_NAMES)
        if isinstance(value, np.ndarray) and value.ndim == 1 and 0 < value.size <= _MOST_NAMES:
            return tuple(text_of(entry) or str(entry) for entry in value.tolist())
        candidates = [f"{name}_{CLASS_NAMES}"]
        if name.endswith("/codes"):
            candidates.append(f"{name.removesuffix('codes')}categories")
        for other in candidates if value is None else ():
            try:
                if isinstance(self._file.get(encoded(other), getlink=True), h5py.HardLink):
                    names = read_names(find_dataset(self._file, other), _MOST_NAMES)
                    return None if names is None else tuple(names)
            except (*DAMAGED, DataError, DecodeError):
                return None
        return None

    def _sparse(self, item: h5py.Group, name: str, kind: str) -> Entry:
        try:
            parts = sparse_parts(self._file, name)
            extents = self._attribute(item, "shape")
            if not isinstance(extents, np.ndarray) or extents.dtype.kind not in "iu" or extents.shape != (2,):
                raise ValueError("its shape is missing")
            shape = tuple(int(extent) for extent in extents)
            stored = sum(int(part.id.get_storage_size()) for part in parts)
            values = int(parts[0].shape[0])
            dtype = parts[0].dtype.str
        except DAMAGED as error:
            return Entry(name, None, "", None, f"a sparse matrix that cannot be read: {one_line(str(error))}", kind)
        how = {
            "csc_matrix": "by columns, so that no row can be had by itself; write it by rows (csr)",
            "csr_matrix": "by rows; `kerasmem data convert` writes it dense",
        }
        problem = f"a sparse matrix of {values:,} values, stored {how[kind]}"
        return Entry(name, shape, dtype, None, problem, kind, stored_bytes=stored)


def sparse_parts(file: h5py.File, name: str) -> tuple[h5py.Dataset, h5py.Dataset, h5py.Dataset]:
    """Return the values, the columns and the bounds of rows of a sparse matrix.

    Raises:
        DataError: one is missing, or lies in another file.
    """
    data, indices, indptr = (find_dataset(file, f"{name}/{part}") for part in ("data", "indices", "indptr"))
    return data, indices, indptr
