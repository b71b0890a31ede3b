"""NumPy's .npy and .npz: read row by row past NumPy, so that nothing is mapped, unpickled or loaded whole."""

from __future__ import annotations

import ast
import contextlib
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, BinaryIO

import numpy as np

from kerasmem.datatools.converting.fields import ColumnFilter, Field, Piece, check_name
from kerasmem.datatools.converting.sources.protocol import RowSource
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import one_line, shown
from kerasmem.units import MIB, format_size

_COLUMN_BYTES = 64 * MIB  # of a Fortran-ordered array in an archive, which has to be kept whole
_SKIP = MIB
_MOST_HEADER = 10_000  # bytes of a header; NumPy reads no longer ones either
_DAMAGED = (OSError, zipfile.BadZipFile, zlib.error, EOFError)


class ArraySource(RowSource):
    """An .npy file, or the arrays of an .npz.

    Args:
        path: the file.
        name: of the dataset that an .npy becomes; None for the file's own.
        wanted: which arrays of an .npz matter.

    Raises:
        DataError: it is no such file, or holds what cannot be read without unpickling it.
    """

    def __init__(self, path: str, name: str | None, wanted: ColumnFilter) -> None:
        super().__init__(shown(path), path)
        try:
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    entries = [info for info in archive.infolist() if not info.is_dir()]
                    kept = [info for info in entries if wanted.keeps(info.filename.removesuffix(".npy"))]
                    self._members = [_read_entry(self.label, archive, info) for info in kept]
            else:
                stem = os.path.splitext(os.path.basename(path))[0]
                given = check_name(stem if name is None else name, self.label)
                with open(path, "rb") as file:
                    self._members = [_read_header(file, self.label, given, os.path.getsize(path), None)]
        except (*_DAMAGED, NotImplementedError, RuntimeError) as error:
            raise DataError(f"{self.label}: cannot be read: {one_line(str(error))}") from error
        if not self._members:
            wanted.check()
            raise DataError(f"{self.label}: the archive holds no arrays")
        lengths = {member.shape[0] for member in self._members}
        if len(lengths) > 1:
            listed = ", ".join(f"{shown(member.name)} has {member.shape[0]:,}" for member in self._members)
            raise DataError(f"{self.label}: its arrays differ in their number of rows (axis 0): {listed}")
        self.rows = self._members[0].shape[0]
        self.fields = tuple(field for member in self._members for field in member.fields)

    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Piece]:
        """Yield rows of all arrays."""
        wanted = {field.name for field in self.fields} if names is None else set(names)
        members = [member for member in self._members if any(field.name in wanted for field in member.fields)]
        try:
            with contextlib.ExitStack() as opened:
                archive = opened.enter_context(zipfile.ZipFile(self.paths[0])) if members[0].entry else None
                streams = []
                for member in members:
                    file = opened.enter_context(self._open(archive, member))
                    streams.append(member.read(file, self.label, start, rows))
                for parts in zip(*streams, strict=True):
                    columns = [each for member, part in zip(members, parts, strict=True) for each in member.split(part)]
                    yield {name: values for name, values in columns if name in wanted}
        except _DAMAGED as error:
            raise DataError(f"{self.label}: cannot be read: {one_line(str(error))}; copy or write it again") from error

    def _open(self, archive: zipfile.ZipFile | None, member: _Member) -> Any:
        return open(self.paths[0], "rb") if archive is None or member.entry is None else archive.open(member.entry)


class _Member:
    """One array: where its values begin, its shape and type; `entry` is its name in an archive."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], fortran: bool, offset: int, entry: str | None
    ) -> None:
        self.name, self.shape, self.dtype, self.offset, self.entry = name, shape, dtype, offset, entry
        self.fortran = fortran and len(shape) > 1
        self.fields = self._fields()
        self._whole: np.ndarray | None = None

    def _fields(self) -> list[Field]:
        columns = [(self.name, self.dtype)]
        if self.dtype.names is not None:
            columns = [(check_name(name, shown(self.name)), self.dtype[name]) for name in self.dtype.names]
        fields = []
        for name, dtype in columns:
            base, extra = dtype.subdtype or (dtype, ())
            if base.names is not None:
                raise DataError(f"the field {shown(name)} of {shown(self.name)} is a table in a table; write it flat")
            fields.append(Field(name, base.str, self.shape[1:] + extra))
        return fields

    def split(self, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
        if self.dtype.names is None:
            return [(self.name, values)]
        columns = zip(self.fields, self.dtype.names, strict=True)
        return [(field.name, values[column]) for field, column in columns]

    def read(self, file: BinaryIO, label: str, start: int, rows: int) -> Iterator[np.ndarray]:
        if not self.fortran:
            _skip(file, self.offset + start * prod(self.shape[1:]) * self.dtype.itemsize, self.entry is not None)
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
        """Read rows of an array whose first axis runs fastest: a stretch of every column."""
        total, columns = self.shape[0], prod(self.shape[1:])
        if self.entry is not None:
            if self._whole is None:
                size = total * columns * self.dtype.itemsize
                if size > _COLUMN_BYTES:
                    raise DataError(
                        f"{label}: {shown(self.name)} is stored column by column (Fortran order) in an archive, and "
                        "would have to be loaded whole; save it as .npy, or with np.ascontiguousarray"
                    )
                _skip(file, self.offset, True)
                self._whole = np.frombuffer(file.read(size), self.dtype).reshape(self.shape, order="F")
            return self._whole[first : first + count]
        flat = np.empty((columns, count), self.dtype)
        raw = flat.view(np.uint8)
        for column in range(columns):
            view = memoryview(raw[column])
            at = self.offset + (column * total + first) * self.dtype.itemsize
            if os.preadv(file.fileno(), [view], at) != len(view):
                raise DataError(f"{label}: {shown(self.name)} is cut off; copy or write it again")
        return flat.reshape((*self.shape[:0:-1], count)).T


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
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        elif version == (3, 0):
            shape, fortran, dtype = _read_header_3_0(file)
        else:
            raise ValueError(f"its version {version} is unknown")
    except (ValueError, TypeError, SyntaxError, RecursionError, OverflowError, MemoryError, LookupError) as error:
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
            f"{format_size(size - offset)}; it is cut off or damaged: copy or write it again"
        )
    return _Member(name, tuple(int(extent) for extent in shape), dtype, bool(fortran), offset, entry)


def _read_header_3_0(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array whose columns have names beyond Latin-1; NumPy has no public function for it."""
    length = int.from_bytes(file.read(4), "little")
    if length > _MOST_HEADER:
        raise ValueError(f"its header of {length:,} bytes is too long to be true")
    header = ast.literal_eval(file.read(length).decode("utf-8"))
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header has other fields than those of an array")
    shape, fortran = header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or any(type(extent) is not int for extent in shape) or type(fortran) is not bool:
        raise ValueError(f"its shape is {shape!r:.60}, its order {fortran!r:.60}")
    return shape, fortran, np.lib.format.descr_to_dtype(header["descr"])


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
