"""Batches prepared ahead of the trainer: gathered in order, transformed in threads or processes."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from kerasmem.hdf5.layout import one_line

Batch = tuple[Any, ...]
Transform = Callable[..., Any]


class TransformFailure(Exception):
    """A transform raised or returned something else; the text goes on from "transform, on batch 3, "."""


def apply_transform(transform: Transform, batch: Batch) -> Batch:
    """Return what `transform` makes of a batch, or raise `TransformFailure`."""
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
    """Runs a transform in worker processes. The pool starts with the first batch.

    Args:
        transform: the function; pickled once a process.
        processes: how many.
    """

    def __init__(self, transform: Transform, processes: int) -> None:
        self._transform = transform
        self._processes = processes
        self._lock = threading.Lock()
        self._pool: Executor | None = None

    def run(self, batch: Batch) -> Batch:
        """Return the transformed batch, or raise `TransformFailure`."""
        with self._lock:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(
                    self._processes, initializer=_start_worker, initargs=(self._transform,)
                )
            pool = self._pool
        try:
            result, message, details = pool.submit(_run_in_worker, batch).result()
        except BrokenProcessPool as error:
            self.close()
            raise TransformFailure(
                "ended with its worker process; most often the system kills one for lack of memory: use "
                "fewer workers, or threads (use_multiprocessing=False)"
            ) from error
        if result is None:
            raise TransformFailure(message) from RuntimeError(f"in the worker process:\n{details}")
        return result

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


class _Run:
    """Batches `first` and onwards of one pass through an epoch, in preparation."""

    def __init__(self, whose: object, epoch: int, first: int) -> None:
        self.whose = whose
        self.epoch = epoch
        self.next = first  # to be submitted
        self.turn = first  # to be gathered
        self.over = False
        self.moved = threading.Condition()
        self.futures: dict[int, Future[Batch | None]] = {}


class BatchesAhead:
    """Keeps up to `depth` batches ready or in preparation.

    Batches are gathered strictly in order, so that every part of the file is read once; what follows, the
    transform, runs in `workers` threads at a time. There is one run of batches at a time, so that memory is
    bounded; when passes take turns, each starts anew where it had stopped.

    Args:
        gather: returns the raw batch at (epoch, place).
        finish: turns a raw batch at (epoch, place) into the final one.
        workers: threads.
        depth: batches ahead.
        batches: batches an epoch.
    """

    def __init__(
        self,
        gather: Callable[[int, int], Batch],
        finish: Callable[[int, int, Batch], Batch],
        *,
        workers: int,
        depth: int,
        batches: int,
    ) -> None:
        self._gather = gather
        self._finish = finish
        self._depth = depth
        self._batches = batches
        self._lock = threading.Lock()
        self._run: _Run | None = None
        self._closed = False
        self._gathering = 0
        self._gathered = threading.Condition()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="kerasmem-batches")

    def get(self, whose: object, epoch: int, place: int) -> Batch:
        """Return the batch, and have those that follow it in the pass `whose` prepared."""
        with self._lock:
            run = self._run
            if run is None or run.whose is not whose or run.epoch != epoch:
                run = self._start(whose, epoch, place)
            if place <= run.next and not self._closed:
                for following in range(run.next, min(place + self._depth, self._batches)):
                    run.futures[following] = self._pool.submit(self._prepare, run, following)
                    run.next = following + 1
            future = run.futures.pop(place, None)
        try:
            batch = None if future is None else future.result()
        except CancelledError:  # closed meanwhile
            batch = None
        return self._finish(epoch, place, self._gather(epoch, place)) if batch is None else batch

    def stop(self, whose: object = None) -> None:
        """Drop what is prepared, all of it or only if it is for the pass `whose`."""
        with self._lock:
            if whose is None or (self._run is not None and self._run.whose is whose):
                self._drop()

    def close(self) -> None:
        """Drop what is prepared and let the threads end; a batch that is being gathered is waited for.

        Whoever closes the file next would otherwise see it opened again by the rest of that batch.
        """
        with self._lock:
            self._closed = True
            self._drop()
        with self._gathered:
            while self._gathering:
                self._gathered.wait()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, whose: object, epoch: int, place: int) -> _Run:
        self._drop()
        self._run = _Run(whose, epoch, place)
        return self._run

    def _drop(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            with run.moved:
                run.over = True
                run.moved.notify_all()
            for future in run.futures.values():
                future.cancel()

    def _prepare(self, run: _Run, place: int) -> Batch | None:
        with run.moved:
            while run.turn != place and not run.over:
                run.moved.wait()
            if run.over:
                return None
            with self._gathered:
                self._gathering += 1
        try:
            batch = self._gather(run.epoch, place)
        finally:
            with self._gathered:
                self._gathering -= 1
                self._gathered.notify_all()
            with run.moved:
                run.turn = place + 1
                run.moved.notify_all()
        return self._finish(run.epoch, place, batch)
