"""One object of a store: its size, version, and ranges proved to be of that version."""

from __future__ import annotations

import asyncio
import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kerasmem.compat.files import call_file_system, get_s3_object
from kerasmem.hdf5.io.failures import ChangedError, PermanentError, TransientError, of_status
from kerasmem.units import KIB, MIB

HEAD = 64 * KIB
"""Bytes at the beginning of an object that come along with its version: an HDF5 file's header lies there."""
_READ_BYTES = MIB // 4
_LEAST_RATE = KIB  # bytes a second: a store that brings fewer is asked again
_CONNECT, _SILENCE = 15.0, 30.0  # seconds until a connection stands, and that a store may be silent
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_NO_RANGES = (
    "the server sends whole files only (it does not answer range requests), and reading parts is what training from "
    "it needs; put the file on one that supports ranges, or download it first"
)


@dataclass(frozen=True)
class ObjectInfo:
    """An object's size and version, and its first bytes.

    Args:
        size: its bytes.
        tag: what says which version it is: its ETag, or the time of its last change; None if the store tells none.
        head: its first bytes.
    """

    size: int
    tag: str | None
    head: bytes = field(default=b"", repr=False)


@dataclass
class PartialRange:
    """A range on its way: `view` is filled from the front, and `done` says how far."""

    view: memoryview
    done: int = 0

    def put(self, data: bytes) -> None:
        """Take the next bytes."""
        end = self.done + len(data)
        if end > len(self.view):
            raise TransientError("more bytes came than were asked for")
        self.view[self.done : end] = data
        self.done = end

    def check(self) -> None:
        """Raise if not all have come."""
        if self.done < len(self.view):
            raise TransientError(f"only {self.done:,} of {len(self.view):,} bytes came")

    async def fill(self, parts: AsyncIterator[bytes]) -> None:
        """Take an answer's body. A body that breaks off is requested again from there."""
        try:
            async for data in _without_silence(parts):
                self.put(data)
        except TransientError:
            raise
        except Exception as error:
            # aiohttp calls a body that is too short a "400", which no server has answered.
            kind = type(error).__name__
            raise TransientError(
                f"the answer broke off after {self.done:,} of {len(self.view):,} bytes ({kind})"
            ) from None
        self.check()


