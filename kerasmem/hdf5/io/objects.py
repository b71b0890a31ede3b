"""Objects of a store: size, version and ranges of that version, with retries and explained failures."""

from __future__ import annotations

import asyncio
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kerasmem.compat.file_systems import call_file_system
from kerasmem.hdf5.format.layout import one_line
from kerasmem.hdf5.format.urls import redact
from kerasmem.units import KIB

HEAD = 64 * KIB
"""Bytes fetched along with an object's version: the first ones, with the header of an HDF5 file."""
_LEAST_RATE = 32 * KIB  # bytes per second; slower requests are retried
_CONNECT, _SILENCE = 15.0, 30.0  # seconds to connect, and between bytes
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_NO_RANGES = (
    "the server sends whole files only (it does not answer range requests), but training reads parts; put the file on "
    "a server that supports ranges, or download it first"
)
_LINK_SECONDS = 3600  # for which a link is signed
_NOT_OF_LINKS = (404, 412, 429)  # failures that s3fs would have too
_TRIES = 7
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 8.0  # seconds
_Result = TypeVar("_Result")
_NO_CREDENTIALS = "no credentials were found; pass them in storage_options, or {'anon': True} if the bucket is public"
_FORBIDDEN = (
    "no permission to read it; pass credentials in storage_options, or a new signed link if the old one has expired"
)
_MISSING = "the object does not exist"
_PERMANENT = {
    401: _FORBIDDEN, 403: _FORBIDDEN, "PermissionError": _FORBIDDEN,
    404: _MISSING, 410: _MISSING, "FileNotFoundError": _MISSING,
    "NoCredentialsError": _NO_CREDENTIALS, "PartialCredentialsError": _NO_CREDENTIALS,
}  # fmt: skip
"""Messages for failures that a retry cannot fix, by HTTP status or class of the error."""
_WRONG_SETTINGS = (ValueError, TypeError, LookupError, AttributeError, NotImplementedError)


class PermanentError(Exception):
    """A failure that a retry cannot fix. The message names the fix."""


class ChangedError(PermanentError):
    """The object is no longer the known version.

    Args:
        difference: difference of the two versions, such as "its ETag changed".
    """

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"the file was replaced or rewritten while in use ({difference}); make the sequence again, and its index "
            "if it has one"
        )


