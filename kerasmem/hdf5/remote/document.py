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

from kerasmem.errors import DataError
from kerasmem.hdf5.layout import one_line, shown
from kerasmem.hdf5.links import DAMAGED
from kerasmem.hdf5.remote.access import RemoteAccess
from kerasmem.hdf5.remote.cache import DiskCache
from kerasmem.hdf5.remote.failures import Changed, Final
from kerasmem.hdf5.remote.handle import cache_folder
from kerasmem.hdf5.remote.link import Traffic, Wanted, fetch
from kerasmem.hdf5.remote.objects import HEAD, Look
from kerasmem.hdf5.remote.stores import Stores, insist
from kerasmem.hdf5.remote.urls import identity, redact
from kerasmem.units import MIB

BLOCK = HEAD
_KEPT = 16 * MIB // BLOCK  # blocks of all files
_STRAIGHT = 16  # blocks from which on a read goes past them

_blocks: OrderedDict[tuple[str, str, int, int], bytes] = OrderedDict()
_blocks_lock = threading.Lock()
_numbers = itertools.count()


class Document(io.RawIOBase):
    """A remote file to be read by h5py.

    Args:
        url: the file.
        access: the settings.
        known: how it was looked at; by default it is looked at now.
    """

    def __init__(self, url: str, access: RemoteAccess, known: Look | None = None) -> None:
        super().__init__()
        self._url = url
        self._access = access
        self.traffic = Traffic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stores: Stores | None = None
        self._at = 0
        self._failure: DataError | None = None
        self._cache = None if access.cache is None else DiskCache(access.cache, access.cache_size)
        if known is None:
            self.traffic.requests += 1
            try:
                known = self._ask(lambda stores: insist(stores.find(url).look))
            except BaseException:
                self.close()
                raise
            self.traffic.received += len(known.head)
        self.known = known
        self._key = cache_folder(url, known, access)
        # Where nothing says which version it is, blocks are this document's alone.
        self._version = known.tag or f"document {next(_numbers)}"
        if known.head:
            _keep(self._name(0), known.head)

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

    def tell(self) -> int:
        """Return the place that is read next."""
        return self._at

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
        if loop is not None and self._stores is not None:
            with contextlib.suppress(Exception):
                self._run(loop, self._stores.close())
                self._run(loop, loop.shutdown_default_executor())
            loop.close()
        super().close()

    def _read(self, offset: int, view: memoryview) -> None:
        first, last = offset // BLOCK, -(-(offset + len(view)) // BLOCK)
        if last - first > _STRAIGHT:
            self._fetch(offset, view)
            return
        found = {number: _find(self._name(number)) for number in range(first, last)}
        missing = [number for number, data in found.items() if data is None]
        if missing:
            low, high = missing[0] * BLOCK, min((missing[-1] + 1) * BLOCK, self.known.size)
            data = bytearray(high - low)
            self._fetch(low, memoryview(data))
            for number in range(missing[0], missing[-1] + 1):
                block = bytes(data[number * BLOCK - low : (number + 1) * BLOCK - low])
                found[number] = block
                _keep(self._name(number), block)
        for number, there in found.items():
            assert there is not None
            begin = max(offset, number * BLOCK)
            part = there[begin - number * BLOCK : offset + len(view) - number * BLOCK]
            view[begin - offset : begin - offset + len(part)] = part

    def _name(self, number: int) -> tuple[str, str, int, int]:
        return identity(self._url), self._version, self.known.size, number

    def _fetch(self, start: int, view: memoryview) -> None:
        missing = [(start, start + len(view))]
        if self._cache is not None and self._key is not None:
            missing = self._cache.read(self._key, start, view)
            self.traffic.from_cache += len(view) - sum(last - first for first, last in missing)
        for first, last in missing:
            part = view[first - start : last - start]
            self._ask(lambda stores, first=first, part=part: fetch(self._wanted(stores), first, part))  # type: ignore[misc]
            if self._cache is not None and self._key is not None:
                self._cache.write(self._key, first, part)

    def _wanted(self, stores: Stores) -> Wanted:
        return Wanted(stores.find(self._url), self.known, self.traffic)

    def _ask(self, work: Callable[[Stores], Awaitable[Any]]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._stores = Stores(self._access, self._loop)
        assert self._stores is not None
        try:
            return self._run(self._loop, work(self._stores))
        except Changed as error:
            raise DataError(
                f"{shown(self._url)}: the file was replaced or written anew while in use ({error}); make the sequence "
                "again"
            ) from None
        except Final as error:
            raise DataError(f"{shown(self._url)}: {error}") from None

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop, work: Any) -> Any:
        running = asyncio._get_running_loop()  # a notebook's, in whose thread the user calls
        asyncio._set_running_loop(None)
        try:
            return loop.run_until_complete(work)
        finally:
            asyncio._set_running_loop(running)


class RemoteHdf5(h5py.File):
    """An HDF5 file read by way of a `Document`, which is closed along with it."""

    document: Document

    def close(self) -> None:
        """Close both."""
        try:
            super().close()
        finally:
            self.document.close()


def open_remote(url: str, access: RemoteAccess, known: Look | None = None) -> RemoteHdf5:
    """Open a remote HDF5 file for reading; whatever is wrong becomes one clear `DataError`."""
    document = Document(url, access, known)
    try:
        if not document.known.size:
            raise DataError(f"{shown(url)}: the file is empty (0 bytes)")
        file = RemoteHdf5(document, "r")
        file.document = document
        return file
    except DAMAGED as error:
        document.close()
        if isinstance(error, DataError):
            raise
        document.raise_failure()
        reason = redact(one_line(str(error)))
        size = document.known.size
        if "truncated" in reason:
            raise DataError(
                f"{shown(url)}: the file is truncated: it has {size:,} bytes, and its header speaks of more; upload "
                "it again"
            ) from None
        if "signature" in reason:
            raise DataError(f"{shown(url)}: this is no HDF5 file (its signature is missing)") from None
        raise DataError(f"{shown(url)}: HDF5 cannot open the file: {reason}") from None


def keep(url: str, known: Look) -> None:
    """Keep the head of a file that was looked at."""
    if known.tag is not None and len(known.head) == min(BLOCK, known.size):
        _keep((identity(url), known.tag, known.size, 0), known.head)


def _find(name: tuple[str, str, int, int]) -> bytes | None:
    with _blocks_lock:
        data = _blocks.get(name)
        if data is not None:
            _blocks.move_to_end(name)
        return data


def _keep(name: tuple[str, str, int, int], data: bytes) -> None:
    with _blocks_lock:
        _blocks[name] = data
        _blocks.move_to_end(name)
        while len(_blocks) > _KEPT:
            _blocks.popitem(last=False)
