"""The private coroutines of fsspec's asynchronous file systems."""

from __future__ import annotations

import asyncio
from typing import Any

from kerasmem.compat.borrowing import Borrowed

_PLACE, _URLS = "fsspec.asyn", "reading files behind URLs"
COROUTINES = {
    "cat_file": Borrowed(f"{_PLACE}:AsyncFileSystem._cat_file(path, start, end)", feature=_URLS),
    "info": Borrowed(f"{_PLACE}:AsyncFileSystem._info(path)", feature=_URLS),
    "put_file": Borrowed(f"{_PLACE}:AsyncFileSystem._put_file(lpath, rpath)", feature="writing to URLs"),
    "rm_file": Borrowed(f"{_PLACE}:AsyncFileSystem._rm_file(path)", feature="writing to URLs"),
    "glob": Borrowed(f"{_PLACE}:AsyncFileSystem._glob(path)", feature="patterns in URLs"),
}


async def call_file_system(system: Any, name: str, *arguments: Any, **settings: Any) -> Any:
    """Call a method of a file system, such as "info", without blocking the event loop."""
    if getattr(system, "asynchronous", False):
        COROUTINES[name].get()
        return await getattr(system, f"_{name}")(*arguments, **settings)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, lambda: getattr(system, name)(*arguments, **settings))


async def close_connections(system: Any) -> None:
    """Close the connections of a file system of this event loop; fsspec itself closes them at Python's end only."""
    for holder in ("_session", "_s3"):
        close = getattr(getattr(system, holder, None), "close", None)
        done = close() if close is not None else None
        if asyncio.iscoroutine(done):
            await done
