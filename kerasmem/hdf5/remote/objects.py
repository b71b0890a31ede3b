"""One object of a store: what it is, and any range of its bytes, each answer proved to be of the same version."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kerasmem.hdf5.remote.failures import Changed, Final, Passing, classify, of_status
from kerasmem.units import KIB, MIB

HEAD = 64 * KIB
"""Bytes at the beginning of an object that come along when it is looked at: an HDF5 file's header lies there."""
_PIECE = MIB // 4
_CONNECT, _SILENCE = 15.0, 30.0  # seconds until a connection stands, and that a store may be silent
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_NO_RANGES = (
    "the server sends whole files only (it does not answer range requests), and reading parts is what training from "
    "it needs; put the file on one that supports ranges, or download it first"
)


@dataclass(frozen=True)
class Look:
    """An object as it was looked at.

    Args:
        size: its bytes.
        tag: what says which version it is: its ETag, or the time of its last change; None where the store tells none.
        head: its first bytes.
    """

    size: int
    tag: str | None
    head: bytes = field(default=b"", repr=False)


@dataclass
class Arriving:
    """Bytes on their way: `view` is filled from the front, and `done` says how far."""

    view: memoryview
    done: int = 0

    def put(self, data: bytes) -> None:
        """Take the next bytes."""
        end = self.done + len(data)
        if end > len(self.view):
            raise Passing("more bytes came than were asked for")
        self.view[self.done : end] = data
        self.done = end

    def check(self) -> None:
        """Raise if not all have come."""
        if self.done < len(self.view):
            raise Passing(f"only {self.done:,} of {len(self.view):,} bytes came")


class RemoteObject(Protocol):
    """An object of a store. Its coroutines belong to the event loop that it was made for."""

    proves: bool
    """Whether `fetch` finds out by itself that the object is another now."""

    async def look(self) -> Look:
        """Return size, version and first bytes."""

    async def fetch(self, start: int, into: Arriving, known: Look) -> None:
        """Fetch bytes from `start` on, as many as are missing in `into`."""


class HttpObject:
    """An object of a web server.

    Args:
        system: fsspec's HTTP file system.
        url: the object.
    """

    proves = True

    def __init__(self, system: Any, url: str) -> None:
        self._system = system
        self._url = url

    async def look(self) -> Look:
        """Ask for the first bytes; the answer's header tells the rest."""
        async with await self._get({"Range": f"bytes=0-{HEAD - 1}"}) as answer:
            if answer.status == 416 and answer.headers.get("Content-Range", "").endswith("/0"):
                return Look(0, self._tag(answer))
            if answer.status == 200 and answer.headers.get("Content-Length") == "0":
                return Look(0, self._tag(answer))
            _, stop, size = self._check(answer)
            if size is None:
                raise Final("the server does not say how long the file is (no length in Content-Range)")
            into = Arriving(memoryview(bytearray(stop)))
            await _take(answer.content.iter_any(), into)
            return Look(size, self._tag(answer), bytes(into.view))

    async def fetch(self, start: int, into: Arriving, known: Look) -> None:
        """Fetch a range."""
        first, last = start + into.done, start + len(into.view) - 1
        headers = {"Range": f"bytes={first}-{last}"}
        if known.tag is not None and known.tag.startswith('"'):
            headers["If-Match"] = known.tag
        async with await self._get(headers) as answer:
            if answer.status == 416:
                raise Changed("it is shorter")
            if answer.status == 200 and self._tag(answer) != known.tag:
                raise Changed(_differs(known.tag, self._tag(answer)))
            begin, stop, size = self._check(answer)
            if self._tag(answer) != known.tag or (size is not None and size != known.size):
                raise Changed(_differs(known.tag, self._tag(answer)))
            if (begin, stop) != (first, last + 1):
                raise Passing(f"bytes {begin:,} to {stop:,} came in place of {first:,} to {last + 1:,}")
            await _take(answer.content.iter_any(), into)

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
    def _check(answer: Any) -> tuple[int, int, int | None]:
        if answer.status == 200:
            raise Final(_NO_RANGES)
        if answer.status != 206:
            raise of_status(answer.status, answer.headers.get("Retry-After", ""))
        found = _RANGE.match(answer.headers.get("Content-Range", ""))
        if found is None or answer.headers.get("Content-Encoding", "identity") != "identity":
            raise Final(_NO_RANGES)
        return int(found[1]), int(found[2]) + 1, None if found[3] == "*" else int(found[3])

    @staticmethod
    def _tag(answer: Any) -> str | None:
        return answer.headers.get("ETag") or answer.headers.get("Last-Modified")


