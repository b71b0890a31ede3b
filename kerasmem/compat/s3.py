"""S3 through private parts of s3fs."""

from __future__ import annotations

from typing import Any

from kerasmem.compat.borrowing import Borrowed

_URLS = "reading s3:// URLs"
CALL_S3 = Borrowed("s3fs:S3FileSystem._call_s3(method)", feature=_URLS)
_loaders: dict[Any, Any] = {}  # by the folders they look into: what botocore has read of S3's description


def is_s3(system: Any) -> bool:
    """Return whether a file system is s3fs's, or one that speaks as it does."""
    return hasattr(system, "_call_s3")


def share_description(system: Any) -> None:
    """Have a file system take botocore's description of S3 from the one before it.

    Each would read and parse its own otherwise, which takes a tenth of a second of processor time.
    """
    from aiobotocore.session import AioSession

    if system.session is None:
        session = AioSession(**system.kwargs)
        where = session.get_config_variable("data_path")
        session.register_component("data_loader", _loaders.setdefault(where, session.get_component("data_loader")))
        system.session = session


async def get_s3_object(system: Any, **settings: Any) -> Any:
    """Return S3's answer to GetObject, its ETag and its body among it."""
    CALL_S3.get()
    return await system._call_s3("get_object", **settings)
