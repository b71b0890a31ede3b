"""Threads and processes that prepare batches, and state that each process makes for itself."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import cloudpickle

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.layout import one_line
from kerasmem.processes.children import end_after_parent
from kerasmem.streaming.order import Position

Value = TypeVar("Value")


class _Process:
    """A process: compared in place of its number, which the system would have to be asked for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # a few instructions long, and never held while a value is used


_process = _Process()


def _renew() -> None:
    global _process
    _process = _Process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class ForkLocal(Generic[Value]):
    """A value of one process. A forked process and a pickled copy begin without one.

    Examples:
        >>> lock = ForkLocal()
        >>> lock.get(threading.Lock) is lock.get(threading.Lock)
        True
    """

    def __init__(self) -> None:
        self._held: tuple[_Process, Value] | None = None

    def get(self, make: Callable[[], Value]) -> Value:
        """Return the value of this process, made by `make` unless there is one."""
        held = self._held
        if held is None or held[0] is not _process:
            with _process.lock:
                held = self._held
                if held is None or held[0] is not _process:
                    held = self._held = _process, make()
        return held[1]

    def peek(self) -> Value | None:
        """Return the value of this process, or None if there is none."""
        held = self._held
        return None if held is None or held[0] is not _process else held[1]

    def take(self) -> Value | None:
        """Remove the value of this process and return it, or None if there is none."""
        with _process.lock:
            value, self._held = self.peek(), None
        return value

    def __getstate__(self) -> dict[str, None]:
        return {"_held": None}


Batch = tuple[Any, ...]
Transform = Callable[..., Any]


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


def _start_worker(pickled: bytes) -> None:
    global _in_worker
    end_after_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that trains ends the others
    _in_worker = cloudpickle.loads(pickled)


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
        transform: the function. It is sent by cloudpickle: lambdas, and functions of a notebook, work.
        processes: how many.
    """

    def __init__(self, transform: Transform, processes: int) -> None:
        try:
            pickled = cloudpickle.dumps(transform)
        except Exception as error:
            raise UsageError(f"transform cannot be pickled: {error}; pass use_multiprocessing=False") from error
        # A fork of this process would have locks that TensorFlow's threads hold.
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        self._start = functools.partial(
            ProcessPoolExecutor, processes, context, initializer=_start_worker, initargs=(pickled,)
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
                "fewer workers, or threads (use_multiprocessing=False). With processes, a script must train "
                'under `if __name__ == "__main__":`'
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

    Batches are gathered one at a time and in order, so that every part of the file is read once; what follows, the
    transform, runs in `workers` threads at a time. There is one series of batches at a time, so that memory is
    bounded; when readers take turns, each begins again where it had stopped.

    Args:
        gather: returns the raw batch at a position.
        finish: turns the raw batch at a position into the final one.
        workers: threads.
        depth: batches ahead.
        batches: batches an epoch.
    """

    gather: Callable[[Position], Batch]
    finish: Callable[[Position, Batch], Batch]
    workers: int
    depth: int
    batches: int

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._gathering = threading.Lock()
        self._series: tuple[object, int] | None = None  # whose batches are in preparation: the reader and the epoch
        self._next = 0  # the batch of it to be prepared next
        self._answers: dict[int, Future[Batch]] = {}
        self._queue: deque[tuple[Position, Future[Batch]]] = deque()  # to be gathered, in order
        self._closed = False
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="kerasmem-batches")

    def get(self, cursor: object, position: Position) -> Batch:
        """Return the batch, and have those that follow it prepared for the same reader."""
        epoch, place = position
        with self._lock:
            if self._series != (cursor, epoch):
                self._drop()
                self._series, self._next = (cursor, epoch), place
            if place <= self._next and not self._closed:
                for following in range(self._next, min(place + self.depth, self.batches)):
                    answer: Future[Batch] = Future()
                    self._queue.append((Position(epoch, following), answer))
                    try:
                        self._pool.submit(self._prepare)
                    except RuntimeError:  # the interpreter ends: nobody would answer
                        self._queue.pop()
                        raise
                    self._answers[following] = answer
                    self._next = following + 1
            prepared = self._answers.pop(place, None)
        if prepared is not None:
            try:
                return prepared.result()
            except CancelledError:  # dropped or closed meanwhile
                pass
        return self.finish(position, self.gather(position))

    def stop(self, cursor: object = None) -> None:
        """Cancel prepared batches: all, or only those of the reader `cursor`."""
        with self._lock:
            if cursor is None or (self._series is not None and self._series[0] is cursor):
                self._drop()

    def close(self) -> None:
        """Cancel queued batches. Those that are waited for or in progress end by themselves."""
        with self._lock:
            self._closed = True
            self._drop()
        self._pool.shutdown(wait=False)

    def join(self) -> None:
        """Wait for the threads after `close`."""
        self._pool.shutdown(wait=True)

    def _drop(self) -> None:
        for answer in self._answers.values():
            answer.cancel()
        self._series, self._answers = None, {}

    def _prepare(self) -> None:
        try:
            with self._gathering:
                position, answer = self._queue.popleft()
                if not answer.set_running_or_notify_cancel():
                    return
                values = self.gather(position)
            answer.set_result(self.finish(position, values))
        except BaseException as error:
            answer.set_exception(error)
            del answer  # the error's traceback refers to this frame: a cycle that would keep windows
