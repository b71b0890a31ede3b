"""fsspec's file systems, and event loops and threads of Python, for files behind URLs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

GET_LOOP = Borrowed("asyncio:_get_running_loop", feature="a file behind a URL opened in a notebook")
SET_LOOP = Borrowed("asyncio:_set_running_loop", feature="a file behind a URL opened in a notebook")
BEFORE_THREADS = Borrowed(
    "threading:_register_atexit", feature="leaving Python at once while a file behind a URL is read"
)
_MODULE, _URLS = "fsspec.asyn", "reading files behind URLs"
COROUTINES = {
    "cat_file": Borrowed(f"{_MODULE}:AsyncFileSystem._cat_file", feature=_URLS),
    "info": Borrowed(f"{_MODULE}:AsyncFileSystem._info", feature=_URLS),
    "put_file": Borrowed(f"{_MODULE}:AsyncFileSystem._put_file", feature="writing to URLs"),
    "glob": Borrowed(f"{_MODULE}:AsyncFileSystem._glob", feature="patterns in URLs"),
    "url": Borrowed("s3fs:S3FileSystem._url", feature="signed links to S3"),
}


@contextlib.contextmanager
def no_running_loop() -> Iterator[None]:
    """Allow this thread to run another event loop inside a running one, such as a notebook's."""
    running = GET_LOOP()
    SET_LOOP(None)
    try:
        yield
    finally:
        SET_LOOP(running)


def call_before_threads_are_joined(function: Callable[[], None]) -> None:
    """Call a function when Python exits, before the threads of pools are joined.

    If this version of Python does not support it, Python waits for running requests.
    """
    with contextlib.suppress(NotAvailableError, RuntimeError):  # RuntimeError: Python is exiting
        BEFORE_THREADS(function)


async def call_file_system(system: Any, name: str, *arguments: Any, **settings: Any) -> Any:
    """Call a method of a file system, such as "info", without blocking the event loop."""
    if getattr(system, "asynchronous", False):
        COROUTINES[name].get()
        return await getattr(system, f"_{name}")(*arguments, **settings)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, lambda: getattr(system, name)(*arguments, **settings))


async def close_connections(system: Any) -> None:
    """Close the connections of a file system. fsspec does so only when Python exits."""
    for holder in ("_session", "_s3"):
        close = getattr(getattr(system, holder, None), "close", None)
        result = close() if close is not None else None
        if asyncio.iscoroutine(result):
            await result
