"""One object of a store: what it is, and any range of its bytes, each answer proved to be of the same version."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kerasmem.compat.file_systems import call_file_system, get_s3_object
from kerasmem.hdf5.remote.failures import ChangedError, PermanentError, TransientError, classify, of_status
from kerasmem.units import KIB, MIB

HEAD = 64 * KIB
"""Bytes at the beginning of an object that come along with its version: an HDF5 file's header lies there."""
_READ_BYTES = MIB // 4
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
        tag: what says which version it is: its ETag, or the time of its last change; None where the store tells none.
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
        """Take what an answer's body brings; a body that breaks off is asked for again from there."""
        try:
            async for data in parts:
                self.put(data)
        except Exception as error:
            failure = classify(error)
            raise TransientError(str(failure)) from None if isinstance(failure, PermanentError) else failure
        self.check()


class RemoteObject(ABC):
    """An object of a store. Its coroutines belong to the event loop that it was made for.

    Attributes:
        proves_version: whether `fetch` finds out by itself that the object is another version now.
    """

    proves_version = True

    @abstractmethod
    async def info(self) -> ObjectInfo:
        """Return size, version and first bytes."""

    @abstractmethod
    async def fetch(self, start: int, into: PartialRange, known: ObjectInfo) -> None:
        """Fetch bytes from `start` on, as many as are missing in `into`, of the version that is known."""

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

    async def info(self) -> ObjectInfo:
        """Ask for the first bytes; the answer's header tells the rest."""
        async with await self._get({"Range": f"bytes=0-{HEAD - 1}"}) as answer:
            empty = answer.status == 416 and answer.headers.get("Content-Range", "").endswith("/0")
            if empty or (answer.status == 200 and answer.headers.get("Content-Length") == "0"):
                return ObjectInfo(0, self._tag(answer))
            _, stop, size = self._range(answer)
            if size is None:
                raise PermanentError("the server does not say how long the file is (no length in Content-Range)")
            into = PartialRange(memoryview(bytearray(stop)))
            await into.fill(answer.content.iter_any())
            return ObjectInfo(size, self._tag(answer), bytes(into.view))

    async def fetch(self, start: int, into: PartialRange, known: ObjectInfo) -> None:
        """Fetch a range."""
        first, last = start + into.done, start + len(into.view) - 1
        headers = {"Range": f"bytes={first}-{last}"}
        if known.tag is not None and known.tag.startswith('"'):
            headers["If-Match"] = known.tag
        async with await self._get(headers) as answer:
            if answer.status == 416:
                raise ChangedError("it is shorter")
            if answer.status == 200:
                _refuse_other(known, self._tag(answer), None)
            begin, stop, size = self._range(answer)
            _refuse_other(known, self._tag(answer), size)
            _check_range(begin, stop, first, last)
            await into.fill(answer.content.iter_any())

    async def _get(self, headers: Mapping[str, str]) -> Any:
        import aiohttp

        session = await self._system.set_session()
        options = dict(self._system.kwargs)
        given = dict(options.pop("headers", {}))
        options.setdefault("timeout", aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_SILENCE))
        # Bytes are counted as they are stored, so none may be compressed on their way.
        headers = {**given, **headers, "Accept-Encoding": "identity"}
        return session.get(self._system.encode_url(self._url), headers=headers, **options)

    @staticmethod
    def _range(answer: Any) -> tuple[int, int, int | None]:
        if answer.status == 200:
            raise PermanentError(_NO_RANGES)
        if answer.status != 206:
            raise of_status(answer.status, answer.headers.get("Retry-After", ""))
        found = _RANGE.match(answer.headers.get("Content-Range", ""))
        if found is None or answer.headers.get("Content-Encoding", "identity") != "identity":
            raise PermanentError(_NO_RANGES)
        return int(found[1]), int(found[2]) + 1, None if found[3] == "*" else int(found[3])

    @staticmethod
    def _tag(answer: Any) -> str | None:
        return answer.headers.get("ETag") or answer.headers.get("Last-Modified")


class S3Object(RemoteObject):
    """An object of S3 or of what speaks its language.

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

    async def info(self) -> ObjectInfo:
        """Ask for the first bytes; the answer's header tells the rest."""
        try:
            answer = await get_s3_object(self._system, **self._names, Range=f"bytes=0-{HEAD - 1}")
        except Exception as error:
            said = [str(getattr(each, "response", "")) for each in (error, error.__cause__)]
            if any("InvalidRange" in text for text in said):
                return ObjectInfo(0, None)
            raise
        with contextlib.closing(answer["Body"]) as body:
            begin, stop, size = self._range(answer)
            into = PartialRange(memoryview(bytearray(stop - begin)))
            await into.fill(_parts(body))
        return ObjectInfo(size, answer.get("ETag"), bytes(into.view))

    async def fetch(self, start: int, into: PartialRange, known: ObjectInfo) -> None:
        """Fetch a range."""
        first, last = start + into.done, start + len(into.view) - 1
        match = {} if known.tag is None else {"IfMatch": known.tag}
        answer = await get_s3_object(self._system, **self._names, **match, Range=f"bytes={first}-{last}")
        with contextlib.closing(answer["Body"]) as body:
            begin, stop, size = self._range(answer)
            _refuse_other(known, answer.get("ETag"), size)
            _check_range(begin, stop, first, last)
            await into.fill(_parts(body))

    @staticmethod
    def _range(answer: Mapping[str, Any]) -> tuple[int, int, int]:
        found = _RANGE.match(answer.get("ContentRange", ""))
        if found is None or found[3] == "*":
            raise PermanentError(_NO_RANGES)
        return int(found[1]), int(found[2]) + 1, int(found[3])


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

    async def info(self) -> ObjectInfo:
        """Return what the file system says of the object, and its first bytes."""
        found = await call_file_system(self._system, "info", self._path)
        if found.get("type") == "directory":
            raise PermanentError("this is a folder, not a file")
        size = found.get("size")
        if size is None:
            raise PermanentError("the store does not say how long the file is")
        tags = [f"{name}={found[name]}" for name in self._VERSIONS if found.get(name)]
        head = b""
        if size:
            head = await call_file_system(self._system, "cat_file", self._path, start=0, end=min(HEAD, size))
        return ObjectInfo(int(size), tags[0] if tags else None, bytes(head))

    async def fetch(self, start: int, into: PartialRange, known: ObjectInfo) -> None:
        """Fetch a range."""
        first, stop = start + into.done, start + len(into.view)
        into.put(await call_file_system(self._system, "cat_file", self._path, start=first, end=stop))


def _refuse_other(known: ObjectInfo, tag: str | None, size: int | None) -> None:
    if tag != known.tag:
        raise ChangedError("its ETag or time of change is another")
    if size is not None and size != known.size:
        raise ChangedError("it has another length")


def _check_range(begin: int, stop: int, first: int, last: int) -> None:
    if (begin, stop) != (first, last + 1):
        raise TransientError(f"bytes {begin:,} to {stop:,} came in place of {first:,} to {last + 1:,}")


async def _parts(body: Any) -> AsyncIterator[bytes]:
    while data := await body.read(_READ_BYTES):
        yield data
