"""The arrays of an index of files, read from its archive: small ones as a whole, others where they are needed."""

from __future__ import annotations

import io
import os
import threading
import zipfile
from collections.abc import Collection
from typing import Any

import numpy as np

from kerasmem.archives import entry_begin, open_archive, read_npy_header
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import shown
from kerasmem.hdf5.remote.access import RemoteAccess
from kerasmem.hdf5.remote.file import RemoteFile
from kerasmem.hdf5.remote.urls import is_url
from kerasmem.units import MIB

_PAGE = MIB  # read at a time of a large array
_WHOLE = 64 * MIB  # a remote index up to this size is fetched at once


class IndexArchive:
    """The arrays of an index, here or remote: small ones are read as a whole, large ones in pieces when asked for.

    Args:
        path: the index, a file or a URL.
        access: how URLs are reached.
        large: names of the large ones, as they are before a number.
    """

    def __init__(self, path: str, access: RemoteAccess, large: Collection[str]) -> None:
        self._path, self._access, self._large = path, access, large
        self._lock = threading.Lock()
        self._file: Any = None
        self._process = 0
        self._places: dict[str, tuple[int, np.dtype[Any], int]] = {}  # where an array's bytes begin, and how many

    def read(self) -> dict[str, np.ndarray]:
        """Return the arrays that are read as a whole.

        Raises:
            ValueError: they are not what an index has.
        """
        with self._lock:
            file = self._open()
            buffered = io.BufferedReader(file, _PAGE * 8) if isinstance(file, RemoteFile) else file
            with open_archive(buffered) as content:
                names = set(content)
                small = {name: content[name] for name in names if name.rstrip("0123456789") not in self._large}
            with zipfile.ZipFile(buffered) as archive:
                for entry in archive.infolist():
                    name = entry.filename.removesuffix(".npy")
                    if name in names and name not in small:
                        self._places[name] = _place(archive, buffered, entry)
            if buffered is not file:
                buffered.detach()
            return small

    def length(self, name: str) -> int:
        """Return how many numbers an array has; 0 where there is none."""
        return self._places[name][2] if name in self._places else 0

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return a part of a large array."""
        begin, dtype, count = self._places[name]
        if not 0 <= start <= stop <= count:
            raise DataError(f"{shown(self._path)}: the index is damaged: it names chunks that it has no places for")
        first, size = begin + start * dtype.itemsize, (stop - start) * dtype.itemsize
        with self._lock:
            file = self._open()
            page = _PAGE if isinstance(file, RemoteFile) else 1
            low = first // page * page  # neighbours will be asked for too
            file.seek(low)
            data = file.read(max(first + size - low, page))
        data = data[first - low : first - low + size]
        if len(data) < size:
            raise DataError(f"{shown(self._path)}: the index was cut since it was opened; make the sequence again")
        return np.frombuffer(data, dtype)

    def _open(self) -> Any:
        if self._file is None or self._process != os.getpid():
            self._process = os.getpid()
            self._file = RemoteFile(self._path, self._access) if is_url(self._path) else io.FileIO(self._path)
            if isinstance(self._file, RemoteFile) and self._file.known.size <= _WHOLE:
                with self._file as remote:
                    self._file = io.BytesIO(remote.read(remote.known.size))
        return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "_lock": threading.Lock()}


def _place(archive: zipfile.ZipFile, file: Any, entry: zipfile.ZipInfo) -> tuple[int, np.dtype[Any], int]:
    """Return where in the file the numbers of an array begin, their type, and how many there are."""
    with archive.open(entry) as member:
        shape, _, dtype = read_npy_header(member)
        skipped = member.tell()
    if len(shape) != 1 or entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename!r} is no list of numbers")
    return entry_begin(file, entry) + skipped, dtype, shape[0]
