"""A disk cache of fetched blocks with a size limit, shared by processes.

Each version of an object has one sparse file, named by a digest of its URL, version and size. A checksum precedes each
block and also covers the file's name and the block's number, so that a hole, a torn write and a block of another object
are misses. The user owns the folder. Whole files are evicted, the least recently used first.
"""

from __future__ import annotations

import contextlib
import glob
import os
import random
import threading
import zlib

from kerasmem import files
from kerasmem.errors import UsageError, warn_user
from kerasmem.hdf5.format.layout import quote
from kerasmem.units import KIB

BLOCK = 16 * KIB
_SUM = 4  # bytes of a checksum
_SLOT = _SUM + BLOCK
_SUFFIX = ".blocks"  # other files are never evicted
_SCANS = 64  # scans of the folder while as many bytes are written as the limit allows


class DiskCache:
    """A folder of fetched blocks.

    Args:
        folder: path of the folder; created if missing.
        limit: maximum total size of its files in bytes.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self.folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._is_full = self._broken = False

    def read(self, key: str, first: int, stop: int) -> list[memoryview | None]:
        """Return the blocks `first` to `stop` of an object, None for each missing one."""
        path = self._path(key)
        try:
            with open(files.open_plain(path), "rb") as file:
                file.seek(first * _SLOT)
                data = memoryview(file.read((stop - first) * _SLOT))
            os.utime(path)
        except OSError:
            return [None] * (stop - first)
        blocks: list[memoryview | None] = []
        for number in range(first, stop):
            slot = data[(number - first) * _SLOT :][:_SLOT]
            is_sound = slot[:_SUM] == _checksum(key, number, slot[_SUM:])
            blocks.append(slot[_SUM:] if is_sound else None)
        return blocks

    def write(self, key: str, first: int, data: memoryview) -> None:
        """Write whole blocks. Only the object's last block may be short.

        If the disk is full or read-only, a warning is shown once and training continues without the cache.
        """
        if self._broken:
            return
        try:
            with self._lock:
                if self._make_room(key, len(data)):
                    with open(files.open_plain(self._path(key), os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                        file.seek(first * _SLOT)
                        for start in range(0, len(data), BLOCK):
                            block = data[start : start + BLOCK]
                            file.write(_checksum(key, first + start // BLOCK, block) + block)
        except (OSError, UsageError) as error:
            self._broken = True
            reason = error.strerror if isinstance(error, OSError) else error
            warn_user(f"cache: {quote(self.folder)} cannot be written to ({reason}); fetched data is not cached")

    def _path(self, key: str) -> str:
        return os.path.join(self.folder, key + _SUFFIX)

    def _make_room(self, key: str, size: int) -> bool:
        """Evict files beyond the limit, except the one being written. Return whether `size` bytes fit."""
        os.makedirs(os.path.dirname(self.folder), exist_ok=True)
        files.own_folder("cache", self.folder)
        if not self._is_full and random.random() * self._limit > _SCANS * size:
            return True
        entries = []
        for path in glob.glob(os.path.join(glob.escape(self.folder), f"*{_SUFFIX}")):
            with contextlib.suppress(FileNotFoundError):  # evicted by another process
                entries.append((os.lstat(path), path))
        total = size + sum(_allocated_bytes(status) for status, _ in entries)
        for status, path in sorted(entries, key=lambda entry: entry[0].st_mtime):
            if total > self._limit and path != self._path(key):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= _allocated_bytes(status)
        self._is_full = total > self._limit
        return not self._is_full


def _allocated_bytes(status: os.stat_result) -> int:
    return status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size


def _checksum(key: str, number: int, data: bytes | memoryview) -> bytes:
    return zlib.crc32(data, zlib.crc32(f"{key} {number}".encode())).to_bytes(_SUM, "little")
