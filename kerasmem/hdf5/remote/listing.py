"""Which remote files a pattern means, and how many files look, asked all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kerasmem.errors import DataError
from kerasmem.hdf5.layout import shown
from kerasmem.hdf5.remote.access import REQUESTS, RemoteAccess
from kerasmem.hdf5.remote.document import keep
from kerasmem.hdf5.remote.failures import Changed, Final
from kerasmem.hdf5.remote.link import Link
from kerasmem.hdf5.remote.objects import Look
from kerasmem.hdf5.remote.stores import Stores, insist
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
    link = Link(access)
    try:
        found = link.run(insist(lambda: _glob(url, link.stores)))
    except (Final, Changed) as error:
        raise DataError(f"{shown(url)}: what matches this pattern cannot be listed: {error}") from None
    finally:
        link.close()
    if not found:
        raise DataError(f"{shown(url)}: no file matches this pattern; a list of URLs can be given too")
    return found


async def _glob(url: str, stores: Stores) -> list[str]:
    system, path = stores.system(url)
    find = system._glob(path) if getattr(system, "asynchronous", False) else None
    names = (
        await find
        if find is not None
        else await asyncio.get_running_loop().run_in_executor(None, lambda: system.glob(path))
    )
    if scheme_of(url) in ("http", "https"):
        # A page may name whatever it likes; only what lies on the same server is meant.
        server = url.split("://", 1)[0] + "://" + url.split("://", 1)[1].split("/", 1)[0] + "/"
        return [name for name in names if name.startswith(server)]
    return [f"{url.split('://', 1)[0]}://{name.lstrip('/') if scheme_of(url) != 'memory' else name}" for name in names]


def look_at(urls: Sequence[str], access: RemoteAccess) -> dict[str, Look]:
    """Return how files look, many asked at a time.

    Raises:
        DataError: one of them cannot be read.
    """
    link = Link(access)

    async def all_at_once() -> list[Look]:
        few = asyncio.Semaphore(REQUESTS)

        async def one(url: str) -> Look:
            async with few:
                try:
                    return await insist(link.stores.find(url).look)
                except (Final, Changed) as error:
                    raise DataError(f"{shown(url)}: {error}") from None

        return await asyncio.gather(*(one(url) for url in urls))

    try:
        looks = link.run(all_at_once())
    finally:
        link.close()
    for url, known in zip(urls, looks, strict=True):
        keep(url, known)
    return dict(zip(urls, looks, strict=True))
