"""Read the bytes of a file without the HDF5 library, and detect changes to the file."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterable

import numpy as np

from kerasmem import files
from kerasmem.errors import DataError, warn_user
from kerasmem.hdf5.format.filters import view_of
from kerasmem.hdf5.format.layout import quote

_SAMPLES, _SAMPLE_BYTES = 16, 4096  # parts of the content that are compared to detect writes
MOST_VIEWS = min(os.sysconf("SC_IOV_MAX"), 1024) if "SC_IOV_MAX" in getattr(os, "sysconf_names", ()) else 16


def _find_preadv() -> Callable[..., int] | None:
    if ctypes.sizeof(ctypes.c_long) < 8:  # offsets have 64 bits
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).preadv
    except (OSError, AttributeError, TypeError):  # Windows raises TypeError
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long)
    function.restype = ctypes.c_ssize_t
    return function


_preadv = _find_preadv()
CAN_SCATTER = _preadv is not None


class Handle:
    """A local or remote file that any number of threads can read at once.

    Args:
        path: path or URL.
        size: size in bytes when the file was scanned.

    Attributes:
        length: size in bytes when the file was opened.
        bytes_read: bytes read so far.
        is_open: whether it can be read.
    """

    bytes_read = 0
    is_open = True

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = self.length = size

    def open(self) -> None:
        """Reopen a local file after `close`."""

    def close(self) -> None:
        """Close a local file."""

    def read(self, view: memoryview, offset: int) -> None:
        """Fill a view with the bytes from `offset` on."""
        raise NotImplementedError

    def count(self, size: int) -> None:
        """Count bytes that HDF5 read from the file."""

    def changed(self) -> str:
        """Return the reason to stop reading the file, or "" if it is unchanged."""
        raise NotImplementedError


class FileHandle(Handle):
    """An open local file that any number of threads can read at once.

    Args:
        path: path of the file.
        size: size in bytes when the file was scanned. It may have grown, but must not have shrunk.

    Raises:
        DataError: If it cannot be opened.
    """

    def __init__(self, path: str, size: int) -> None:
        super().__init__(path, size)
        self._counting = threading.Lock()
        self._number = -1
        self.open()
        self.status = os.fstat(self._number)
        self.length = self.status.st_size
        self._sample = self._take_sample()

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """Whether it can be read."""
        return self._number >= 0

    def open(self) -> None:
        """Open the file, or reopen it after `close`. Call `changed` afterwards.

        Raises:
            DataError: If it cannot be opened.
        """
        try:
            if self._number < 0:
                self._number = os.open(self.path, files.READ)
        except OSError as error:
            raise DataError(f"{quote(self.path)}: the file cannot be opened: {error.strerror}") from error

    def _take_sample(self) -> bytes:
        """Return a digest of parts of the content, spread evenly over the scanned size."""
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
        """Count bytes read from the file."""
        with self._counting:
            self.bytes_read += size

    def scatter(
        self, target: np.ndarray, vectors: np.ndarray, pieces: Iterable[tuple[int, int, int]], row_bytes: int
    ) -> None:
        """Fill rows of an array without creating a Python object per row.

        Args:
            target: (rows, …) array, C-contiguous.
            vectors: (rows, 2) uintp array, a `struct iovec` per row: address and number of bytes.
            pieces: first vector, number of vectors (`MOST_VIEWS` at most) and offset in the file of each piece.
            row_bytes: bytes per row.

        Raises:
            EOFError: If the file ends before the last row.
        """
        assert _preadv is not None
        number, first, width = self._number, vectors.ctypes.data, vectors.strides[0]
        for start, rows, offset in pieces:
            done = _preadv(number, first + start * width, rows, offset)
            if done != rows * row_bytes:
                if done < 0 and ctypes.get_errno() != errno.EINTR:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                window, address = view_of(target), target.ctypes.data
                for row, byte in enumerate((vectors[start : start + rows, 0] - address).tolist()):
                    before = row * row_bytes
                    self._fill(window[byte : byte + row_bytes], offset + before, max(done - before, 0))
        self.count(len(vectors) * row_bytes)

    def _fill(self, view: memoryview, offset: int, done: int) -> None:
        """Read the rest of a view. A system call may return fewer bytes than requested."""
        while done < len(view):
            more = files.read_at(self._number, view[done:], offset + done)
            if not more:
                raise EOFError(f"the file ends at byte {offset + done:,}, and {offset + len(view):,} are needed")
            done += more

    def changed(self) -> str:
        """Return the reason to stop reading the file, or "" if it is unchanged.

        If only the modification time differs, as after `touch`, samples of the content are compared, and a warning is
        shown if they are equal.
        """
        now = os.fstat(self._number)
        if now.st_size < self.size:
            return (
                f"the file was cut while in use: it had {self.size:,} bytes and has {now.st_size:,}; "
                "write it again and make the sequence again"
            )
        try:
            named = os.stat(self.path)
        except OSError:
            return ""  # a deleted file stays readable until it is closed
        if (named.st_ino, named.st_dev) != (self.status.st_ino, self.status.st_dev):
            return "the file was replaced by another while in use; make the sequence again"
        if now.st_mtime_ns == self.status.st_mtime_ns and now.st_size == self.length:
            return ""
        if now.st_size > self.length or self._take_sample() != self._sample:
            return "the file was written to while in use; make the sequence again"
        self.status = now
        warn_user(f"{quote(self.path)}: the modification time changed, the content did not")
        return ""

    def close(self) -> None:
        """Close the file. It must not be read until it is reopened."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            self.close()
