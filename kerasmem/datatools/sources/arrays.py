"""NumPy's .npy and .npz as sources, read row by row without unpickling."""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kerasmem.archives import read_npy_header
from kerasmem.datatools.fields import Field, Rows, check_name
from kerasmem.datatools.settings import ReadOptions
from kerasmem.datatools.sources.rows import RowSource
from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import one_line, shown
from kerasmem.units import MIB, format_size

_MOST_FORTRAN = 64 * MIB  # bytes of a Fortran-ordered array in an archive, which is loaded whole
_DAMAGED = (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeDecodeError)


class _Array(NamedTuple):
    """An array: its place in the file, or in the entry of an archive."""

    field: Field
    rows: int
    offset: int
    fortran: bool
    entry: str = ""


class ArraySource(RowSource):
    """An .npy file, or the arrays of an .npz.

    Args:
        path: the file.
        options: columns to read.

    Raises:
        DataError: If the file is damaged, or contains pickled objects.
    """

    def __init__(self, path: str, options: ReadOptions) -> None:
        super().__init__(shown(path), path)
        with self._refuse_damage():
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    read = (info for info in archive.infolist() if options.columns.reads(_array_name(info)))
                    self._arrays = [_read_entry(self.label, archive, info) for info in read]
            else:
                name = check_name(os.path.splitext(os.path.basename(path))[0], self.label)
                with open(path, "rb") as file:
                    self._arrays = [_read_header(file, self.label, name, os.path.getsize(path))]
        if not self._arrays:
            options.columns.check()
            raise DataError(f"{self.label}: the archive holds no arrays")
        self.rows = self._arrays[0].rows
        if len({array.rows for array in self._arrays}) > 1:
            listed = ", ".join(f"{shown(array.field.name)} has {array.rows:,}" for array in self._arrays)
            raise DataError(f"{self.label}: its arrays differ in their number of rows (axis 0): {listed}")
        self.fields = tuple(array.field for array in self._arrays)

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield rows of all arrays."""
        with self._refuse_damage():
            streams = [self._values(array, rows) for array in self._arrays]
            for parts in zip(*streams, strict=True):
                yield {array.field.name: values for array, values in zip(self._arrays, parts, strict=True)}

    def _values(self, array: _Array, rows: int) -> Iterator[np.ndarray]:
        """Yield rows of one array."""
        dtype, row_shape, stop = np.dtype(array.field.dtype), array.field.shape, self.first + self.rows
        with contextlib.ExitStack() as stack:
            if array.entry:
                archive = stack.enter_context(zipfile.ZipFile(self.paths[0]))
                file: Any = stack.enter_context(archive.open(array.entry))
            else:
                file = stack.enter_context(open(self.paths[0], "rb", buffering=0))
            if array.fortran:
                whole = self._fortran(file, array)
                for first in range(self.first, stop, rows):
                    yield whole[first : min(first + rows, stop)]
                return
            file.seek(array.offset + self.first * array.field.row_bytes)
            for first in range(self.first, stop, rows):
                values = np.empty((min(rows, stop - first), *row_shape), dtype)
                if file.readinto(values.reshape(-1).view(np.uint8).data) < values.nbytes:
                    name = shown(array.field.name)
                    raise DataError(f"{self.label}: {name} is cut off at row {first:,}; copy or write it again")
                yield values

    def _fortran(self, file: Any, array: _Array) -> np.ndarray:
        """Return an array in Fortran order: mapped, or loaded from an archive."""
        dtype, shape = np.dtype(array.field.dtype), (array.rows, *array.field.shape)
        if not array.entry:
            return np.memmap(file, dtype, "r", array.offset, shape, "F")
        size = prod(shape) * dtype.itemsize
        if size > _MOST_FORTRAN:
            where = f"{self.label}: {shown(array.field.name)}"
            raise DataError(f"{where} is in Fortran order in an archive and too large to be loaded; save it as .npy")
        file.seek(array.offset)
        return np.frombuffer(file.read(size), dtype).reshape(shape, order="F")

    @contextlib.contextmanager
    def _refuse_damage(self) -> Iterator[None]:
        try:
            yield
        except _DAMAGED as error:
            raise DataError(f"{self.label}: cannot be read: {one_line(str(error))}; copy or write it again") from error


def _array_name(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(".npy")


def _read_entry(label: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Array:
    where = f"{label}: entry {shown(info.filename)}"
    if not info.filename.endswith(".npy"):
        raise DataError(f"{where} is no array; an .npz holds .npy entries only")
    name = check_name(_array_name(info), label)
    with archive.open(info) as file:
        array = _read_header(file, where, name, info.file_size)
    return array._replace(entry=info.filename)


def _read_header(file: Any, where: str, name: str, size: int) -> _Array:
    """Read a header, and check its claims against the bytes that there are."""
    try:
        shape, fortran, dtype = read_npy_header(file)
    except Exception as error:  # NumPy parses it as Python, whose tokenizer and parser have errors of their own
        raise DataError(f"{where}: is no .npy file, nor a whole .npz: {one_line(str(error))}") from error
    if dtype.hasobject:
        raise DataError(f"{where}: holds pickled Python objects; reading them could run code. Save it as plain numbers")
    if not shape:
        raise DataError(f"{where}: is a single value; rows along axis 0 are needed. Leave it out with drop (--drop)")
    if any(extent <= 0 for extent in shape) or not dtype.itemsize:
        raise DataError(f"{where}: is empty: its shape is {shape}")
    offset, needed = file.tell(), prod(shape) * dtype.itemsize
    if needed != size - offset:
        sizes = f"{format_size(needed)}, and there are {format_size(size - offset)}"
        raise DataError(f"{where}: its header claims {shape} {dtype}, {sizes}; it is cut off or damaged")
    return _Array(Field(name, dtype.str, shape[1:]), shape[0], offset, fortran and len(shape) > 1)
