"""A remote file as HDF5 opens it: blocks of its metadata, fetched as they are asked for and kept in memory.

HDF5 calls back while it holds the lock without which no thread can as much as let go of an HDF5 object. A thread that
waited here for another one to fetch something could wait for ever: that one may be collecting garbage, find such an
object and wait for the lock. So what is asked for here is fetched by the very thread that asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import h5py

from kerasmem.compat.event_loops import no_running_loop
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import one_line, shown
from kerasmem.hdf5.links import DAMAGED
from kerasmem.hdf5.remote.access import RemoteAccess
from kerasmem.hdf5.remote.cache import DiskCache
from kerasmem.hdf5.remote.failures import ChangedError, PermanentError, changed_text, retry
from kerasmem.hdf5.remote.fetcher import ObjectReader, Traffic
from kerasmem.hdf5.remote.file_systems import FileSystems
from kerasmem.hdf5.remote.objects import HEAD, ObjectInfo
from kerasmem.hdf5.remote.urls import identity, redact
from kerasmem.units import MIB

_BLOCK = HEAD
_DIRECT = 16  # blocks; a longer read is not kept in memory

_BlockName = tuple[str, str, int, int]
"""URL and version of a file, its bytes, and the number of a block."""


class _BlockCache:
    """The blocks used last, of all files."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[_BlockName, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: _BlockName) -> bytes | None:
        with self._lock:
            data = self._blocks.get(name)
            if data is not None:
                self._blocks.move_to_end(name)
            return data

    def put(self, name: _BlockName, data: bytes) -> None:
        with self._lock:
            self._blocks[name] = data
            self._blocks.move_to_end(name)
            while len(self._blocks) > self._most:
                self._blocks.popitem(last=False)


_blocks = _BlockCache(16 * MIB // _BLOCK)
_numbers = itertools.count()


class RemoteFile(io.RawIOBase):
    """A remote file to be read by h5py.

    Args:
        url: the file.
        access: the settings.
        known: size and version; by default they are asked for now.
    """

    def __init__(self, url: str, access: RemoteAccess, known: ObjectInfo | None = None) -> None:
        super().__init__()
        self._url = url
        self._access = access
        self.traffic = Traffic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._file_systems: FileSystems | None = None
        self._at = 0
        self._failure: DataError | None = None
        self._cache = None if access.cache is None else DiskCache(access.cache, access.cache_size)
        if known is None:
            self.traffic.requests += 1
            try:
                known = self._ask(lambda systems: retry(systems.object_at(url).info))
            except BaseException:
                self.close()
                raise
            self.traffic.received += len(known.head)
        self.known = known
        # Where nothing tells which version it is, blocks are this one's alone.
        self._version = known.tag or f"file {next(_numbers)}"
        if known.head:
            _blocks.put(self._name(0), known.head)

    def __repr__(self) -> str:
        return redact(self._url)  # what h5py takes for the file's name

    def __del__(self) -> None:
        loop = getattr(self, "_loop", None)
        if loop is not None and not loop.is_running():
            loop.close()

    def raise_failure(self) -> None:
        """Raise what went wrong within a call of HDF5, which itself says something else."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure from None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.known.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with what follows."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self.known.size - self._at))]
        try:
            self._read(self._at, view)
        except DataError as error:
            self._failure = self._failure or error
            raise OSError(str(error)) from None
        self._at += len(view)
        return len(view)

    def close(self) -> None:
        """Close the connections."""
        loop, self._loop = getattr(self, "_loop", None), None
        if loop is not None and self._file_systems is not None:
            with contextlib.suppress(Exception), no_running_loop():
                loop.run_until_complete(self._file_systems.close())
                loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
        super().close()

    def _read(self, offset: int, view: memoryview) -> None:
        first, last = offset // _BLOCK, -(-(offset + len(view)) // _BLOCK)
        if last - first > _DIRECT:
            self._fetch(offset, view)
            return
        found = {number: _blocks.get(self._name(number)) for number in range(first, last)}
        missing = [number for number, data in found.items() if data is None]
        if missing:
            low, high = missing[0] * _BLOCK, min((missing[-1] + 1) * _BLOCK, self.known.size)
            data = memoryview(bytearray(high - low))
            self._fetch(low, data)
            for number in range(missing[0], missing[-1] + 1):
                found[number] = bytes(data[number * _BLOCK - low : (number + 1) * _BLOCK - low])
                _blocks.put(self._name(number), found[number] or b"")
        for number, block in found.items():
            begin = max(offset, number * _BLOCK)
            part = (block or b"")[begin - number * _BLOCK : offset + len(view) - number * _BLOCK]
            view[begin - offset : begin - offset + len(part)] = part

    def _name(self, number: int) -> _BlockName:
        return identity(self._url), self._version, self.known.size, number

    def _fetch(self, start: int, view: memoryview) -> None:
        async def fetch(file_systems: FileSystems) -> None:
            key = self._access.cache_key(self._url, self.known.tag, self.known.size)
            target = file_systems.object_at(self._url)
            reader = ObjectReader(target, self.known, self.traffic, self._cache, key)
            await reader.keep(await reader.read(start, view), start, view)

        self._ask(fetch)

    def _ask(self, work: Callable[[FileSystems], Awaitable[Any]]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._file_systems = FileSystems(self._access, self._loop)
        assert self._file_systems is not None
        try:
            with no_running_loop():
                return self._loop.run_until_complete(work(self._file_systems))
        except ChangedError as error:
            raise DataError(f"{shown(self._url)}: {changed_text(error)}") from None
        except PermanentError as error:
            raise DataError(f"{shown(self._url)}: {error}") from None


class RemoteHdf5(h5py.File):
    """An HDF5 file read by way of a `RemoteFile`, which is closed along with it."""

    remote: RemoteFile

    def close(self) -> None:
        """Close both."""
        try:
            super().close()
        finally:
            self.remote.close()


def open_remote(url: str, access: RemoteAccess, known: ObjectInfo | None = None) -> RemoteHdf5:
    """Open a remote HDF5 file for reading; whatever is wrong becomes one clear `DataError`."""
    remote = RemoteFile(url, access, known)
    try:
        if not remote.known.size:
            raise DataError(f"{shown(url)}: the file is empty (0 bytes)")
        file = RemoteHdf5(remote, "r")
        file.remote = remote
        return file
    except DAMAGED as error:
        remote.close()
        if isinstance(error, DataError):
            raise
        remote.raise_failure()
        reason = redact(one_line(str(error)))
        if "truncated" in reason:
            size = f"it has {remote.known.size:,} bytes, and its header speaks of more"
            raise DataError(f"{shown(url)}: the file is truncated: {size}; upload it again") from None
        if "signature" in reason:
            raise DataError(f"{shown(url)}: this is no HDF5 file (its signature is missing)") from None
        raise DataError(f"{shown(url)}: HDF5 cannot open the file: {reason}") from None


def keep_head(url: str, known: ObjectInfo) -> None:
    """Keep the first bytes of a file in memory, for when it is opened."""
    if known.tag is not None and len(known.head) == min(_BLOCK, known.size):
        _blocks.put((identity(url), known.tag, known.size, 0), known.head)
