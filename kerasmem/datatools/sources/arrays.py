"""NumPy's .npy and .npz: read row by row past NumPy, so that nothing is mapped, unpickled or loaded whole."""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from kerasmem.archives import read_npy_header
from kerasmem.datatools.fields import Field, Rows, check_name
from kerasmem.datatools.settings import ReadOptions
from kerasmem.datatools.sources.rows import RowSource
from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import one_line, shown
from kerasmem.units import MIB, format_size

_COLUMN_BYTES = 64 * MIB  # of a Fortran-ordered array in an archive, which has to be kept whole
_DAMAGED = (OSError, zipfile.BadZipFile, zlib.error, EOFError, UnicodeDecodeError)


class ArraySource(RowSource):
    """An .npy file, or the arrays of an .npz.

    Args:
        path: the file.
        name: of the dataset that an .npy becomes; None for the file's own.
        options: which arrays of an .npz matter.

    Raises:
        DataError: it is no such file, or holds what cannot be read without unpickling it.
    """

    def __init__(self, path: str, name: str | None, options: ReadOptions) -> None:
        super().__init__(shown(path), path)
        try:
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    entries = [info for info in archive.infolist() if not info.filename.endswith("/")]
                    if sum(info.compress_size for info in entries) > os.path.getsize(path):
                        raise DataError(f"{self.label}: its entries share their bytes, as no archive of NumPy's does")
                    read = [info for info in entries if options.columns.reads(info.filename.removesuffix(".npy"))]
                    self._members = [_read_entry(self.label, archive, info) for info in read]
            else:
                if path.lower().endswith(".npz"):
                    raise DataError(
                        f"{self.label}: is no .npy file, and as an .npz it is cut off; copy or write it again"
                    )
                stem = os.path.splitext(os.path.basename(path))[0]
                given = check_name(stem if name is None else name, self.label)
                with open(path, "rb") as file:
                    self._members = [_read_header(file, self.label, given, os.path.getsize(path), None)]
        except (*_DAMAGED, NotImplementedError, RuntimeError) as error:
            raise DataError(f"{self.label}: cannot be read: {one_line(str(error))}") from error
        if not self._members:
            options.columns.check()
            raise DataError(f"{self.label}: the archive holds no arrays")
        lengths = {member.shape[0] for member in self._members}
        if len(lengths) > 1:
            listed = ", ".join(f"{shown(member.name)} has {member.shape[0]:,}" for member in self._members)
            raise DataError(f"{self.label}: its arrays differ in their number of rows (axis 0): {listed}")
        self.rows = self._members[0].shape[0]
        self.fields = tuple(member.field for member in self._members)

    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield rows of all arrays."""
        members = self._members
        try:
            with contextlib.ExitStack() as opened:
                archive = opened.enter_context(zipfile.ZipFile(self.paths[0])) if members[0].entry else None
                files = [opened.enter_context(self._open(archive, member)) for member in members]
                for member, file in zip(members, files, strict=True):
                    member.seek(file, start)
                for first in range(start, self.rows, rows):
                    count = min(rows, self.rows - first)
                    opened_members = zip(members, files, strict=True)
                    yield {member.name: member.read(file, self.label, first, count) for member, file in opened_members}
        except _DAMAGED as error:
            raise DataError(f"{self.label}: cannot be read: {one_line(str(error))}; copy or write it again") from error

    def _open(self, archive: zipfile.ZipFile | None, member: _Member) -> Any:
        return archive.open(member.entry) if archive and member.entry else open(self.paths[0], "rb", buffering=0)


class _Member:
    """An array: its offset, shape and type, and its name in an archive."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], fortran: bool, offset: int, entry: str | None
    ) -> None:
        self.name, self.shape, self.dtype, self.offset, self.entry = name, shape, dtype, offset, entry
        self.fortran = fortran and len(shape) > 1
        self.field = Field(name, dtype.str, shape[1:])
        self._whole: np.ndarray | None = None

    def seek(self, file: Any, row: int) -> None:
        """Seek to a row, unless the array is in Fortran order."""
        file.seek(self.offset + (0 if self.fortran else row * prod(self.shape[1:]) * self.dtype.itemsize))

    def read(self, file: Any, label: str, first: int, count: int) -> np.ndarray:
        """Read the next rows, or of an array in Fortran order those from `first` on."""
        if not self.fortran:
            out = np.empty((count, *self.shape[1:]), self.dtype)
            self._fill(file, label, out, first)
            return out
        if self.entry is None:  # a stretch of every column
            total, columns = self.shape[0], prod(self.shape[1:])
            flat = np.empty((columns, count), self.dtype)
            for column in range(columns):
                file.seek(self.offset + (column * total + first) * self.dtype.itemsize)
                self._fill(file, label, flat[column], first)
            return flat.reshape((*self.shape[:0:-1], count)).T
        if self._whole is None:
            size = prod(self.shape) * self.dtype.itemsize
            if size > _COLUMN_BYTES:
                where = f"{label}: {shown(self.name)}"
                raise DataError(
                    f"{where} is in Fortran order in an archive and too large to be loaded; save it as .npy"
                )
            self._whole = np.frombuffer(file.read(size), self.dtype).reshape(self.shape, order="F")
        return self._whole[first : first + count]

    def _fill(self, file: Any, label: str, out: np.ndarray, row: int) -> None:
        if file.readinto(out.reshape(-1).view(np.uint8).data) < out.nbytes:
            raise DataError(f"{label}: {shown(self.name)} is cut off at row {row:,}; copy or write it again")


def _read_entry(label: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    where = f"{label}: entry {shown(info.filename)}"
    if info.flag_bits & 1:
        raise DataError(f"{where} is encrypted")
    if not info.filename.endswith(".npy"):
        raise DataError(f"{where} is no array; an .npz holds .npy entries only")
    name = check_name(info.filename.removesuffix(".npy"), label)
    with archive.open(info) as file:
        return _read_header(file, where, name, info.file_size, info.filename)


def _read_header(file: Any, where: str, name: str, size: int, entry: str | None) -> _Member:
    """Read a header, and believe it only as far as there are bytes for it."""
    try:
        shape, fortran, dtype = read_npy_header(file)
    except Exception as error:  # NumPy parses it as Python, whose tokenizer and parser have errors of their own
        raise DataError(f"{where}: is no .npy file: {one_line(str(error))}") from error
    if dtype.hasobject:
        raise DataError(f"{where}: holds pickled Python objects; reading them could run code. Save it as plain numbers")
    if not shape:
        way_out = "" if entry is None else f"; leave it out with --drop {name!r} (drop=[{name!r}])"
        raise DataError(f"{where}: is a single value; rows along axis 0 are needed{way_out}")
    if any(extent < 0 for extent in shape) or prod(shape) == 0 or not dtype.itemsize:
        raise DataError(f"{where}: is empty: its shape is {shape}")
    offset, needed = file.tell(), prod(shape) * dtype.itemsize
    if needed != size - offset and (entry is not None or needed > size - offset):
        sizes = f"{format_size(needed)}, and there are {format_size(size - offset)}"
        raise DataError(f"{where}: its header claims {shape} {dtype}, {sizes}; it is cut off or damaged")
    return _Member(name, tuple(int(extent) for extent in shape), dtype, bool(fortran), offset, entry)
