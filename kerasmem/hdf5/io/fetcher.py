"""Prefetch ranges of remote objects concurrently, in order of need, within a byte limit.

fsspec's caches do not fit: they do not prefetch, do not check the version on web servers, and their folders have no
size limit and serve a single process.

obstore (0.12) does not fit either: after a fork, as in the workers of a DataLoader, its requests never end, and it
follows redirects to other servers with all headers, including API keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kerasmem.compat.file_systems import call_before_threads_are_joined
from kerasmem.hdf5.io.access import REQUESTS, SMALL_REQUESTS, RemoteAccess, Stores
from kerasmem.hdf5.io.cache import BLOCK, DiskCache
from kerasmem.hdf5.io.objects import ObjectInfo, PermanentError, RemoteObject
from kerasmem.units import MIB

_SMALL = 4 * MIB  # in flight; they fill a link of 100 MB/s whose answers take 40 ms
_CLOSING = 5.0  # seconds until connections are abandoned


@dataclass
class Traffic:
    """Bytes received from stores."""

    received: int = 0


@dataclass(frozen=True)
class ObjectReader:
    """Reads ranges of one version of an object, from the disk cache or its store.

    Args:
        target: the object.
        known: the version.
        traffic: counter of received bytes.
        cache: the disk cache, or None.
        key: key in the cache; None if the version is unknown.
        call: coroutine that calls functions of the cache. Defaults to `asyncio.to_thread`.
    """

    target: RemoteObject
    known: ObjectInfo
    traffic: Traffic
    cache: DiskCache | None
    key: str | None
    call: Callable[..., Awaitable[Any]] = asyncio.to_thread

    async def read(self, start: int, stop: int) -> memoryview:
        """Return a range.

        Raises:
            PermanentError: If it cannot be fetched.
            ChangedError: If the object has another version.
        """
        if self.cache is None or self.key is None:
            return await self._fetch(start, stop)
        first, last = start // BLOCK, -(-stop // BLOCK)
        blocks: list[Any] = await self.call(self.cache.read, self.key, first, last)
        missing = [number for number, block in enumerate(blocks, first) if block is None]
        if missing:
            low, high = missing[0], missing[-1] + 1
            data = await self._fetch(low * BLOCK, min(high * BLOCK, self.known.size))
            await self.call(self.cache.write, self.key, low, data)
            blocks[low - first : high - first] = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
        return memoryview(b"".join(blocks))[start - first * BLOCK : stop - first * BLOCK]

    async def _fetch(self, start: int, stop: int) -> memoryview:
        data = await self.target.read(start, stop, self.known)
        self.traffic.received += len(data)
        return memoryview(data)


@dataclass(eq=False)
class RangeRequest:
    """A range of an object, fetched once for all claims on it.

    Args:
        reader: reader of the object.
        start: first byte.
        stop: byte after the last.

    Attributes:
        users: number of claims on it.
        answer: its bytes, or the error.
        task: task that fetches it; None if not started.
    """

    reader: ObjectReader
    start: int
    stop: int
    users: int = 0
    answer: Future[memoryview] = field(default_factory=Future)
    task: asyncio.Task[memoryview] | None = None

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


class RangeFetcher:
    """Fetches ranges of files in one background thread, which owns all state. Other threads send it calls.

    Ranges are queued in order of need, and fetched ahead up to `access.ahead_bytes`. A range that a thread waits for is
    fetched regardless of the limit.

    Args:
        access: settings for remote files.
    """

    def __init__(self, access: RemoteAccess) -> None:
        self._access = access
        self._cache = access.open_cache()
        self._queue: deque[RangeRequest] = deque()
        self._active = 0  # requests in flight
        self._in_flight = 0  # their bytes
        self._limit = REQUESTS  # of small requests; grows slowly, since stores refuse bursts
        self._held = 0  # bytes in flight, or fetched and not yet used
        self._closed = False
        self._lock = threading.Lock()  # no call is sent to a loop that is about to stop
        self._process = os.getpid()
        self._stores = Stores(access)
        self._loop = self._stores.loop
        # The thread holds the stores, so that garbage collection does not find open connections with the fetcher.
        self._thread = threading.Thread(target=_serve, args=(self._stores,), name="kerasmem-fetch", daemon=True)
        self._thread.start()
        _fetchers.add(self)

    def reader(self, url: str, known: ObjectInfo, traffic: Traffic) -> ObjectReader:
        """Return a reader of one version of a file."""
        key = self._access.cache_key(url, known.tag, known.size)
        return ObjectReader(self._stores.object_at(url), known, traffic, self._cache, key)

    def prefetch(self, requests: Iterable[RangeRequest]) -> None:
        """Queue ranges in order of need."""
        self._send(self._enqueue, list(requests))

    def result(self, request: RangeRequest) -> memoryview:
        """Wait for the bytes of a range.

        Raises:
            PermanentError: If they cannot be fetched, or the fetcher is closed.
            ChangedError: If the object has another version.
        """
        if not request.answer.done():
            self._send(self._begin, request)
        return request.answer.result()

    def release(self, requests: Iterable[RangeRequest]) -> None:
        """Release claims on ranges. A range without claims is cancelled or freed.

        It takes no lock, because garbage collection may call it anywhere.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._drop_claims, list(requests))

    def close(self) -> None:
        """Cancel requests, close the connections and stop the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._process:
            return  # forked: the thread exists only in the parent process
        self._loop.call_soon_threadsafe(self._queue.clear)
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._stores.shut_down(), self._loop).result(_CLOSING)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSING)
        if not self._thread.is_alive():
            self._loop.close()

    def __del__(self) -> None:
        """End the thread if `close` was not called. Garbage collection may call it anywhere: it never waits."""
        if not self._closed and os.getpid() == self._process:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                asyncio.run_coroutine_threadsafe(_stop_serving(self._stores), self._loop)

    def _send(self, call: Callable[..., Any], *arguments: Any) -> None:
        with self._lock:
            if self._closed:
                raise _closed_error()
            self._loop.call_soon_threadsafe(call, *arguments)

    # ---- in the background thread

    def _enqueue(self, requests: list[RangeRequest]) -> None:
        self._queue.extend(requests)
        self._begin_more()

    def _begin_more(self) -> None:
        while self._queue:
            request = self._queue[0]
            if request.task is None and request.users:
                if self._held and self._held + request.size > self._access.ahead_bytes:
                    return
                is_small = self._in_flight + request.size <= _SMALL
                if self._active >= (self._limit if is_small else REQUESTS):
                    return
                self._begin(request)
            self._queue.popleft()

    def _begin(self, request: RangeRequest) -> None:
        if request.task is None:
            self._active += 1
            self._in_flight += request.size
            self._held += request.size
            request.task = self._loop.create_task(request.reader.read(request.start, request.stop))
            request.task.add_done_callback(lambda task: self._end(request, task))

    def _end(self, request: RangeRequest, task: asyncio.Task[memoryview]) -> None:
        self._active -= 1
        self._in_flight -= request.size
        error = _closed_error() if task.cancelled() else task.exception()
        self._limit = min(self._limit + 1, SMALL_REQUESTS)
        if error is not None:
            request.answer.set_exception(error)
        else:
            request.answer.set_result(task.result())
        self._begin_more()

    def _drop_claims(self, requests: list[RangeRequest]) -> None:
        for request in requests:
            request.users -= 1
            if not request.users and request.task is not None:
                self._held -= request.size
                request.task.cancel()
        self._begin_more()


def _serve(stores: Stores) -> None:
    stores.loop.run_forever()


async def _stop_serving(stores: Stores) -> None:
    await stores.shut_down()
    stores.loop.stop()


def _closed_error() -> PermanentError:
    return PermanentError("the sequence was closed while it was being read")


_fetchers: weakref.WeakSet[RangeFetcher] = weakref.WeakSet()


def _close_all() -> None:
    for fetcher in list(_fetchers):
        fetcher.close()


call_before_threads_are_joined(_close_all)
