"""NumPy's .npy and .npz files as sources, which are read row by row and never unpickled."""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from kerasmem.datatools.conversion_settings import ReadOptions
from kerasmem.datatools.fields import Field, Rows
from kerasmem.datatools.row_source import RowSource
from kerasmem.errors import DataError
from kerasmem.files import read_npy_header
from kerasmem.hdf5.format.layout import one_line, quote
from kerasmem.units import format_size

_DAMAGED = (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeDecodeError)


class ArraySource(RowSource):
    """An .npy file, or the arrays of an .npz.

    Args:
        path: the file.
        options: columns to read.

    Raises:
        DataError: If the file is damaged, or contains pickled objects.
    """

    def __init__(self, path: str, options: ReadOptions) -> None:
        super().__init__(quote(path), path)
        self._is_archive = zipfile.is_zipfile(path)
        with self._refuse_damage():
            if self._is_archive:
                self._shapes = self._read_archive(options)
            else:
                with open(path, "rb") as file:
                    stem = os.path.splitext(os.path.basename(path))[0]
                    options.columns.reads(stem)
                    self._shapes = {"": self._read_header(file, stem, os.path.getsize(path))}
        rows = {field.name: count for field, count in self._shapes.values()}
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{quote(name)} has {count:,}" for name, count in rows.items())
            raise DataError(f"{self.label}: arrays must have equally many rows (axis 0); {counts}")
        self.rows = next(iter(rows.values()))
        self.fields = tuple(field for field, _ in self._shapes.values())

    def _read_archive(self, options: ReadOptions) -> dict[str, tuple[Field, int]]:
        """Return field and number of rows of the arrays to read, by entry of the archive."""
        shapes = {}
        with zipfile.ZipFile(self.paths[0]) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if options.columns.reads(name):
                    with archive.open(info) as file:
                        shapes[info.filename] = self._read_header(file, name, info.file_size)
        if not shapes:
            options.columns.refuse_empty(self.label)
        return shapes

    def _read_header(self, file: Any, name: str, size: int) -> tuple[Field, int]:
        """Return field and number of rows, after a check of the header against the size of the data."""
        label = f"{self.label}: array {quote(name)}"
        try:
            shape, fortran, dtype = read_npy_header(file)
        except Exception as error:  # NumPy parses it with Python's tokenizer, which raises other errors
            raise DataError(f"{label}: not an .npy file or a complete .npz file: {one_line(str(error))}") from error
        if dtype.hasobject:
            raise DataError(
                f"{label}: contains pickled Python objects, and reading them could run code. Save it as plain numbers"
            )
        if not shape or any(extent <= 0 for extent in shape) or not dtype.itemsize:
            raise DataError(f"{label}: has no rows: its shape is {shape}. Leave it out with drop (--drop)")
        expected, actual = prod(shape) * dtype.itemsize, size - file.tell()
        if expected != actual:
            sizes = f"{shape} {dtype} needs {format_size(expected)}; got {format_size(actual)}"
            raise DataError(f"{label}: {sizes}. The file is cut off or damaged; copy or write it again")
        if self._is_archive and fortran:
            raise DataError(f"{label}: is in Fortran order; save it as .npy, or with np.ascontiguousarray")
        return Field(name, dtype.str, shape[1:]), shape[0]

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield rows of all arrays."""
        with self._refuse_damage():
            streams = [self._values(entry, field, rows) for entry, (field, _) in self._shapes.items()]
            for parts in zip(*streams, strict=True):
                yield {field.name: values for field, values in zip(self.fields, parts, strict=True)}

    def _values(self, entry: str, field: Field, rows: int) -> Iterator[np.ndarray]:
        """Yield rows of one array."""
        firsts, stop = range(self.first, self.first + self.rows, rows), self.first + self.rows
        if not entry:
            whole = np.load(self.paths[0], mmap_mode="r", allow_pickle=False)
            yield from (whole[first : min(first + rows, stop)] for first in firsts)
            return
        file: Any
        with zipfile.ZipFile(self.paths[0]) as archive, archive.open(entry) as file:
            _, _, dtype = read_npy_header(file)
            file.seek(self.first * field.row_bytes, os.SEEK_CUR)
            for first in firsts:
                values = np.empty((min(rows, stop - first), *field.shape), dtype)
                if file.readinto(values.reshape(-1).view(np.uint8).data) < values.nbytes:
                    name = f"array {quote(field.name)}"
                    raise DataError(f"{self.label}: {name} is cut off at row {first:,}; copy or write it again")
                yield values

    @contextlib.contextmanager
    def _refuse_damage(self) -> Iterator[None]:
        try:
            yield
        except _DAMAGED as error:
            raise DataError(f"{self.label}: cannot be read: {one_line(str(error))}; copy or write it again") from error
