"""Objects of S3 and of compatible stores.

s3fs and botocore take one to two milliseconds of processor time to sign a request and to read its answer, more than the
bytes of a block do. A link that is signed once serves for any range of its object, and asking for that takes a sixth.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kerasmem.compat.s3 import get_s3_object, get_signed, sign_s3_link, takes_signed_links
from kerasmem.hdf5.remote.failures import PermanentError, of_status
from kerasmem.hdf5.remote.objects import Answer, ObjectInfo, RemoteObject, read_range, whole
from kerasmem.units import MIB

_READ_BYTES = MIB // 4
_VALID, _RENEWED = 3600, 1800  # seconds that a link is signed for, and after which it is signed anew
_REFUSALS = 2  # in a row, after which a store is asked in the ordinary way alone


class S3Links:
    """State of a store's signed links.

    Args:
        system: s3fs's file system.
    """

    def __init__(self, system: Any) -> None:
        self.system = system
        self._refused = 0 if takes_signed_links(system) else _REFUSALS

    @property
    def usable(self) -> bool:
        """Whether the store may take them."""
        return self._refused < _REFUSALS

    def note(self, *, refused: bool) -> None:
        """Note whether it refused one."""
        self._refused = self._refused + 1 if refused else 0


class S3Object(RemoteObject):
    """An object of S3 or of a compatible store.

    Args:
        links: of its store.
        path: bucket and key.
    """

    def __init__(self, links: S3Links, path: str) -> None:
        self._links = links
        bucket, key, version = links.system.split_path(path)
        if not key:
            raise PermanentError("this names a bucket and no object in it")
        self._names = {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}
        self._link: tuple[str, float] | None = None  # and when it was signed

    @asynccontextmanager
    async def get(self, start: int, stop: int, known: ObjectInfo | None = None) -> AsyncIterator[Answer]:
        """Ask for a range."""
        span = f"bytes={start}-{stop - 1}"
        if known is not None and self._links.usable:
            answer = await self._by_link(span, known.tag)
            if answer is not None:
                with contextlib.closing(answer.raw):
                    headers = answer.headers
                    yield Answer(
                        *read_range(headers.get("content-range", "")), headers.get("etag"), _parts(answer.raw.content)
                    )
                return
        match = {} if known is None or known.tag is None else {"IfMatch": known.tag}
        try:
            answer = await get_s3_object(self._links.system, **self._names, **match, Range=span)
        except Exception as error:
            said = [str(getattr(each, "response", "")) for each in (error, error.__cause__)]
            if known is not None or not any("InvalidRange" in text for text in said):
                raise
            yield Answer(0, 0, 0, None, whole(b""))  # it is empty
            return
        with contextlib.closing(answer["Body"]) as body:
            yield Answer(*read_range(answer.get("ContentRange", "")), answer.get("ETag"), _parts(body))

    async def _by_link(self, span: str, tag: str | None) -> Any:
        """Return the answer to a signed link; None if an ordinary request is needed to name the failure."""
        now = time.monotonic()
        if self._link is None or now - self._link[1] > _RENEWED:
            try:
                self._link = await sign_s3_link(self._links.system, self._names, _VALID), now
            except Exception:
                self._links.note(refused=True)
                return None
        headers = {"Range": span, **({} if tag is None else {"If-Match": tag})}
        answer = await get_signed(self._links.system, self._names["Bucket"], self._link[0], headers)
        status = answer.status_code
        refused = status not in (200, 206, 404, 412, 416, 429) and status < 500
        self._links.note(refused=refused)
        if status in (200, 206):
            return answer
        answer.raw.close()
        if not refused:
            raise of_status(status, answer.headers.get("retry-after", ""))
        self._link = None  # credentials may have run out
        return None


async def _parts(body: Any) -> AsyncIterator[bytes]:
    while data := await body.read(_READ_BYTES):
        yield data
