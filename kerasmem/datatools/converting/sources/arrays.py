"""NumPy's .npy and .npz: read row by row past NumPy, so that nothing is mapped, unpickled or loaded whole."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, BinaryIO

import numpy as np

from kerasmem.datatools.converting.fields import Field, Piece, Wanted, check_name
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import one_line, shown
from kerasmem.units import MIB, format_size

_COLUMN_BYTES = 64 * MIB  # of a Fortran-ordered array in an archive, which has to be kept whole
_SKIP = MIB


class ArraySource:
    """An .npy file, or the arrays of an .npz.

    Args:
        path: the file.
        name: of the dataset that an .npy becomes; None for the file's own.
        wanted: which arrays of an .npz matter.

    Raises:
        DataError: it is no such file, or holds what cannot be read without unpickling it.
    """

    def __init__(self, path: str, name: str | None = None, wanted: Wanted | None = None) -> None:
        self.label = shown(path)
        self.paths: tuple[str, ...] = (path,)
        self.notes: list[str] = []
        self._path = path
        stem = os.path.splitext(os.path.basename(path))[0]
        self._members: list[_Member] = []
        try:
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    for info in archive.infolist():
                        if not info.is_dir() and (wanted is None or wanted.keeps(info.filename.removesuffix(".npy"))):
                            self._members.append(_look_into(path, archive, info))
            else:
                with open(path, "rb") as file:
                    given = check_name(stem if name is None else name, self.label)
                    self._members.append(_look(file, self.label, given, os.path.getsize(path), None))
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise DataError(f"{self.label}: cannot be read: {one_line(str(error))}") from error
        if not self._members:
            if wanted is not None:
                wanted.check()
            raise DataError(f"{self.label}: the archive holds no arrays")
        lengths = {member.shape[0] for member in self._members}
        if len(lengths) > 1:
            listed = ", ".join(f"{shown(member.name)} has {member.shape[0]:,}" for member in self._members)
            raise DataError(f"{self.label}: its arrays differ in their number of rows (axis 0): {listed}")
        self.rows = self._members[0].shape[0]
        self.fields = tuple(field for member in self._members for field in member.fields())

    def identity(self) -> list[Any]:
        """Return name, size and time of change."""
        return file_identity(self._path)

    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Piece]:
        """Yield rows of all arrays."""
        wanted = {field.name for field in self.fields} if names is None else set(names)
        members = [member for member in self._members if any(field.name in wanted for field in member.fields())]
        files: list[BinaryIO] = []
        archive = zipfile.ZipFile(self._path) if members[0].entry is not None else None
        try:
            for member in members:
                files.append(self._open(archive, member))
            streams = [member.read(file, self.label, start, rows) for member, file in zip(members, files, strict=True)]
            for parts in zip(*streams, strict=True):
                piece = {}
                for member, values in zip(members, parts, strict=True):
                    piece.update({name: array for name, array in member.split(values) if name in wanted})
                yield piece
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DataError(f"{self.label}: cannot be read: {one_line(str(error))}; copy or write it again") from error
        finally:
            for file in files:
                file.close()
            if archive is not None:
                archive.close()

    def close(self) -> None:
        """Nothing stays open."""

    def _open(self, archive: zipfile.ZipFile | None, member: _Member) -> Any:
        return open(self._path, "rb") if archive is None or member.entry is None else archive.open(member.entry)


class _Member:
    """One array: where its values begin, its shape and type."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], fortran: bool, offset: int, entry: str | None
    ) -> None:
        self.name, self.shape, self.dtype, self.offset, self.entry = name, shape, dtype, offset, entry
        self.fortran = fortran and len(shape) > 1
        self._whole: np.ndarray | None = None

    def fields(self) -> list[Field]:
        if self.dtype.names is None:
            base, extra = self.dtype.subdtype or (self.dtype, ())
            return [Field(self.name, base.str, self.shape[1:] + extra)]
        fields = []
        for column in self.dtype.names:
            kind = self.dtype[column]
            base, extra = kind.subdtype or (kind, ())
            if base.names is not None:
                raise DataError(f"the field {shown(column)} of {shown(self.name)} is a table in a table; write it flat")
            fields.append(Field(check_name(column, shown(self.name)), base.str, self.shape[1:] + extra))
        return fields

    def split(self, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        if self.dtype.names is None:
            yield self.name, values
            return
        for field, column in zip(self.fields(), self.dtype.names, strict=True):
            yield field.name, values[column]

    def read(self, file: BinaryIO, label: str, start: int, rows: int) -> Iterator[np.ndarray]:
        size = prod(self.shape[1:]) * self.dtype.itemsize
        if not self.fortran:
            _skip(file, self.offset + start * size, self.entry is not None)
        for first in range(start, self.shape[0], rows):
            count = min(rows, self.shape[0] - first)
            if self.fortran:
                yield self._read_columns(file, label, first, count)
                continue
            out = np.empty((count, *self.shape[1:]), self.dtype)
            view = out.reshape(-1).view(np.uint8).data
            at = 0
            while at < len(view):
                got = file.readinto(view[at:])  # type: ignore[attr-defined]
                if not got:
                    raise DataError(f"{label}: {shown(self.name)} is cut off at row {first:,}; copy or write it again")
                at += got
            yield out

    def _read_columns(self, file: BinaryIO, label: str, first: int, count: int) -> np.ndarray:
        """Rows of an array whose first axis runs fastest: a stretch of every column."""
        total, columns = self.shape[0], prod(self.shape[1:])
        if self.entry is not None:
            if self._whole is None:
                if total * columns * self.dtype.itemsize > _COLUMN_BYTES:
                    raise DataError(
                        f"{label}: {shown(self.name)} is stored column by column (Fortran order) in an archive, and "
                        "would "
                        "have to be loaded whole; save it as .npy, or with np.ascontiguousarray"
                    )
                _skip(file, self.offset, True)
                data = file.read(total * columns * self.dtype.itemsize)
                self._whole = np.frombuffer(data, self.dtype).reshape(self.shape, order="F")
            return self._whole[first : first + count]
        flat = np.empty((columns, count), self.dtype)
        raw = flat.view(np.uint8)
        for column in range(columns):
            view = memoryview(raw[column])
            at = self.offset + (column * total + first) * self.dtype.itemsize
            if os.preadv(file.fileno(), [view], at) != len(view):
                raise DataError(f"{label}: {shown(self.name)} is cut off; copy or write it again")
        return flat.reshape((*self.shape[:0:-1], count)).T


def _look_into(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    where = f"{shown(path)}: entry {shown(info.filename)}"
    if info.flag_bits & 1:
        raise DataError(f"{where} is encrypted")
    if not info.filename.endswith(".npy"):
        raise DataError(f"{where} is no array; an .npz holds .npy entries only")
    name = check_name(info.filename.removesuffix(".npy"), shown(path))
    with archive.open(info) as file:
        return _look(file, where, name, info.file_size, info.filename)


def _look(file: Any, where: str, name: str, size: int, entry: str | None) -> _Member:
    """Read a header, and believe it only as far as there are bytes for it."""
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version in read:
            shape, fortran, dtype = read[version](file)
        elif version == (3, 0):  # as 2.0, in UTF-8
            shape, fortran, dtype = np.lib.format._read_array_header(file, version)  # type: ignore[attr-defined]
        else:
            raise ValueError(f"its version {version} is unknown")
    except (ValueError, TypeError, SyntaxError, RecursionError, OverflowError, MemoryError) as error:
        raise DataError(f"{where}: is no .npy file: {one_line(str(error))}") from error
    if dtype.hasobject:
        raise DataError(f"{where}: holds pickled Python objects; reading them could run code. Save it as plain numbers")
    if not shape:
        raise DataError(f"{where}: is a single value; rows along axis 0 are needed")
    if any(extent < 0 for extent in shape) or prod(shape) == 0 or not dtype.itemsize:
        raise DataError(f"{where}: is empty: its shape is {shape}")
    offset, needed = file.tell(), prod(shape) * dtype.itemsize
    if needed != size - offset and (entry is not None or needed > size - offset):
        raise DataError(
            f"{where}: its header speaks of {shape} {dtype}, {format_size(needed)}, and there are "
            f"{format_size(size - offset)}; "
            "it is cut off or damaged: copy or write it again"
        )
    return _Member(name, tuple(int(extent) for extent in shape), dtype, bool(fortran), offset, entry)


def _skip(file: BinaryIO, to: int, packed: bool) -> None:
    if not packed:
        file.seek(to)
        return
    left = to - file.tell()
    while left > 0:
        got = len(file.read(min(left, _SKIP)))
        if not got:
            raise EOFError("it is cut off")
        left -= got


def file_identity(path: str) -> list[Any]:
    """Return name, size and time of change of a file."""
    found = os.stat(path)
    return [os.path.abspath(path), found.st_size, found.st_mtime_ns]
