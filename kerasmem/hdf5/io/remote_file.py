"""Find and open remote files: patterns, versions, and file objects for HDF5.

Of the metadata that HDF5 asks for, whole blocks are fetched and kept in memory.

HDF5 calls back while it holds the lock without which no thread can as much as let go of an HDF5 object. A thread that
waited here for another one to fetch something could wait for ever: that one may be collecting garbage, find such an
object and wait for the lock. So what is asked for here is fetched by the very thread that asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import h5py

from kerasmem.compat.files import call_file_system
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import one_line, shown
from kerasmem.hdf5.format.links import DAMAGED
from kerasmem.hdf5.format.urls import identity, redact, scheme_of
from kerasmem.hdf5.io.access import REQUESTS, RemoteAccess
from kerasmem.hdf5.io.failures import PermanentError, retry
from kerasmem.hdf5.io.fetcher import ObjectReader, Traffic
from kerasmem.hdf5.io.objects import HEAD, ObjectInfo
from kerasmem.hdf5.io.stores import Stores
from kerasmem.units import MIB

_BLOCK = HEAD
_DIRECT = 16  # blocks; a longer read is not kept in memory
_MOST_BLOCKS = 16 * MIB // _BLOCK

_BlockName = tuple[str, str, int, int]
"""URL and version of a file, its bytes, and the number of a block."""


_blocks: OrderedDict[_BlockName, bytes] = OrderedDict()  # of all files, the latest used last
_numbers = itertools.count()


def _keep_block(name: _BlockName, data: bytes) -> None:
    _blocks.pop(name, None)
    _blocks[name] = data
    while len(_blocks) > _MOST_BLOCKS:
        _blocks.popitem(last=False)


class RemoteFile(io.RawIOBase):
    """A remote file to be read by h5py.

    Args:
        url: the file.
        access: the settings.
        known: size and version; by default they are asked for now.
        traffic: what comes is counted here.
    """

    def __init__(
        self, url: str, access: RemoteAccess, known: ObjectInfo | None = None, traffic: Traffic | None = None
    ) -> None:
        super().__init__()
        self._url = url
        self._access = access
        self._traffic = traffic or Traffic()
        self._stores: Stores | None = None
        self._at = 0
        self._failure: DataError | None = None
        if known is None:
            try:
                known = self._run(lambda stores: retry(stores.object_at(url).info))
            except BaseException:
                self.close()
                raise
            self._traffic.received += len(known.head)
        self.known = known
        # Where nothing tells which version it is, blocks are this one's alone.
        self._version = known.tag or f"file {next(_numbers)}"
        if known.head:
            _keep_block(self._name(0), known.head)

    def __repr__(self) -> str:
        return redact(self._url)  # what h5py takes for the file's name

    def __del__(self) -> None:
        stores = getattr(self, "_stores", None)
        if stores is not None and not stores.loop.is_running():
            stores.loop.close()

    def raise_failure(self) -> None:
        """Raise the failure behind an error of HDF5."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure from None

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.known.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the current position."""
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
        stores, self._stores = getattr(self, "_stores", None), None
        if stores is not None:
            stores.close()
        super().close()

    def _read(self, offset: int, view: memoryview) -> None:
        first, last = offset // _BLOCK, -(-(offset + len(view)) // _BLOCK)
        if last - first > _DIRECT:
            self._fetch(offset, view)
            return
        found = [_blocks.get(self._name(number)) for number in range(first, last)]
        for number, known in enumerate(found, first):
            if known is not None:
                _keep_block(self._name(number), known)
        missing = [first + at for at, data in enumerate(found) if data is None]
        if missing:
            low, high = missing[0] * _BLOCK, min((missing[-1] + 1) * _BLOCK, self.known.size)
            data = memoryview(bytearray(high - low))
            self._fetch(low, data)
            for number in range(missing[0], missing[-1] + 1):
                block = found[number - first] = bytes(data[number * _BLOCK - low : (number + 1) * _BLOCK - low])
                _keep_block(self._name(number), block)
        view[:] = b"".join(data or b"" for data in found)[offset - first * _BLOCK :][: len(view)]

    def _name(self, number: int) -> _BlockName:
        return identity(self._url), self._version, self.known.size, number

    def _fetch(self, start: int, view: memoryview) -> None:
        async def fetch(stores: Stores) -> None:
            key = self._access.cache_key(self._url, self.known.tag, self.known.size)
            reader = ObjectReader(stores.object_at(self._url), self.known, self._traffic, stores.cache, key)
            await reader.keep(await reader.read(start, view), start, view)

        self._run(fetch)

    def _run(self, work: Callable[[Stores], Coroutine[Any, Any, Any]]) -> Any:
        if self._stores is None:
            self._stores = Stores(self._access)
        try:
            return self._stores.run(work(self._stores))
        except PermanentError as error:
            raise DataError(f"{shown(self._url)}: {error}") from None


class RemoteHdf5(h5py.File):
    """An HDF5 file read through a `RemoteFile`, closed along with it."""

    remote: RemoteFile

    def close(self) -> None:
        """Close both."""
        try:
            super().close()
        finally:
            self.remote.close()


def open_remote(
    url: str, access: RemoteAccess, known: ObjectInfo | None = None, traffic: Traffic | None = None, **options: Any
) -> RemoteHdf5:
    """Open a remote HDF5 file for reading. Every failure becomes one clear `DataError`."""
    remote = RemoteFile(url, access, known, traffic)
    try:
        if not remote.known.size:
            raise DataError(f"{shown(url)}: the file is empty (0 bytes)")
        file = RemoteHdf5(remote, "r", **options)
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


def is_pattern(url: str) -> bool:
    """Return whether a URL is a pattern. On a web server "?" begins a query."""
    http = scheme_of(url) in ("http", "https")
    place = url.split("?", 1)[0] if http else url
    return any(sign in place.split("://", 1)[1] for sign in ("*" if http else "*?["))


def expand(url: str, access: RemoteAccess) -> list[str]:
    """Return the URLs of all objects that match a pattern, in no order.

    Raises:
        DataError: If none does, or they cannot be listed.
    """
    names: list[str] = _ask(access, f"{shown(url)}: what matches this pattern cannot be listed", _glob, url)
    if not names:
        raise DataError(f"{shown(url)}: no file matches this pattern; a list of URLs can be given too")
    return names


def refuse_web(url: str) -> None:
    """Refuse a URL that cannot be written to."""
    if scheme_of(url) in ("http", "https"):
        raise UsageError(f"output: {shown(url)} is on a web server, which takes no files; name a bucket, or a folder")


def put_file(path: str, url: str, access: RemoteAccess) -> None:
    """Upload a file to a URL. It appears as a whole or not at all.

    Raises:
        DataError: If it cannot be written there.
    """
    refuse_web(url)
    _ask(access, f"{shown(url)}: cannot be written", _put, url, path)


def remove_file(url: str, access: RemoteAccess) -> None:
    """Remove an object.

    Raises:
        DataError: If it cannot be removed, or there is none.
    """
    _ask(access, f"{shown(url)}: cannot be removed", _remove, url)


def _ask(access: RemoteAccess, failed: str, work: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    with contextlib.closing(Stores(access)) as stores:
        try:
            return stores.run(retry(lambda: work(stores, *arguments)))
        except PermanentError as error:
            raise DataError(f"{failed}: {error}") from None


async def _remove(stores: Stores, url: str) -> None:
    system, target = stores.system_of(url)
    await call_file_system(system, "rm_file", target)


async def _put(stores: Stores, url: str, path: str) -> None:
    system, target = stores.system_of(url)
    if getattr(system, "asynchronous", False):  # object stores, which show an object when it is whole
        await call_file_system(system, "put_file", path, target)
        return
    temporary = f"{target}.{os.urandom(8).hex()}.part"
    await call_file_system(system, "put_file", path, temporary)
    await call_file_system(system, "mv", temporary, target)


async def _glob(stores: Stores, url: str) -> list[str]:
    system, path = stores.system_of(url)
    names = await call_file_system(system, "glob", path)
    if scheme_of(url) in ("http", "https"):
        # A page may name whatever it likes; only what lies on the same server is meant.
        server = url.split("://", 1)[0] + "://" + url.split("://", 1)[1].split("/", 1)[0] + "/"
        return [name for name in names if name.startswith(server)]
    return [f"{url.split('://', 1)[0]}://{name.lstrip('/') if scheme_of(url) != 'memory' else name}" for name in names]


def ask_for_info(urls: Sequence[str], access: RemoteAccess) -> dict[str, ObjectInfo]:
    """Return size, version and first bytes of files, asked for all at once.

    Raises:
        DataError: If one of them cannot be read.
    """
    few = asyncio.Semaphore(REQUESTS)

    async def ask(stores: Stores, url: str) -> ObjectInfo:
        async with few:
            try:
                return await retry(stores.object_at(url).info)
            except PermanentError as error:
                raise DataError(f"{shown(url)}: {error}") from None

    async def ask_all(stores: Stores) -> list[ObjectInfo]:
        return await asyncio.gather(*(ask(stores, url) for url in urls))

    with contextlib.closing(Stores(access)) as stores:
        return dict(zip(urls, stores.run(ask_all(stores)), strict=True))
