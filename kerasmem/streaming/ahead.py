"""Batches prepared ahead of the trainer: gathered in order, transformed in threads or processes."""

from __future__ import annotations

import functools
import itertools
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from kerasmem.hdf5.format.layout import one_line
from kerasmem.processes.children import end_after_parent

_MOST_AHEAD = 10  # batches; fewer where the memory budget has no room for more

Batch = tuple[Any, ...]
Transform = Callable[..., Any]


@dataclass(frozen=True)
class Preparation:
    """How batches are prepared.

    Args:
        transform: what is done to each; None for nothing.
        workers: threads or processes.
        in_processes: whether `transform` runs in processes.
    """

    transform: Transform | None = None
    workers: int = 1
    in_processes: bool = False

    @property
    def works_ahead(self) -> bool:
        """Whether batches are prepared before they are asked for."""
        return self.workers > 1 or self.in_processes

    @property
    def depth(self) -> int:
        """Batches that may be prepared ahead."""
        return _MOST_AHEAD if self.works_ahead else 0

    def describe(self, ahead: int) -> str:
        """Describe the workers in words; "" if batches are made on request."""
        kind = "processes" if self.in_processes and self.transform is not None else "threads"
        return f"{self.workers} {kind}, {ahead} ahead at most" if self.works_ahead else ""


class TransformFailure(Exception):
    """A transform failed or returned a wrong value. The text follows "transform, on batch 3, "."""


def apply_transform(transform: Transform, batch: Batch) -> Batch:
    """Return the transformed batch, or raise `TransformFailure`."""
    try:
        result = transform(*batch)
    except Exception as error:
        raise TransformFailure(f"raised {type(error).__name__}: {one_line(str(error))}") from error
    if len(batch) == 1 and not isinstance(result, tuple):
        return (result,)
    if not isinstance(result, (tuple, list)) or len(result) != len(batch):
        got = f"{len(result)} values" if isinstance(result, (tuple, list)) else type(result).__name__
        wanted = ("x", "(x, y)", "(x, y, sample_weight)")[len(batch) - 1]
        raise TransformFailure(f"returned {got}; it has to return {wanted}")
    return tuple(result)


_in_worker: Transform | None = None  # in a worker process: the transform it was started with


def _start_worker(transform: Transform) -> None:
    global _in_worker
    end_after_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that trains ends the others
    _in_worker = transform


def _run_in_worker(batch: Batch) -> tuple[Batch | None, str, str]:
    # An exception that does not survive pickling would take the pool down: send its text.
    assert _in_worker is not None
    try:
        return apply_transform(_in_worker, batch), "", ""
    except TransformFailure as failure:
        return None, str(failure), traceback.format_exc()


class TransformPool:
    """Runs a transform in worker processes, which start with the first batch.

    Args:
        transform: the function; pickled once a process.
        processes: how many.
    """

    def __init__(self, transform: Transform, processes: int) -> None:
        self._start = functools.partial(
            ProcessPoolExecutor, processes, initializer=_start_worker, initargs=(transform,)
        )
        self._pool = self._start()
        self._replacing = threading.Lock()

    def run(self, batch: Batch) -> Batch:
        """Return the transformed batch, or raise `TransformFailure`."""
        pool = self._pool
        try:
            result, message, details = pool.submit(_run_in_worker, batch).result()
        except BrokenProcessPool as error:
            with self._replacing:  # several threads may have waited for it
                self._pool = self._start() if self._pool is pool else self._pool
            raise TransformFailure(
                "ended with its worker process; most often the system kills one for lack of memory: use "
                "fewer workers, or threads (use_multiprocessing=False)"
            ) from error
        if result is None:
            raise TransformFailure(message) from RuntimeError(f"in the worker process:\n{details}")
        return result

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(eq=False)
class BatchesAhead:
    """Keeps up to `depth` batches ready or in preparation.

    One thread gathers batches strictly in order, so that every part of the file is read once; what follows, the
    transform, runs in `workers` threads at a time. There is one series of batches at a time, so that memory is
    bounded; when readers take turns, each begins again where it had stopped.

    Args:
        gather: returns the raw batch at (epoch, place).
        finish: turns a raw batch at (epoch, place) into the final one.
        workers: threads.
        depth: batches ahead.
        batches: batches an epoch.
    """

    gather: Callable[[int, int], Batch]
    finish: Callable[[int, int, Batch], Batch]
    workers: int
    depth: int
    batches: int

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._series: tuple[object, int] | None = None  # whose batches are in preparation: the reader and the epoch
        self._next = 0  # the batch of it to be prepared next
        self._answers: dict[int, tuple[Future[Batch], Future[Batch]]] = {}  # each batch as gathered and as finished
        self._closed = False
        self._gatherer = ThreadPoolExecutor(1, thread_name_prefix="kerasmem-gather")
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="kerasmem-batches")

    def get(self, cursor: object, epoch: int, place: int) -> Batch:
        """Return the batch, and have those that follow it prepared for the same reader."""
        with self._lock:
            if self._series != (cursor, epoch):
                self._drop()
                self._series, self._next = (cursor, epoch), place
            if place <= self._next and not self._closed:
                for following in range(self._next, min(place + self.depth, self.batches)):
                    gathered = self._gatherer.submit(self.gather, epoch, following)
                    finished = self._pool.submit(self._finish, epoch, following, gathered)
                    self._answers[following] = gathered, finished
                    self._next = following + 1
            prepared = self._answers.pop(place, None)
        if prepared is not None:
            try:
                return prepared[1].result()
            except CancelledError:  # dropped or closed meanwhile
                pass
        return self.finish(epoch, place, self.gather(epoch, place))

    def stop(self, cursor: object = None) -> None:
        """Cancel prepared batches: all, or only those of the reader `cursor`."""
        with self._lock:
            if cursor is None or (self._series is not None and self._series[0] is cursor):
                self._drop()

    def close(self) -> None:
        """Cancel queued batches and wait for the one in progress."""
        with self._lock:
            self._closed = True
            self._drop()
        self._gatherer.shutdown(wait=True, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _drop(self) -> None:
        for future in itertools.chain.from_iterable(self._answers.values()):
            future.cancel()
        self._series, self._answers = None, {}

    def _finish(self, epoch: int, place: int, gathered: Future[Batch]) -> Batch:
        return self.finish(epoch, place, gathered.result())
