"""Objects of S3 and of compatible stores."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kerasmem.compat.s3 import get_s3_object
from kerasmem.hdf5.remote.failures import PermanentError
from kerasmem.hdf5.remote.objects import Answer, ObjectInfo, RemoteObject, read_range, whole
from kerasmem.units import MIB

_READ_BYTES = MIB // 4


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
