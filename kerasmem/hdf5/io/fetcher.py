"""Ranges of remote objects, fetched several at a time, in the order of need, within so many bytes.

fsspec's own caches serve other needs: they fetch what is asked for just then, do not ask a web server for one version
only, begin a range that broke off from its start, and keep a folder without a limit for one process alone.

obstore (0.12) does not fit: after a fork, as in a DataLoader's workers, its requests never end, and it follows
redirects to private networks with all headers, an API's key among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from kerasmem.compat.files import call_before_threads_are_joined
from kerasmem.hdf5.io.access import REQUESTS, SMALL_REQUESTS, RemoteAccess
from kerasmem.hdf5.io.cache import DiskCache
from kerasmem.hdf5.io.failures import PermanentError, retry
from kerasmem.hdf5.io.objects import ObjectInfo, PartialRange, RemoteObject
from kerasmem.hdf5.io.stores import Stores
from kerasmem.units import KIB, MIB

_FILLED = 4 * MIB  # in flight fill a link of 100 MB/s on which an answer takes 40 ms
_PROGRESS = 64 * KIB  # that came before an answer broke off, so that the next may be asked for patiently
_CLOSING = 5.0  # seconds given to connections to close


@dataclass
class Traffic:
    """Traffic of files: requests sent again, bytes received, and bytes from the cache."""

    retries: int = 0
    received: int = 0
    from_cache: int = 0


async def _call_here(work: Callable[..., Any], *arguments: Any) -> Any:
    return work(*arguments)


@dataclass(frozen=True)
class ObjectReader:
    """Reads ranges of one version of an object, from the folder cache or from its store.

    Args:
        target: the object.
        known: the version.
        traffic: what came so far is counted here.
        cache: the folder; None for none.
        key: the object's folder in it; None if nothing tells which version there is.
        call: runs what reads and writes the folder; by default the thread that asks does.
    """

    target: RemoteObject
    known: ObjectInfo
    traffic: Traffic
    cache: DiskCache | None = None
    key: str | None = None
    call: Callable[..., Awaitable[Any]] = _call_here

    async def read(self, start: int, view: memoryview) -> list[tuple[int, int]]:
        """Fill a view with the bytes from `start` on. Return the ranges missing in the cache.

        Raises:
            PermanentError: If they cannot be had.
            ChangedError: If the object is another version.
        """
        missing = [(start, start + len(view))]
        if self.cache is not None and self.key is not None:
            missing = await self.call(self.cache.read, self.key, start, view)
            self.traffic.from_cache += len(view) - sum(last - first for first, last in missing)
        for first, last in missing:
            await self._fetch(first, view[first - start : last - start])
        return missing

    async def keep(self, missing: Iterable[tuple[int, int]], start: int, view: memoryview) -> None:
        """Put the missing ranges of `view` into the cache."""
        if self.cache is not None and self.key is not None:
            for first, last in missing:
                await self.call(self.cache.write, self.key, first, view[first - start : last - start])

    async def _fetch(self, start: int, view: memoryview) -> None:
        """Fill a view from the store, resuming an answer that breaks off."""
        into, before = PartialRange(view), 0

        async def ask() -> None:
            nonlocal before
            before = into.done
            try:
                await self.target.fetch(start, into, self.known)
                into.check()
            finally:
                self.traffic.received += into.done - before

        def failed() -> bool:
            self.traffic.retries += 1
            if self.known.tag is None:
                into.done = 0  # nothing says that the rest is of the same version
            return into.done - before >= _PROGRESS

        await retry(ask, failed)


class RangeRequest:
    """A range of an object, fetched once for all claims on it.

    Args:
        reader: of the object.
        start: first byte.
        stop: byte after the last.

    Attributes:
        users: how many need it and have not let go of it.
        answer: its bytes, or why they cannot be had.
    """

    def __init__(self, reader: ObjectReader, start: int, stop: int) -> None:
        self.reader, self.start, self.stop = reader, start, stop
        self.size = stop - start
        self.users = 0
        self.answer: Future[memoryview] = Future()
        self.task: asyncio.Task[None] | None = None

    def is_written_to_cache(self, other: RangeRequest) -> bool:
        """Return whether another range overlaps this one, which is still being written to the cache."""
        overlaps = self.start < other.stop and other.start < self.stop
        return overlaps and self.answer.done() and self.reader.key == other.reader.key is not None

    def fail(self, error: BaseException) -> None:
        """Note why its bytes cannot be had, unless they came."""
        if not self.answer.done():
            self.answer.set_exception(error)


class _Ranges(set[RangeRequest]):
    """Ranges, and the sum of their bytes."""

    nbytes = 0

    def add(self, request: RangeRequest) -> None:
        """Add a range."""
        if request not in self:
            super().add(request)
            self.nbytes += request.size

    def discard(self, request: object) -> None:
        """Remove a range if it is there."""
        if isinstance(request, RangeRequest) and request in self:
            super().discard(request)
            self.nbytes -= request.size


class RangeFetcher:
    """Fetch ranges of any number of files in one thread, which owns all state. Others send it calls.

    Ranges are announced in the order of need. As many are fetched ahead as the bytes allowed hold; one that somebody
    waits for is fetched in any case.

    Args:
        access: the settings.
    """

    def __init__(self, access: RemoteAccess) -> None:
        self._access = access
        self._queue: deque[RangeRequest] = deque()
        self._active = _Ranges()  # in flight
        self._held = _Ranges()  # in flight, or fetched and not yet used
        self._most = REQUESTS  # grows by one an answer, so that connections are not opened all at once
        self._closed = False
        self._lock = threading.Lock()  # so that no call is sent once the loop is about to end
        self._process = os.getpid()
        self._stores = Stores(access)
        self._loop = self._stores.loop
        self._thread = threading.Thread(target=self._loop.run_forever, name="kerasmem-fetch", daemon=True)
        self._thread.start()
        _fetchers.add(self)

    def reader(self, url: str, known: ObjectInfo, traffic: Traffic) -> ObjectReader:
        """Return a reader of one version of a file."""
        key = self._access.cache_key(url, known.tag, known.size)
        target = self._stores.object_at(url)
        return ObjectReader(target, known, traffic, self._stores.cache, key, asyncio.to_thread)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and return its result."""
        with self._lock:
            if self._closed:
                coroutine.close()
                raise _closed_error()
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise _closed_error() from None
        except BaseException:
            future.cancel()
            raise

    def prefetch(self, requests: Iterable[RangeRequest]) -> None:
        """Have ranges fetched, in this order, as soon as there is room for them."""
        self._send(self._enqueue, list(requests))

    def result(self, request: RangeRequest) -> memoryview:
        """Return the bytes of a range, waiting for them.

        Raises:
            PermanentError: If they cannot be had.
            ChangedError: If the object is another version.
        """
        if not request.answer.done():
            self._send(self._demand, request)
        return request.answer.result()

    def release(self, requests: Iterable[RangeRequest]) -> None:
        """Release ranges. Their memory goes with the last claim.

        It takes no lock, for garbage may be collected wherever a thread is just then.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._let_go, list(requests))

    def close(self) -> None:
        """Cancel requests, close the connections and end the threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._process:
            return  # the threads stayed in the other process
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(_CLOSING)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSING)
        if not self._thread.is_alive():
            self._loop.close()

    def _send(self, call: Callable[..., Any], *arguments: Any) -> None:
        with self._lock:
            if self._closed:
                raise _closed_error()
            self._loop.call_soon_threadsafe(call, *arguments)

    # ---- in the thread of the event loop

    def _enqueue(self, requests: list[RangeRequest]) -> None:
        self._queue.extend(requests)
        self._begin_more()

    def _begin_more(self) -> None:
        while self._queue:
            request = self._queue[0]
            if request.task is None and request.users:
                small = self._active.nbytes + request.size <= _FILLED
                if len(self._active) >= (self._most if small else REQUESTS):
                    return
                if self._held and self._held.nbytes + request.size > self._access.ahead_bytes:
                    return
                self._demand(request)
            self._queue.popleft()

    def _demand(self, request: RangeRequest) -> None:
        if request.task is None:
            self._held.add(request)
            self._active.add(request)
            request.task = self._loop.create_task(self._fetch(request))
            request.task.add_done_callback(lambda task: self._end(request, task))

    async def _fetch(self, request: RangeRequest) -> None:
        view = memoryview(bytearray(request.size))
        written = [each.task for each in self._active if each.task and each.is_written_to_cache(request)]
        if written:  # the bytes are here and on their way into the cache, where this request finds them
            await asyncio.wait(written)
        missing = await request.reader.read(request.start, view)
        request.answer.set_result(view)
        await request.reader.keep(missing, request.start, view)

    def _end(self, request: RangeRequest, task: asyncio.Task[None]) -> None:
        error = _closed_error() if task.cancelled() else task.exception()
        self._active.discard(request)
        self._most = REQUESTS if error is not None else min(self._most + 1, SMALL_REQUESTS)
        if error is not None:
            request.fail(error)
            self._held.discard(request)
        self._begin_more()

    def _let_go(self, requests: list[RangeRequest]) -> None:
        for request in requests:
            request.users -= 1
            if not request.users:
                self._held.discard(request)
                if request.task is not None and not request.answer.done():
                    request.task.cancel()
        self._begin_more()

    async def _shut_down(self) -> None:
        for request in (*self._active, *self._queue):
            request.fail(_closed_error())
        self._queue.clear()
        await self._stores.shut_down()


def _closed_error() -> PermanentError:
    return PermanentError("the sequence was closed meanwhile")


_fetchers: weakref.WeakSet[RangeFetcher] = weakref.WeakSet()


def _close_all() -> None:
    for fetcher in list(_fetchers):
        fetcher.close()


call_before_threads_are_joined(_close_all)
