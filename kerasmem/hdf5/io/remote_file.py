"""Find and open remote files: patterns, versions, and file objects for HDF5.

Metadata is fetched in whole blocks, which are kept in memory.

HDF5 holds h5py's global lock while it calls a file object, and every release of an HDF5 object needs that lock. If a
callback waited for another thread to fetch bytes, that thread could be collecting garbage and wait for the lock
forever. So each callback fetches bytes in its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import h5py

from kerasmem.compat.file_systems import call_file_system
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import quote
from kerasmem.hdf5.format.urls import identity, is_url, redact, scheme_of
from kerasmem.hdf5.io.access import REQUESTS, RemoteAccess, Stores
from kerasmem.hdf5.io.fetcher import ObjectReader, Traffic
from kerasmem.hdf5.io.objects import HEAD, ObjectInfo, PermanentError, RemoteObject, retry
from kerasmem.units import MIB

_BLOCK = HEAD
_DIRECT = 16  # blocks; longer reads are not kept in memory
_MOST_BLOCKS = 16 * MIB // _BLOCK

_BlockName = tuple[str, str, int, int]
"""URL, version and size of a file, and the number of a block."""
_blocks: OrderedDict[_BlockName, bytes] = OrderedDict()  # of all files, the most recently used last
_numbers = itertools.count()


async def _call_here(work: Callable[..., Any], *arguments: Any) -> Any:
    return work(*arguments)


def _keep_block(name: _BlockName, data: bytes) -> None:
    _blocks[name] = data
    _blocks.move_to_end(name)
    while len(_blocks) > _MOST_BLOCKS:
        _blocks.popitem(last=False)


class RemoteFile(io.RawIOBase):
    """A remote file as a file object for h5py.

    Args:
        url: URL of the file.
        access: settings for remote files.
        known: size and version. Requested by default.
        traffic: counter of received bytes. Defaults to a new one.
    """

    def __init__(
        self, url: str, access: RemoteAccess, known: ObjectInfo | None = None, traffic: Traffic | None = None
    ) -> None:
        super().__init__()
        self._url = url
        self._access = access
        self._traffic = traffic or Traffic()
        self._stores: Stores | None = None
        self._position = 0
        if known is None:
            try:
                known = self._run(lambda target: target.info())
            except BaseException:
                self.close()
                raise
            self._traffic.received += len(known.data)
        self.known = known
        version = known.tag or f"file {next(_numbers)}"  # blocks of an unknown version are not shared
        self._name = (identity(url), version, known.size)
        if known.data:
            _keep_block((*self._name, 0), known.data)

    def __repr__(self) -> str:
        return redact(self._url)  # h5py uses it as file name

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset."""
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.known.size}
        self._position = offset + origins[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the current position."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self.known.size - self._position))]
        view[:] = self._read(self._position, self._position + len(view))
        self._position += len(view)
        return len(view)

    def close(self) -> None:
        """Close the connections."""
        if self._stores is not None:
            self._stores.close()
            self._stores = None
        super().close()

    def _read(self, start: int, stop: int) -> bytes | memoryview:
        first, last = start // _BLOCK, -(-stop // _BLOCK)
        if last - first > _DIRECT:
            return self._fetch(start, stop)
        cached = [_blocks.get((*self._name, number)) for number in range(first, last)]
        blocks = [block for block in cached if block is not None]
        if len(blocks) < last - first:
            data = self._fetch(first * _BLOCK, min(last * _BLOCK, self.known.size))
            blocks = [data[at : at + _BLOCK] for at in range(0, len(data), _BLOCK)]
        for number, block in enumerate(blocks, first):
            _keep_block((*self._name, number), block)
        return memoryview(b"".join(blocks))[start - first * _BLOCK : stop - first * _BLOCK]

    def _fetch(self, start: int, stop: int) -> bytes:
        key = self._access.cache_key(self._url, self.known.tag, self.known.size)
        cache = self._access.open_cache()

        def read(target: RemoteObject) -> Coroutine[Any, Any, memoryview]:
            return ObjectReader(target, self.known, self._traffic, cache, key, _call_here).read(start, stop)

        return bytes(self._run(read))

    def _run(self, work: Callable[[RemoteObject], Coroutine[Any, Any, Any]]) -> Any:
        if self._stores is None:
            self._stores = Stores(self._access)
        try:
            return self._stores.run(work(self._stores.object_at(self._url)))
        except PermanentError as error:
            raise DataError(f"{quote(self._url)}: {error}") from None


class RemoteHdf5(h5py.File):
    """An HDF5 file read through a `RemoteFile`."""

    remote: RemoteFile

    def close(self) -> None:
        """Close the HDF5 file and the remote file."""
        try:
            super().close()
        finally:
            self.remote.close()


def open_remote(
    url: str, access: RemoteAccess, known: ObjectInfo | None = None, traffic: Traffic | None = None, **options: Any
) -> RemoteHdf5:
    """Open a remote HDF5 file for reading. Errors of HDF5 are passed on."""
    remote = RemoteFile(url, access, known, traffic)
    try:
        if not remote.known.size:
            raise DataError(f"{quote(url)}: the file is empty (0 bytes)")
        file = RemoteHdf5(remote, "r", **options)
    except BaseException:
        remote.close()
        raise
    file.remote = remote
    return file


def is_pattern(url: str) -> bool:
    """Return whether a URL is a pattern. On a web server "?" begins a query."""
    is_web = scheme_of(url) in ("http", "https")
    location = url.split("?", 1)[0] if is_web else url
    return any(sign in location.split("://", 1)[1] for sign in ("*" if is_web else "*?["))


def expand(url: str, access: RemoteAccess) -> list[str]:
    """Return the URLs that match a pattern, in arbitrary order.

    Raises:
        DataError: If none matches, or the store cannot list them.
    """
    names = _call_store(access, url, "the files that match this pattern cannot be listed", "glob")
    if not names:
        raise DataError(f"{quote(url)}: no file matches this pattern; you can also pass a list of URLs")
    scheme = url.split("://", 1)[0]
    return [name if is_url(name) else f"{scheme}://{name}" for name in names]


def refuse_web(url: str) -> None:
    """Refuse an output on a web server."""
    if scheme_of(url) in ("http", "https"):
        raise UsageError(f"output: must be in a bucket or a folder; got {quote(url)} on a web server")


def put_file(path: str, url: str, access: RemoteAccess) -> None:
    """Upload a file to a URL. Object stores publish it as a whole or not at all.

    Raises:
        DataError: If it cannot be written there.
    """
    refuse_web(url)
    _call_store(access, url, "cannot be written", "put_file", path)


def _call_store(access: RemoteAccess, url: str, problem: str, method: str, *arguments: Any) -> Any:
    """Call a method of a store's file system with the path of a URL as its last argument."""
    with contextlib.closing(Stores(access)) as stores:
        system, path = stores.system_of(url)
        try:
            return stores.run(retry(lambda: call_file_system(system, method, *arguments, path)))
        except PermanentError as error:
            raise DataError(f"{quote(url)}: {problem}: {error}") from None


def request_infos(urls: Sequence[str], access: RemoteAccess) -> dict[str, ObjectInfo]:
    """Request size, version and first bytes of files concurrently.

    Raises:
        DataError: If a file cannot be read.
    """
    limit = asyncio.Semaphore(REQUESTS)

    async def request(stores: Stores, url: str) -> ObjectInfo:
        async with limit:
            try:
                return await stores.object_at(url).info()
            except PermanentError as error:
                raise DataError(f"{quote(url)}: {error}") from None

    async def request_all(stores: Stores) -> list[ObjectInfo]:
        return await asyncio.gather(*(request(stores, url) for url in urls))

    with contextlib.closing(Stores(access)) as stores:
        return dict(zip(urls, stores.run(request_all(stores)), strict=True))
