"""Which remote files a pattern means, and the versions of many files, asked for all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kerasmem.compat.file_systems import call_file_system
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import shown
from kerasmem.hdf5.remote.access import REQUESTS, RemoteAccess
from kerasmem.hdf5.remote.failures import ChangedError, PermanentError, retry
from kerasmem.hdf5.remote.fetcher import RangeFetcher
from kerasmem.hdf5.remote.file import keep_head
from kerasmem.hdf5.remote.file_systems import FileSystems
from kerasmem.hdf5.remote.objects import ObjectInfo
from kerasmem.hdf5.remote.urls import scheme_of


def is_pattern(url: str) -> bool:
    """Return whether a URL stands for several; "?" asks a web server something, and stands for a letter elsewhere."""
    http = scheme_of(url) in ("http", "https")
    place = url.split("?", 1)[0] if http else url
    return any(sign in place.split("://", 1)[1] for sign in ("*" if http else "*?["))


def expand(url: str, access: RemoteAccess) -> list[str]:
    """Return the URLs of all objects that match a pattern, in no order.

    Raises:
        DataError: none does, or they cannot be listed.
    """
    fetcher = RangeFetcher(access)
    try:
        found = fetcher.run(retry(lambda: _glob(url, fetcher.file_systems)))
    except (PermanentError, ChangedError) as error:
        raise DataError(f"{shown(url)}: what matches this pattern cannot be listed: {error}") from None
    finally:
        fetcher.close()
    if not found:
        raise DataError(f"{shown(url)}: no file matches this pattern; a list of URLs can be given too")
    return found


async def _glob(url: str, file_systems: FileSystems) -> list[str]:
    system, path = file_systems.system_of(url)
    names = await call_file_system(system, "glob", path)
    if scheme_of(url) in ("http", "https"):
        # A page may name whatever it likes; only what lies on the same server is meant.
        server = url.split("://", 1)[0] + "://" + url.split("://", 1)[1].split("/", 1)[0] + "/"
        return [name for name in names if name.startswith(server)]
    return [f"{url.split('://', 1)[0]}://{name.lstrip('/') if scheme_of(url) != 'memory' else name}" for name in names]


def ask_for_info(urls: Sequence[str], access: RemoteAccess) -> dict[str, ObjectInfo]:
    """Return size, version and first bytes of files, asked for all at once.

    Raises:
        DataError: one of them cannot be read.
    """
    fetcher = RangeFetcher(access)

    async def ask_all() -> list[ObjectInfo]:
        few = asyncio.Semaphore(REQUESTS)

        async def ask(url: str) -> ObjectInfo:
            async with few:
                try:
                    return await retry(fetcher.file_systems.object_at(url).info)
                except (PermanentError, ChangedError) as error:
                    raise DataError(f"{shown(url)}: {error}") from None

        return await asyncio.gather(*map(ask, urls))

    try:
        found = dict(zip(urls, fetcher.run(ask_all()), strict=True))
    finally:
        fetcher.close()
    for url, info in found.items():
        keep_head(url, info)
    return found
