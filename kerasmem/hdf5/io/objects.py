"""One object of a store: its size, version, and ranges proved to be of that version."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kerasmem.compat.files import call_file_system
from kerasmem.hdf5.io.failures import ChangedError, PermanentError, retry
from kerasmem.units import KIB

HEAD = 64 * KIB
"""Bytes at the beginning of an object that come along with its version: an HDF5 file's header lies there."""
_LEAST_RATE = 32 * KIB  # bytes a second: a slower answer is requested again
_CONNECT, _SILENCE = 15.0, 30.0  # seconds until a connection stands, and that a store may be silent
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_NO_RANGES = (
    "the server sends whole files only (it does not answer range requests), and reading parts is what training from "
    "it needs; put the file on one that supports ranges, or download it first"
)


@dataclass(frozen=True)
class ObjectInfo:
    """An object's size and version, and its first bytes.

    Args:
        size: its bytes.
        tag: its version, an ETag or the time of its last change; None if the store tells none.
        head: its first bytes.
    """

    size: int
    tag: str | None
    head: bytes = field(default=b"", repr=False)


class Answer(NamedTuple):
    """A store's answer to a request for a range.

    Args:
        data: the bytes.
        size: bytes of the whole object.
        tag: its version; None if the store tells none.
    """

    data: bytes
    size: int
    tag: str | None


class RemoteObject(ABC):
    """An object of a store. Its coroutines belong to the event loop that it was made for."""

    @abstractmethod
    async def get(self, start: int, stop: int, known: ObjectInfo | None = None) -> Answer:
        """Request a range, of the known version if any. The range may end at the object's end."""

    async def info(self) -> ObjectInfo:
        """Return size, version and first bytes."""
        answer = await retry(lambda: _in_time(HEAD, self.get(0, HEAD)))
        return ObjectInfo(answer.size, answer.tag, answer.data)

    async def read(self, start: int, stop: int, known: ObjectInfo) -> bytes:
        """Return a range of the known version.

        Raises:
            PermanentError: If it cannot be had.
            ChangedError: If the object is another version.
        """
        return await retry(lambda: _in_time(stop - start, self._read(start, stop, known)))

    async def _read(self, start: int, stop: int, known: ObjectInfo) -> bytes:
        answer = await self.get(start, stop, known)
        if (answer.size, answer.tag) != (known.size, known.tag):
            raise ChangedError("its length, its ETag or its time of change is another")
        if len(answer.data) != stop - start:
            raise EOFError(f"only {len(answer.data):,} of {stop - start:,} bytes came")
        return answer.data


async def _in_time(size: int, answer: Any) -> Any:
    """Limit the time of an answer: aiohttp's own limit misses a broken chunked coding and a "100 Continue"."""
    return await asyncio.wait_for(answer, _CONNECT + _SILENCE + size / _LEAST_RATE)


class HttpObject(RemoteObject):
    """An object of a web server.

    Args:
        system: fsspec's HTTP file system.
        url: the object.
    """

    def __init__(self, system: Any, url: str) -> None:
        self._system = system
        self._url = url

    async def get(self, start: int, stop: int, known: ObjectInfo | None = None) -> Answer:
        """Request a range. fsspec's own method returns no version, and reads whatever a server sends into memory."""
        import aiohttp

        session = await self._system.set_session()
        options = dict(self._system.kwargs)
        options.setdefault("timeout", aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_SILENCE))
        # Bytes are counted as they are stored, so none may be compressed on their way.
        headers = {**options.pop("headers", {}), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        if known is not None and known.tag is not None and known.tag.startswith('"'):
            headers["If-Match"] = known.tag
        async with session.get(self._system.encode_url(self._url), headers=headers, **options) as answer:
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            is_empty = answer.status == 416 or (answer.status == 200 and answer.headers.get("Content-Length") == "0")
            if is_empty:
                return Answer(b"", 0, tag)
            answer.raise_for_status()
            if answer.status != 206 or answer.headers.get("Content-Encoding", "identity") != "identity":
                raise PermanentError(_NO_RANGES)
            length, size = _read_range(answer.headers.get("Content-Range", ""), start, stop)
            data = await answer.content.readexactly(length)
            if await answer.content.read(1):
                raise EOFError(f"more than {length:,} bytes came")
            return Answer(data, size, tag)


class OtherObject(RemoteObject):
    """An object of any other file system of fsspec.

    Its answers do not tell the version, so the version is requested after the bytes.

    Args:
        system: the file system.
        path: the object.
    """

    _VERSIONS = ("generation", "ETag", "etag", "md5Hash", "md5", "mtime", "LastModified", "last_modified", "updated",
                 "modified", "created")  # fmt: skip

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path

    async def get(self, start: int, stop: int, known: ObjectInfo | None = None) -> Answer:
        """Request a range."""
        if known is None:
            size, _ = await self._version()
            stop = min(stop, size)
        data = b""
        if start < stop:
            data = await call_file_system(self._system, "cat_file", self._path, start=start, end=stop)
        return Answer(data, *await self._version())

    async def _version(self) -> tuple[int, str | None]:
        """Return size and version of the object as it is now."""
        entry = await call_file_system(self._system, "info", self._path)
        if entry.get("type") == "directory":
            raise PermanentError("this is a folder, not a file")
        tags = [f"{name}={entry[name]}" for name in self._VERSIONS if entry.get(name)]
        return entry.get("size") or 0, tags[0] if tags else None


def _read_range(text: str, start: int, stop: int) -> tuple[int, int]:
    """Return the length of a range and the size of the whole, as a `Content-Range` has them.

    Raises:
        PermanentError: If these are not the bytes that were requested.
    """
    match = _RANGE.match(text)
    if match is None:
        raise PermanentError(_NO_RANGES)
    first, last = int(match[1]), int(match[2]) + 1
    if first != start or not start <= last <= stop:
        raise PermanentError(f"it sends bytes {first:,} to {last:,}, and not those asked for")
    return last - first, int(match[3])