async def _without_silence(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield data as long as enough comes. aiohttp's own limit misses a broken chunked coding."""
    clock = asyncio.get_running_loop().time
    since, came = clock(), 0
    try:
        while True:
            data = await asyncio.wait_for(anext(parts), _SILENCE)
            yield data
            came += len(data)
            if clock() - since >= _SILENCE:
                if came < _LEAST_RATE * _SILENCE:
                    raise TransientError(f"only {came:,} bytes came in {_SILENCE:g} s")
                since, came = clock(), 0
    except StopAsyncIteration:
        return
    except asyncio.TimeoutError:
        raise TransientError(f"nothing came for {_SILENCE:g} s") from None


async def _answered(asked: Awaitable[Any]) -> Any:
    """Return an answer once its header is there. aiohttp's own limit ends with a "100 Continue"."""
    try:
        return await asyncio.wait_for(asked, _CONNECT + _SILENCE)
    except asyncio.TimeoutError:
        raise TransientError(f"no answer came for {_CONNECT + _SILENCE:g} s") from None


@dataclass
class Answer:
    """A store's answer to a request for a range.

    Args:
        start: first byte that comes.
        stop: byte after the last.
        size: bytes of the whole object; None if the store does not say.
        tag: its version; None if the store tells none.
        parts: the bytes, as they come.
    """

    start: int
    stop: int
    size: int | None
    tag: str | None
    parts: AsyncIterator[bytes]


class RemoteObject(ABC):
    """An object of a store. Its coroutines belong to the event loop that it was made for.

    Attributes:
        proves_version: whether `fetch` finds out by itself that the object is another version now.
    """

    proves_version = True

    @abstractmethod
    def get(self, start: int, stop: int, known: ObjectInfo | None = None) -> AbstractAsyncContextManager[Answer]:
        """Request a range, of the known version if any."""

    async def info(self) -> ObjectInfo:
        """Return size, version and first bytes: these are asked for, and the answer's header tells the rest."""
        async with self.get(0, HEAD) as answer:
            if answer.size is None:
                raise PermanentError("the store does not say how long the file is")
            if answer.start or answer.stop > HEAD:  # nobody reserves what a server names
                raise PermanentError(f"it sends bytes {answer.start:,} to {answer.stop:,}, and not those asked for")
            into = PartialRange(memoryview(bytearray(answer.stop)))
            await into.fill(answer.parts)
            return ObjectInfo(answer.size, answer.tag, bytes(into.view))

    async def fetch(self, start: int, into: PartialRange, known: ObjectInfo) -> None:
        """Fetch bytes from `start` on, as many as are missing in `into`, of the version that is known."""
        first, stop = start + into.done, start + len(into.view)
        async with self.get(first, stop, known) as answer:
            _refuse_other(known, answer.tag, answer.size)
            if (answer.start, answer.stop) != (first, stop):
                raise TransientError(
                    f"bytes {answer.start:,} to {answer.stop:,} came in place of {first:,} to {stop:,}"
                )
            await into.fill(answer.parts)

    async def refuse_change(self, known: ObjectInfo) -> None:
        """Raise `ChangedError` if the object is not the version that is known."""
        now = await self.info()
        _refuse_other(known, now.tag, now.size)


class HttpObject(RemoteObject):
    """An object of a web server.

    Args:
        system: fsspec's HTTP file system.
        url: the object.
    """

    def __init__(self, system: Any, url: str) -> None:
        self._system = system
        self._url = url

    @asynccontextmanager
    async def get(self, start: int, stop: int, known: ObjectInfo | None = None) -> AsyncIterator[Answer]:
        """Ask for a range."""
        import aiohttp

        session = await self._system.set_session()
        options = dict(self._system.kwargs)
        options.setdefault("timeout", aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_SILENCE))
        # Bytes are counted as they are stored, so none may be compressed on their way.
        headers = {**options.pop("headers", {}), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        if known is not None and known.tag is not None and known.tag.startswith('"'):
            headers["If-Match"] = known.tag
        asked = session.get(self._system.encode_url(self._url), headers=headers, **options)
        async with await _answered(asked) as answer:
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            place = answer.headers.get("Content-Range", "")
            if known is not None and answer.status == 416:
                raise ChangedError("it is shorter")
            if known is not None and answer.status == 200:
                _refuse_other(known, tag, None)
            if (answer.status == 416 and place.endswith("/0")) or (
                answer.status == 200 and answer.headers.get("Content-Length") == "0"
            ):
                yield Answer(0, 0, 0, tag, answer.content.iter_any())
                return
            if answer.status not in (200, 206):
                raise of_status(answer.status, answer.headers.get("Retry-After", ""))
            if answer.status == 200 or answer.headers.get("Content-Encoding", "identity") != "identity":
                raise PermanentError(_NO_RANGES)
            yield Answer(*read_range(place), tag, answer.content.iter_any())


class S3Object(RemoteObject):
    """An object of S3 or of a compatible store.

    Args:
        system: s3fs's file system.
        path: bucket and key.
    """

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        bucket, key, version = system.split_path(path)
        if not key:
            raise PermanentError("this names a bucket and no object in it")
        self._names = {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}

    @asynccontextmanager
    async def get(self, start: int, stop: int, known: ObjectInfo | None = None) -> AsyncIterator[Answer]:
        """Request a range."""
        match = {} if known is None or known.tag is None else {"IfMatch": known.tag}
        try:
            answer = await get_s3_object(self._system, **self._names, **match, Range=f"bytes={start}-{stop - 1}")
        except Exception as error:
            said = [str(getattr(each, "response", "")) for each in (error, error.__cause__)]
            if known is not None or not any("InvalidRange" in text for text in said):
                raise
            yield Answer(0, 0, 0, None, whole(b""))  # it is empty
            return
        with contextlib.closing(answer["Body"]) as body:
            yield Answer(*read_range(answer.get("ContentRange", "")), answer.get("ETag"), _parts(body))


async def _parts(body: Any) -> AsyncIterator[bytes]:
    while data := await body.read(_READ_BYTES):
        yield data


class OtherObject(RemoteObject):
    """An object of a file system that has no more than all of fsspec's have.

    No answer says which version it is, so the version is asked for before what was read is used.

    Args:
        system: the file system.
        path: the object.
    """

    proves_version = False
    _VERSIONS = ("generation", "ETag", "etag", "md5Hash", "md5", "mtime", "LastModified", "last_modified", "updated",
                 "modified", "created")  # fmt: skip

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path

    @asynccontextmanager
    async def get(self, start: int, stop: int, known: ObjectInfo | None = None) -> AsyncIterator[Answer]:
        """Request a range of any version."""
        if known is None:
            found = await call_file_system(self._system, "info", self._path)
            if found.get("type") == "directory":
                raise PermanentError("this is a folder, not a file")
            size = found.get("size")
            tags = [f"{name}={found[name]}" for name in self._VERSIONS if found.get(name)]
            tag, stop = tags[0] if tags else None, min(stop, size or 0)
        else:
            size, tag = known.size, known.tag
        data = b""
        if start < stop:
            data = await call_file_system(self._system, "cat_file", self._path, start=start, end=stop)
        yield Answer(start, start + len(data), size, tag, whole(data))


def _refuse_other(known: ObjectInfo, tag: str | None, size: int | None) -> None:
    if tag != known.tag:
        raise ChangedError("its ETag or time of change is another")
    if size is not None and size != known.size:
        raise ChangedError("it has another length")


def read_range(text: str) -> tuple[int, int, int | None]:
    """Return first byte, byte after the last and the size of the whole, as a `Content-Range` has them."""
    found = _RANGE.match(text)
    if found is None:
        raise PermanentError(_NO_RANGES)
    return int(found[1]), int(found[2]) + 1, None if found[3] == "*" else int(found[3])


async def whole(data: bytes) -> AsyncIterator[bytes]:
    """Yield bytes as an answer that comes in one piece."""
    yield data
