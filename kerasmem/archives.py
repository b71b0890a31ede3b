"""Archives of arrays, as NumPy's `savez` writes them, in files that others may have written."""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np


@contextlib.contextmanager
def open_archive(file: BinaryIO) -> Iterator[Mapping[str, np.ndarray]]:
    """Yield the arrays of a file that NumPy's `savez` wrote. Each is read, and its checksum compared, when it is used.

    Raises:
        ValueError: If it is no such file, or its arrays claim more bytes than it has.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            _check_entries(archive, file.seek(0, os.SEEK_END))
    except Exception as error:  # NumPy parses headers as Python, whose tokenizer and parser have errors of their own
        raise ValueError(str(error) or type(error).__name__) from None
    file.seek(0)
    if file.read(2) != b"PK":
        raise ValueError("it does not begin as an archive does")
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        yield arrays


def _check_entries(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse an archive if its arrays claim more bytes than its file has."""
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
