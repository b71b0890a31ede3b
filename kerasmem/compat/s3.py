"""S3 through private parts of s3fs."""

from __future__ import annotations

from typing import Any

from kerasmem.compat.borrowing import Borrowed

_URLS = "reading s3:// URLs"
CALL_S3 = Borrowed("s3fs:S3FileSystem._call_s3(method)", feature=_URLS)


def is_s3(system: Any) -> bool:
    """Return whether a file system is s3fs's, or one that speaks as it does."""
    return hasattr(system, "_call_s3")


async def get_s3_object(system: Any, **settings: Any) -> Any:
    """Return S3's answer to GetObject, its ETag and its body among it."""
    CALL_S3.get()
    return await system._call_s3("get_object", **settings)
