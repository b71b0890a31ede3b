"""Ranges of remote objects on their way: several at a time, in the order of need, within so many bytes.

One thread runs an event loop on which all requests of a sequence are made. What will be needed is announced range by
range; as many are fetched ahead as the bytes allowed hold, and one that somebody waits for is fetched in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kerasmem.hdf5.remote.access import REQUESTS, SMALL_REQUESTS, RemoteAccess
from kerasmem.hdf5.remote.cache import DiskCache
from kerasmem.hdf5.remote.failures import Final
from kerasmem.hdf5.remote.objects import Arriving, Look, RemoteObject
from kerasmem.hdf5.remote.stores import Stores, insist
from kerasmem.units import KIB, MIB

_WAITING, _COMING, _THERE, _GONE = "waiting", "coming", "there", "gone"
_DISK_THREADS = 4
_FILLED = 4 * MIB  # in flight fill a link of 100 MB/s on which an answer takes 40 ms
_PROGRESS = 64 * KIB  # that came before an answer broke off, so that the next may be asked for patiently
_CLOSING = 5.0  # seconds given to connections to close


@dataclass
class Traffic:
    """What came of a file: requests sent, those sent again, bytes received, and bytes that the cache held."""

    requests: int = 0
    retries: int = 0
    received: int = 0
    from_cache: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.requests + other.requests,
            self.retries + other.retries,
            self.received + other.received,
            self.from_cache + other.from_cache,
        )


@dataclass(frozen=True)
class Wanted:
    """An object and how it is fetched: `known` is the version, `key` its folder in the cache or None."""

    seen: RemoteObject
    known: Look
    traffic: Traffic
    key: str | None = None


class Piece:
    """A range of an object, fetched once for all who announced that they need it.

    Args:
        wanted: the object.
        start: first byte.
        stop: byte after the last.
    """

    def __init__(self, wanted: Wanted, start: int, stop: int) -> None:
        self.wanted, self.start, self.stop = wanted, start, stop
        self.users = 0
        self.state = _WAITING
        self.data: memoryview | None = None
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self.task: asyncio.Task[None] | None = None
        self.counted = False

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.stop - self.start


class Link:
    """Fetches ranges; one thread, however many files.

    Args:
        access: the settings.
    """

    def __init__(self, access: RemoteAccess) -> None:
        self._access = access
        self._cache = None if access.cache is None else DiskCache(access.cache, access.cache_size)
        self._lock = threading.Lock()
        self._queue: deque[Piece] = deque()
        self._dropped: deque[Piece] = deque()
        self._coming: set[Piece] = set()
        self._held = 0  # bytes in flight, or fetched and not yet used
        self._arriving = 0  # bytes in flight
        self._most = REQUESTS  # grows by one an answer, so that connections are not opened all at once
        self._closed = False
        self._process = os.getpid()
        self._disk = ThreadPoolExecutor(_DISK_THREADS, thread_name_prefix="kerasmem-cache") if self._cache else None
        self._loop = asyncio.new_event_loop()
        self.stores = Stores(access, self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name="kerasmem-link", daemon=True)
        self._thread.start()
        _links.add(self)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return what a coroutine returns, once it has run."""
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

    def announce(self, pieces: list[Piece]) -> None:
        """Have ranges fetched, in this order, as soon as there is room for them."""
        with self._lock:
            self._queue.extend(pieces)
            self._go_on()

    def take(self, piece: Piece) -> memoryview:
        """Return the bytes of a range, waiting for them.

        Raises:
            Final: they cannot be had.
            Changed: the object is another.
        """
        with self._lock:
            if piece.state == _WAITING:
                self._begin(piece)
        piece.ready.wait()
        if piece.error is not None:
            raise piece.error
        assert piece.data is not None
        return piece.data

    def release(self, pieces: Iterable[Piece]) -> None:
        """Note that one who needed ranges does no longer; with the last of them their memory goes."""
        with self._lock:
            for piece in pieces:
                self._let_go(piece)
            self._go_on()

    def drop(self, pieces: Iterable[Piece]) -> None:
        """Do as `release` does, soon: for a claim that is collected as garbage, whatever locks are held just then."""
        self._dropped.extend(pieces)
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(self._sweep)

    def close(self) -> None:
        """Break off whatever is under way, close the connections and end the threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pieces = [*self._coming, *self._queue]
            self._queue.clear()
        if os.getpid() != self._process:
            return  # the threads stayed in the other process
        for piece in pieces:
            self._fail(piece, _closed_error())
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._wind_up(), self._loop).result(_CLOSING)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSING)
        if not self._thread.is_alive():
            self._loop.close()
        if self._disk is not None:
            self._disk.shutdown(wait=False, cancel_futures=True)

    def _go_on(self) -> None:
        """Begin what there is room for; the lock is held."""
        while self._queue:
            piece = self._queue[0]
            if piece.state == _WAITING:
                if len(self._coming) >= (REQUESTS if self._arriving + piece.size > _FILLED else self._most):
                    return
                if self._held and self._held + piece.size > self._access.ahead_bytes:
                    return
                self._begin(piece)
            self._queue.popleft()

    def _begin(self, piece: Piece) -> None:
        if self._closed:
            piece.error = _closed_error()
            piece.ready.set()
            return
        piece.state, piece.counted = _COMING, True
        self._held += piece.size
        self._arriving += piece.size
        self._coming.add(piece)
        self._loop.call_soon_threadsafe(self._start, piece)

    def _start(self, piece: Piece) -> None:
        piece.task = self._loop.create_task(self._fetch(piece))
        piece.task.add_done_callback(lambda task: self._end(piece, task))
        if piece.state == _GONE:
            piece.task.cancel()

    def _end(self, piece: Piece, task: asyncio.Task[None]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if task.cancelled():  # before it began
            self._fail(piece, _closed_error())
        with self._lock:
            self._coming.discard(piece)
            self._arriving -= piece.size
            self._most = REQUESTS if failed else min(self._most + 1, SMALL_REQUESTS)
            if failed:
                self._uncount(piece)
            self._go_on()

    def _let_go(self, piece: Piece) -> None:
        piece.users -= 1
        if piece.users > 0 or piece.state == _GONE:
            return
        before, piece.state = piece.state, _GONE
        piece.data = None
        self._uncount(piece)
        if before == _COMING and not self._closed:
            self._loop.call_soon_threadsafe(lambda: piece.task and piece.task.cancel())

    def _uncount(self, piece: Piece) -> None:
        if piece.counted:
            piece.counted = False
            self._held -= piece.size

    def _sweep(self) -> None:
        pieces = []
        with contextlib.suppress(IndexError):
            while True:
                pieces.append(self._dropped.popleft())
        self.release(pieces)

    def _fail(self, piece: Piece, error: BaseException) -> None:
        piece.error = piece.error or error
        piece.ready.set()

    async def _fetch(self, piece: Piece) -> None:
        wanted, view = piece.wanted, memoryview(bytearray(piece.size))
        try:
            missing = [(piece.start, piece.stop)]
            if wanted.key is not None and self._cache is not None:
                missing = await self._on_disk(self._cache.read, wanted.key, piece.start, view)
                wanted.traffic.from_cache += piece.size - sum(last - first for first, last in missing)
            for first, last in missing:
                await fetch(wanted, first, view[first - piece.start : last - piece.start])
        except BaseException as error:
            self._fail(piece, error if isinstance(error, Exception) else _closed_error())
            raise
        with self._lock:
            if piece.state == _COMING:
                piece.data, piece.state = view, _THERE
        piece.ready.set()
        if wanted.key is not None and self._cache is not None:
            for first, last in missing:
                await self._on_disk(
                    self._cache.write, wanted.key, first, view[first - piece.start : last - piece.start]
                )

    async def _on_disk(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await self._loop.run_in_executor(self._disk, work, *arguments)

    async def _wind_up(self) -> None:
        others = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.stores.close()
        await self._loop.shutdown_default_executor()


def _closed_error() -> Final:
    return Final("the sequence was closed meanwhile")


async def fetch(wanted: Wanted, start: int, view: memoryview) -> None:
    """Fill a view with the bytes from `start` on; what breaks off is gone on with where it broke off.

    Raises:
        Final: they cannot be had.
        Changed: the object is another.
    """
    into, traffic, before = Arriving(view), wanted.traffic, 0

    async def ask() -> None:
        nonlocal before
        traffic.requests += 1
        before = into.done
        try:
            await wanted.seen.fetch(start, into, wanted.known)
            into.check()
        finally:
            traffic.received += into.done - before

    def failed() -> bool:
        traffic.retries += 1
        if wanted.known.tag is None:
            into.done = 0  # nothing says that the rest is of the same version
        return into.done - before >= _PROGRESS

    await insist(ask, failed)


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _close_all() -> None:
    for link in list(_links):
        link.close()


# Python waits at its end for the threads of pools, which may be waiting for a store: this is called before. Where
# a version of Python has it no more, leaving takes as long as what is under way.
_before_the_end = getattr(threading, "_register_atexit", None)
if _before_the_end is not None:
    with contextlib.suppress(RuntimeError):  # already at its end
        _before_the_end(_close_all)