class S3Object:
    """An object of S3 or of what speaks its language.

    Args:
        system: s3fs's file system.
        path: bucket and key.
    """

    proves = True

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        bucket, key, version = system.split_path(path)
        if not key:
            raise Final("this names a bucket and no object in it")
        self._names = {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}

    async def look(self) -> Look:
        """Ask for the first bytes; the answer's header tells the rest."""
        try:
            answer = await self._system._call_s3("get_object", **self._names, Range=f"bytes=0-{HEAD - 1}")
        except Exception as error:
            if _is_empty(error):
                return Look(0, None)
            raise
        begin, stop, size = _s3_range(answer)
        into = Arriving(memoryview(bytearray(stop - begin)))
        await _take(_pieces(answer["Body"]), into)
        return Look(size, answer.get("ETag"), bytes(into.view))

    async def fetch(self, start: int, into: Arriving, known: Look) -> None:
        """Fetch a range."""
        first, last = start + into.done, start + len(into.view) - 1
        match = {} if known.tag is None else {"IfMatch": known.tag}
        answer = await self._system._call_s3("get_object", **self._names, **match, Range=f"bytes={first}-{last}")
        begin, stop, size = _s3_range(answer)
        if answer.get("ETag") != known.tag or size != known.size:
            answer["Body"].close()
            raise Changed(_differs(known.tag, answer.get("ETag")))
        if (begin, stop) != (first, last + 1):
            answer["Body"].close()
            raise Passing(f"bytes {begin:,} to {stop:,} came in place of {first:,} to {last + 1:,}")
        await _take(_pieces(answer["Body"]), into)


class AnyObject:
    """An object of a file system of which nothing is known but what all of fsspec's have.

    Its version is looked at again before what was read is used, for no answer says of which version it is.

    Args:
        system: the file system.
        path: the object.
    """

    proves = False
    _NAMES = ("generation", "ETag", "etag", "md5Hash", "md5", "mtime", "LastModified", "last_modified", "updated",
              "modified", "created")  # fmt: skip

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path

    async def look(self) -> Look:
        """Return what the file system says of the object, and its first bytes."""
        found = await self._call("info", self._path)
        if found.get("type") == "directory":
            raise Final("this is a folder, not a file")
        size = found.get("size")
        if size is None:
            raise Final("the store does not say how long the file is")
        tags = [f"{name}={found[name]}" for name in self._NAMES if found.get(name)]
        head = await self._call("cat_file", self._path, start=0, end=min(HEAD, size)) if size else b""
        return Look(int(size), tags[0] if tags else None, bytes(head))

    async def fetch(self, start: int, into: Arriving, known: Look) -> None:
        """Fetch a range."""
        into.put(await self._call("cat_file", self._path, start=start + into.done, end=start + len(into.view)))

    async def _call(self, name: str, *arguments: Any, **settings: Any) -> Any:
        coroutine = getattr(self._system, f"_{name}", None)
        if coroutine is not None and getattr(self._system, "asynchronous", False):
            return await coroutine(*arguments, **settings)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, lambda: getattr(self._system, name)(*arguments, **settings))


async def refuse_changed(seen: RemoteObject, known: Look) -> None:
    """Raise `Changed` if an object is not as it was looked at."""
    now = await seen.look()
    if now.size != known.size or now.tag != known.tag:
        raise Changed(_differs(known.tag, now.tag))


def _differs(before: str | None, now: str | None) -> str:
    return "it has another length" if before == now else "its ETag or time of change is another"


def _is_empty(error: Exception) -> bool:
    cause = getattr(error, "__cause__", None)
    return any("InvalidRange" in str(getattr(each, "response", "")) for each in (error, cause))


def _s3_range(answer: Mapping[str, Any]) -> tuple[int, int, int]:
    found = _RANGE.match(answer.get("ContentRange", ""))
    if found is None or found[3] == "*":
        answer["Body"].close()
        raise Final(_NO_RANGES)
    return int(found[1]), int(found[2]) + 1, int(found[3])


async def _pieces(body: Any) -> Any:
    try:
        while data := await body.read(_PIECE):
            yield data
    finally:
        body.close()


async def _take(pieces: Any, into: Arriving) -> None:
    try:
        async for data in pieces:
            into.put(data)
    except Exception as error:
        # A body that breaks off is asked for again from there.
        failure = classify(error)
        raise Passing(str(failure)) from None if isinstance(failure, Final) else failure
    into.check()
