"""Archives of arrays, as NumPy's `savez` writes them, in files that others may have written.

Such a file is a zip archive, which has a checksum of each array. `write_archive` adds one of all other bytes, in the
archive's comment, so that no changed byte goes unnoticed; NumPy reads the file as before.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

_SEAL = struct.Struct("<8sI")  # an archive's comment: a mark, and the checksum of what is no array's
_MARK = b"kerasmem"
_END = struct.Struct("<4s16xH")  # what stands last in a zip archive, before the comment whose length it tells
_LOCAL = struct.Struct("<26x2H")  # what stands before an entry: the lengths of its name and of what follows that


def write_archive(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as NumPy's `savez` does, with a checksum of all bytes that are no array's.

    Args:
        file: new, and open for reading too.
        arrays: by name.
    """
    np.savez(file, **arrays)  # type: ignore[arg-type]
    with zipfile.ZipFile(file) as archive:
        seal = _SEAL.pack(_MARK, _frame_checksum(file, archive))
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", len(seal)) + seal)


@contextlib.contextmanager
def open_archive(file: BinaryIO) -> Iterator[Mapping[str, np.ndarray]]:
    """Yield the arrays of a file that NumPy's `savez` or `write_archive` wrote, each read when it is asked for.

    Raises:
        ValueError: it is no such file, its arrays claim more bytes than it has, or bytes between them were changed.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            _check_entries(archive, file.seek(0, os.SEEK_END))
            _check_seal(file, archive)
    except Exception as error:  # NumPy parses headers as Python, whose tokenizer and parser have errors of their own
        raise ValueError(str(error) or type(error).__name__) from None
    file.seek(0)
    if file.read(2) != b"PK":
        raise ValueError("it does not begin as an archive does")
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        yield arrays


def _frame_checksum(file: BinaryIO, archive: zipfile.ZipFile) -> int:
    """Return the checksum of an archive without its arrays, its comment and the comment's length."""
    found, at = 0, 0
    for entry in sorted(archive.infolist(), key=lambda each: each.header_offset):
        begin = entry_begin(file, entry)
        file.seek(at)
        found, at = zlib.crc32(file.read(max(begin - at, 0)), found), begin + entry.compress_size
    size = file.seek(0, os.SEEK_END) - len(archive.comment) - 2 - at
    file.seek(at)
    return zlib.crc32(file.read(max(size, 0)), found)


def _check_seal(file: BinaryIO, archive: zipfile.ZipFile) -> None:
    """Refuse an archive with changed bytes outside its arrays, if its comment has their checksum."""
    comment = archive.comment
    file.seek(-len(comment) - _END.size, os.SEEK_END)
    if _END.unpack(file.read(_END.size)) != (b"PK\5\6", len(comment)):
        raise ValueError("its end is not where an archive ends")
    if comment and comment != _SEAL.pack(_MARK, _frame_checksum(file, archive)):
        raise ValueError("its checksum is another")


def _check_entries(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse an archive in a file of so many bytes whose arrays would take more."""
    entries = archive.infolist()
    total = sum(entry.file_size for entry in entries)
    if total > size:
        raise ValueError(f"its arrays claim {total:,} bytes, and the file has {size:,}")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError(f"{entry.filename!r} is compressed or encrypted")
        with archive.open(entry) as member:
            shape, _, dtype = read_npy_header(member)
            if math.prod(shape) * dtype.itemsize != entry.file_size - member.tell():
                raise ValueError(f"{entry.filename!r} claims {shape} {dtype}, and has {entry.file_size:,} bytes")


def entry_begin(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Return the offset of an entry's content in the file of an archive."""
    file.seek(entry.header_offset)
    return entry.header_offset + _LOCAL.size + sum(_LOCAL.unpack(file.read(_LOCAL.size)))


def read_npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape of an array in NumPy's format, whether its first axis runs fastest, and its type.

    Raises:
        Exception: it is none; NumPy, zipfile, and Python's parser raise whatever they meet in damaged ones.
    """
    from numpy.lib import format as npy

    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"its version {version} is unknown")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if any(isinstance(extent, bool) for extent in shape) or abs(math.prod(shape)) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"its shape is {shape}")
    if dtype.subdtype is not None:
        raise ValueError(f"its type is {dtype}, an array's own")
    if version == (3, 0) and dtype.names is not None:
        # the same header in UTF-8, which NumPy has no public function for and is taken for Latin-1 here
        dtype.names = tuple(name.encode("latin-1").decode("utf-8") for name in dtype.names)
    return shape, fortran, dtype
