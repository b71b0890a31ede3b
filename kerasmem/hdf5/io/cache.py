"""A disk cache of fetched bytes with a size limit, shared by processes.

An entry is a file whose name says which bytes it holds and their checksum; it is written under another name and put
into its place whole. The folder of an object is named by a digest of its URL, version and length, so that another
version never meets it, and the checksum begins with that name and the place: an entry of another object is none. The
folder is the user's own. What was out of use longest goes first.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import threading
import time
import warnings
import zlib

from kerasmem import files
from kerasmem.errors import UsageError
from kerasmem.hdf5.format.layout import shown

_ENTRY = re.compile(r"([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]{8})")
_STALE = 3600.0  # seconds after which a file under its temporary name belongs to nobody
_ROOM = 16  # one part in so many of the limit is made free at a time
_LISTED = 1.0  # seconds for which a list of entries is believed, others may write as well
_TOUCHED = 60.0  # seconds: an entry's time of use need not be more exact


class DiskCache:
    """A folder of fetched bytes.

    Args:
        folder: the folder; made if need be.
        limit: bytes that its entries may take together.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self.folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._lists: dict[str, tuple[float, list[tuple[int, int, str]]]] = {}
        self._broken = self._is_made = False

    def read(self, key: str, start: int, into: memoryview) -> list[tuple[int, int]]:
        """Fill the cached bytes from `start` on. Return the missing ranges, (first, stop)."""
        stop, at = start + len(into), start
        missing: list[tuple[int, int]] = []
        entries = self._entries(key)
        for low, high, name in entries[max(0, bisect.bisect_left(entries, (start,)) - 8) :]:
            if low >= stop:
                break
            if high <= at:
                continue
            data = self._load(key, name, low, high)
            if data is None:
                continue
            first, last = max(low, at), min(high, stop)
            if first > at:
                missing.append((at, first))
            into[first - start : last - start] = memoryview(data)[first - low : last - low]
            at = last
            if at == stop:
                break
        if at < stop:
            missing.append((at, stop))
        return missing

    def write(self, key: str, start: int, data: memoryview) -> None:
        """Keep bytes. A full or read-only disk is warned of once, and training continues without the cache."""
        if self._broken or len(data) > self._limit // 2:
            return
        folder = os.path.join(self.folder, key)
        name = f"{start:x}-{len(data):x}-{_checksum(key, start, data):08x}"
        try:
            self._make()
            lock = files.open_plain(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT)
            with open(lock, "r+b") as lock_file:
                files.lock(lock_file, wait=True)  # of all processes one at a time makes room
                self._make_room(len(data))
            files.own_folder("cache", folder)
            with files.replacing(os.path.join(folder, name)) as file:
                file.write(data)
        except FileNotFoundError:
            self._is_made = False
            return  # another process emptied the folder just now
        except (OSError, UsageError) as error:
            self._broken = True
            reason = error.strerror if isinstance(error, OSError) else error
            warnings.warn(
                f"cache: {shown(self.folder)} cannot be written to ({reason}); what is fetched is not kept",
                stacklevel=2,
            )
            return
        with self._lock:
            listed, entries = self._lists.get(key, (-_LISTED, []))
            self._lists[key] = listed, sorted([*entries, (start, start + len(data), name)])

    def _make(self) -> None:
        """Make the folder, or see once that nobody else can write to it."""
        if not self._is_made:
            os.makedirs(os.path.dirname(self.folder), exist_ok=True)
            files.own_folder("cache", self.folder)
            self._is_made = True

    def _entries(self, key: str) -> list[tuple[int, int, str]]:
        with self._lock:
            listed, entries = self._lists.get(key, (-_LISTED, []))
            now = time.monotonic()
            if now - listed >= _LISTED:
                names: list[str] = []
                with contextlib.suppress(OSError):
                    names = os.listdir(os.path.join(self.folder, key))
                parts = [found for found in map(_ENTRY.fullmatch, names) if found]
                entries = sorted((int(part[1], 16), int(part[1], 16) + int(part[2], 16), part[0]) for part in parts)
                self._lists[key] = now, entries
            return entries

    def _load(self, key: str, name: str, low: int, high: int) -> bytes | None:
        path = os.path.join(self.folder, key, name)
        try:
            with open(files.open_plain(path), "rb") as file:
                data = file.read(high - low + 1)
                if time.time() - os.fstat(file.fileno()).st_mtime > _TOUCHED:
                    os.utime(path)
        except OSError:
            data = b""  # gone: another process needed the room
        if len(data) == high - low and _checksum(key, low, data) == int(name[-8:], 16):
            return data
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None

    def _make_room(self, size: int) -> None:
        """Count bytes about to be written, and evict the least recently used entries beyond the limit.

        The sum stands in a file, so that not every entry has to be looked at each time. A process that was killed
        may have noted more than it wrote, never less; looking at the entries mends that.
        """
        noted = os.path.join(self.folder, "size")
        try:
            with open(files.open_plain(noted), "rb") as file:
                total = int(file.read(32))
        except (OSError, ValueError):
            total = self._limit + 1
        if total + size > self._limit:
            total = self._remove_oldest(self._limit - size)
        with files.replacing(noted) as file:
            file.write(str(total + size).encode())

    def _remove_oldest(self, most: int) -> int:
        entries, total, now = [], 0, time.time()
        for folder in os.scandir(self.folder):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                with contextlib.suppress(OSError):
                    seen = entry.stat(follow_symlinks=False)
                    if _ENTRY.fullmatch(entry.name):
                        entries.append((seen.st_mtime, entry.path, seen.st_size))
                        total += seen.st_size
                    elif entry.name.startswith(".") and now - seen.st_mtime > _STALE:
                        os.unlink(entry.path)
                    else:
                        total += seen.st_size
        if total <= most:
            return total
        for _, path, size in sorted(entries):
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= most - self._limit // _ROOM:
                break
        return total


def _checksum(key: str, start: int, data: bytes | memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(f"{key} {start:x}".encode()))