async def retry(ask: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return the answer of a store, retrying transient failures with exponential backoff.

    Raises:
        PermanentError: If a retry cannot help, or seven attempts fail.
        ChangedError: If the object has another version.
    """
    reason = ""
    for attempt in range(_TRIES):
        if attempt:
            pause = min(_FIRST_WAIT * 2 ** (attempt - 1), _LONGEST_WAIT)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        try:
            return await ask()
        except Exception as error:
            reason = _explain(error)
    raise PermanentError(f"the store failed {_TRIES} times in a row, most recently with: {reason}")


def _explain(error: Exception) -> str:
    """Describe a transient failure of a store.

    Raises:
        PermanentError: If a retry cannot fix it.
    """
    if isinstance(error, PermanentError):
        raise error
    status = getattr(error, "status" if hasattr(error, "status") else "code", 0)  # of aiohttp, or of gcsfs
    kind = type(error).__name__
    if status == 412:
        raise ChangedError("its ETag changed") from None
    if status in _PERMANENT or kind in _PERMANENT:
        raise PermanentError(_PERMANENT[status if status in _PERMANENT else kind]) from None
    text = f"{kind}: {redact(one_line(str(error), 300))}".removesuffix(": ")
    if isinstance(status, int) and status >= 400:
        text = f"HTTP status {status}"
        is_permanent = status < 500 and status not in (408, 425, 429)
    else:
        is_permanent = isinstance(error, _WRONG_SETTINGS) or "Redirect" in kind
    if is_permanent:
        raise PermanentError(f"it cannot be read: {text}") from None
    return text


@dataclass(frozen=True)
class ObjectInfo:
    """Size and version of an object, with bytes of it if they were requested.

    Args:
        size: size in bytes.
        tag: version, an ETag or modification time; None if the store reports neither.
        data: the requested bytes. Defaults to b"".
    """

    size: int
    tag: str | None
    data: bytes = field(default=b"", repr=False)


class RemoteObject(ABC):
    """An object of a store. Its coroutines must run in the event loop of its store."""

    @abstractmethod
    async def get(self, start: int, stop: int, known: ObjectInfo | None = None) -> ObjectInfo:
        """Request a range once, of a known version if any. It may end early, at the end of the object."""

    async def info(self) -> ObjectInfo:
        """Request size, version and first bytes."""
        return await retry(lambda: _in_time(HEAD, self.get(0, HEAD)))

    async def read(self, start: int, stop: int, known: ObjectInfo) -> bytes:
        """Return a range of the known version.

        Raises:
            PermanentError: If it cannot be fetched.
            ChangedError: If the object has another version.
        """
        return await retry(lambda: _in_time(stop - start, self._read(start, stop, known)))

    async def _read(self, start: int, stop: int, known: ObjectInfo) -> bytes:
        answer = await self.get(start, stop, known)
        if (answer.size, answer.tag) != (known.size, known.tag):
            raise ChangedError("its size, ETag or modification time changed")
        if len(answer.data) != stop - start:
            raise EOFError(f"only {len(answer.data):,} of {stop - start:,} bytes came")
        return answer.data


async def _in_time(size: int, answer: Any) -> Any:
    """Limit the time of a request. aiohttp's limits miss broken chunked encoding and repeated "100 Continue"."""
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

    async def get(self, start: int, stop: int, known: ObjectInfo | None = None) -> ObjectInfo:
        """Request a range. fsspec's method returns no version, and does not limit the size of an answer."""
        import aiohttp

        session = await self._system.set_session()
        options = dict(self._system.kwargs)
        options.setdefault("timeout", aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_SILENCE))
        # A compressed answer would have other offsets.
        headers = {**options.pop("headers", {}), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        if known is not None and known.tag is not None and known.tag.startswith('"'):
            headers["If-Match"] = known.tag
        async with session.get(self._system.encode_url(self._url), headers=headers, **options) as answer:
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            is_empty = answer.status == 416 or (answer.status == 200 and answer.headers.get("Content-Length") == "0")
            if is_empty:
                return ObjectInfo(0, tag)
            answer.raise_for_status()
            if answer.status != 206 or answer.headers.get("Content-Encoding", "identity") != "identity":
                raise PermanentError(_NO_RANGES)
            length, size = _read_range(answer.headers.get("Content-Range", ""), start, stop)
            data = await answer.content.readexactly(length)
            if await answer.content.read(1):
                raise EOFError(f"more than {length:,} bytes came")
            return ObjectInfo(size, tag, data)


class OtherObject(RemoteObject):
    """An object of another fsspec file system.

    Its answers carry no version, so the version is requested after the bytes.

    Args:
        system: the file system.
        path: the object.
    """

    _VERSIONS = ("generation", "ETag", "etag", "md5Hash", "md5", "mtime", "LastModified", "last_modified", "updated",
                 "modified", "created")  # fmt: skip

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path

    async def get(self, start: int, stop: int, known: ObjectInfo | None = None) -> ObjectInfo:
        """Request a range."""
        if known is None:
            size, _ = await self._version()
            stop = min(stop, size)
        data = b""
        if start < stop:
            data = await call_file_system(self._system, "cat_file", self._path, start=start, end=stop)
        return ObjectInfo(*await self._version(), data)

    async def _version(self) -> tuple[int, str | None]:
        """Request the current size and version."""
        entry = await call_file_system(self._system, "info", self._path)
        if entry.get("type") == "directory":
            raise PermanentError("this is a folder, not a file")
        tags = [f"{name}={entry[name]}" for name in self._VERSIONS if entry.get(name)]
        return entry.get("size") or 0, tags[0] if tags else None


@dataclass
class S3Links:
    """Access to the objects of an S3 store through signed links.

    A link is signed once for all ranges of its object. s3fs takes milliseconds of CPU time to sign each request, and
    its answers carry no version.

    Args:
        web: fsspec's HTTP file system, which sends the requests.
        work: whether the store accepts signed links. Defaults to None: unknown.
    """

    web: Any
    work: bool | None = None


class S3Object(OtherObject):
    """An object of S3, read through a signed link, or through s3fs if the store refuses links.

    Args:
        system: s3fs's file system.
        path: bucket and key.
        links: access to its store through links.
    """

    def __init__(self, system: Any, path: str, links: S3Links) -> None:
        super().__init__(system, path)
        self._links = links
        self._link: HttpObject | None = None
        self._signed_at = 0.0

    async def get(self, start: int, stop: int, known: ObjectInfo | None = None) -> ObjectInfo:
        """Request a range."""
        if self._links.work is not False:
            try:
                answer = await (await self._current_link()).get(start, stop, known)
            except Exception as error:
                status = getattr(error, "status", 0)
                has_expired = status in (400, 401, 403)  # with the credentials that signed it, once links have worked
                if status in _NOT_OF_LINKS or status >= 500 or (self._links.work and not has_expired):
                    raise
                self._link = None
                if self._links.work is None:
                    self._links.work = False
            else:
                self._links.work = True
                return answer
        answer = await super().get(start, stop, known)
        return replace(answer, tag=answer.tag and answer.tag.removeprefix("ETag="))

    async def _current_link(self) -> HttpObject:
        now = time.monotonic()
        if self._link is None or now - self._signed_at > _LINK_SECONDS / 2:
            url = await call_file_system(self._system, "url", self._path, expires=_LINK_SECONDS)
            self._link = HttpObject(self._links.web, url)
            self._signed_at = now
        return self._link


def _read_range(text: str, start: int, stop: int) -> tuple[int, int]:
    """Read a `Content-Range` header. Return the length of the range and the size of the object, in bytes.

    Raises:
        PermanentError: If the server sends other bytes than requested.
    """
    match = _RANGE.match(text)
    if match is None:
        raise PermanentError(_NO_RANGES)
    first, last = int(match[1]), int(match[2]) + 1
    if first != start or not start <= last <= stop:
        raise PermanentError(f"bytes {start:,} to {stop:,} were requested, but the server sends {first:,} to {last:,}")
    return last - first, int(match[3])
