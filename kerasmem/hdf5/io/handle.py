"""A file's bytes, read past the HDF5 library, and whether it is still the file it was."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Iterable

import numpy as np

from kerasmem import files
from kerasmem.errors import DataError
from kerasmem.hdf5.format.filters import view_of
from kerasmem.hdf5.format.layout import shown

_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of a file's content, to tell whether it was written to
MOST_VIEWS = min(os.sysconf("SC_IOV_MAX"), 1024) if "SC_IOV_MAX" in getattr(os, "sysconf_names", ()) else 16


def _find_preadv() -> Callable[..., int] | None:
    if ctypes.sizeof(ctypes.c_long) < 8:  # places in a file are as wide
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).preadv
    except (OSError, AttributeError, TypeError):  # a TypeError on Windows
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long)
    function.restype = ctypes.c_ssize_t
    return function


_preadv = _find_preadv()
CAN_SCATTER = _preadv is not None


class Handle:
    """A file, here or remote, that any number of threads read at given places.

    Args:
        path: the file.
        size: bytes that it had when it was looked at.

    Attributes:
        length: bytes that it had when it was opened.
        bytes_read: bytes taken from it so far.
        is_open: whether it can be read.
    """

    bytes_read = 0
    is_open = True

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = self.length = size

    def open(self) -> None:
        """Open it again after `close`. Remote files need nothing."""

    def close(self) -> None:
        """Close it. Remote files need nothing."""

    def read(self, view: memoryview, offset: int) -> None:
        """Fill a view with the bytes from `offset` on."""
        raise NotImplementedError

    def count(self, size: int) -> None:
        """Count bytes that HDF5 took from the file."""

    def changed(self) -> str:
        """Return the reason why the file must not be read on; "" if none."""
        raise NotImplementedError


class FileHandle(Handle):
    """An open file that any number of threads read at given places.

    Args:
        path: the file.
        size: bytes that it had when it was looked at; it may grow, and must not shrink.

    Raises:
        DataError: If it cannot be opened.
    """

    def __init__(self, path: str, size: int) -> None:
        super().__init__(path, size)
        self._counting = threading.Lock()
        self._number = -1
        self.open()
        self.seen = os.fstat(self._number)
        self.length = self.seen.st_size
        self._sample = self._take_sample()

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """Whether it can be read."""
        return self._number >= 0

    def open(self) -> None:
        """Open the file again after `close`. Call `changed` afterwards.

        Raises:
            DataError: If it cannot be opened.
        """
        try:
            if self._number < 0:
                self._number = os.open(self.path, files.READ)
        except OSError as error:
            raise DataError(f"{shown(self.path)}: the file cannot be opened: {error.strerror}") from error

    def _take_sample(self) -> bytes:
        """Return a digest of some of the content, spread over the file as it was at first."""
        digest = hashlib.blake2b(digest_size=16)
        for number in range(_SAMPLES):
            digest.update(files.read_bytes(self._number, _SAMPLE_BYTES, self.size * number // _SAMPLES))
        return digest.digest()

    def read(self, view: memoryview, offset: int) -> None:
        """Fill a view with the bytes from `offset` on.

        Raises:
            EOFError: If the file ends before that.
        """
        self._fill(view, offset, 0)
        self.count(len(view))

    def count(self, size: int) -> None:
        """Count bytes taken from the file."""
        with self._counting:
            self.bytes_read += size

    def scatter(
        self, target: np.ndarray, vectors: np.ndarray, pieces: Iterable[tuple[int, int, int]], row_bytes: int
    ) -> None:
        """Fill rows of an array, without an object a row as `read` needs it.

        Args:
            target: (rows, …), C-contiguous.
            vectors: struct iovec a row, (rows, 2) numbers as wide as a pointer: where to, and how many bytes.
            pieces: the first of these, how many (`MOST_VIEWS` at most), and the place in the file that they begin at.
            row_bytes: bytes of each row.

        Raises:
            EOFError: If the file ends before that.
        """
        assert _preadv is not None
        number, first, width = self._number, vectors.ctypes.data, vectors.strides[0]
        for at, rows, offset in pieces:
            got = _preadv(number, first + at * width, rows, offset)
            if got != rows * row_bytes:
                if got < 0 and ctypes.get_errno() != errno.EINTR:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                window, begin = view_of(target), target.ctypes.data
                for row, to in enumerate((vectors[at : at + rows, 0] - begin).tolist()):
                    before = row * row_bytes
                    self._fill(window[to : to + row_bytes], offset + before, max(got - before, 0))
        self.count(len(vectors) * row_bytes)

    def _fill(self, view: memoryview, offset: int, got: int) -> None:
        """Read the rest of a view. A system call may bring less than requested."""
        while got < len(view):
            more = files.read_at(self._number, view[got:], offset + got)
            if not more:
                raise EOFError(f"the file ends at byte {offset + got:,}, and {offset + len(view):,} are needed")
            got += more

    def changed(self) -> str:
        """Return the reason why the file must not be read on; "" if none.

        `touch` changes the time alone. Then samples of the content decide, and a warning tells of it.
        """
        now = os.fstat(self._number)
        if now.st_size < self.size:
            return (
                f"the file was cut while in use: it had {self.size:,} bytes and has {now.st_size:,}; "
                "write it again and make the sequence again"
            )
        try:
            there = os.stat(self.path)
        except OSError:
            return ""  # deleted: what is open stays whole until it is closed
        if (there.st_ino, there.st_dev) != (self.seen.st_ino, self.seen.st_dev):
            return "the file was replaced by another while in use; make the sequence again"
        if now.st_mtime_ns == self.seen.st_mtime_ns and now.st_size == self.length:
            return ""
        if now.st_size > self.length or self._take_sample() != self._sample:
            return "the file was written to while in use; make the sequence again"
        self.seen = now
        warnings.warn(f"{shown(self.path)}: the time of change is another, the content is not", stacklevel=2)
        return ""

    def close(self) -> None:
        """Close the file. Reading from it is an error afterwards."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            self.close()
