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
    """Identity of a process. It is cheaper to compare than a process ID."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # never held while a value is used


_process = _Process()


def _renew() -> None:
    global _process
    _process = _Process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class ForkLocal(Generic[Value]):
    """A value that belongs to one process. Forked processes and pickled copies start without it.

    Examples:
        >>> lock = ForkLocal()
        >>> lock.get(threading.Lock) is lock.get(threading.Lock)
        True
    """

    def __init__(self) -> None:
        self._owned: tuple[_Process, Value] | None = None

    def get(self, make: Callable[[], Value]) -> Value:
        """Return the value of this process, creating it with `make` if necessary."""
        owned = self._owned
        if owned is None or owned[0] is not _process:
            with _process.lock:
                owned = self._owned
                if owned is None or owned[0] is not _process:
                    owned = self._owned = _process, make()
        return owned[1]

    def peek(self) -> Value | None:
        """Return the value of this process, or None."""
        owned = self._owned
        return None if owned is None or owned[0] is not _process else owned[1]

    def take(self) -> Value | None:
        """Remove and return the value of this process, or None."""
        with _process.lock:
            value, self._owned = self.peek(), None
        return value

    def __getstate__(self) -> dict[str, None]:
        return {"_owned": None}


Batch = tuple[Any, ...]
Transform = Callable[..., Any]


class TransformFailure(Exception):
    """A transform failed or returned a wrong value. The message continues "transform, on batch 3, "."""


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
        expected = ("x", "(x, y)", "(x, y, sample_weight)")[len(batch) - 1]
        raise TransformFailure(f"must return {expected}; got {got}")
    return tuple(result)


_worker_transform: Transform | None = None  # set in worker processes only


def _start_worker(pickled: bytes) -> None:
    global _worker_transform
    end_after_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the training process stops the others
    _worker_transform = cloudpickle.loads(pickled)


def _run_in_worker(batch: Batch) -> tuple[Batch | None, str, str]:
    # Failures are returned as text, because an exception that cannot be unpickled would break the pool.
    assert _worker_transform is not None
    try:
        return apply_transform(_worker_transform, batch), "", ""
    except TransformFailure as failure:
        return None, str(failure), traceback.format_exc()


class TransformPool:
    """Run a transform in worker processes. They start with the first batch.

    Args:
        transform: the function. It is sent by cloudpickle, so lambdas and functions of a notebook work.
        processes: number of processes.
    """

    def __init__(self, transform: Transform, processes: int) -> None:
        try:
            pickled = cloudpickle.dumps(transform)
        except Exception as error:
            raise UsageError(f"transform cannot be pickled: {error}; pass use_multiprocessing=False") from error
        # A fork of this process would inherit locks that TensorFlow's threads hold.
        context = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
        self._make_pool = functools.partial(ProcessPoolExecutor, processes, context, _start_worker, (pickled,))
        self._pool = self._make_pool()
        self._processes = processes
        self._started: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()

    def run(self, batch: Batch) -> Batch:
        """Return the transformed batch, or raise `TransformFailure`."""
        pool = self._pool
        try:
            self._start_workers(pool)
            result, message, details = pool.submit(_run_in_worker, batch).result()
        except BrokenProcessPool as error:
            with self._lock:  # another thread may have replaced it
                self._pool = self._make_pool() if self._pool is pool else self._pool
            raise TransformFailure(
                "crashed its worker process. If the system ran out of memory, use fewer workers, or threads "
                '(use_multiprocessing=False). If this is a script, it must train under `if __name__ == "__main__":`'
            ) from error
        if result is None:
            raise TransformFailure(message) from RuntimeError(f"in the worker process:\n{details}")
        return result

    def _start_workers(self, pool: ProcessPoolExecutor) -> None:
        """Start all workers at once.

        The pool would start them on demand, and if it starts one while Python exits, it waits for that one forever.
        """
        with self._lock:
            if pool is not self._started:
                self._started = pool
                for _ in range(self._processes):
                    pool.submit(int)

    def close(self) -> None:
        """Stop the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(eq=False)
class BatchesAhead:
    """Prepare up to `depth` batches ahead of one reader.

    Batches are read one at a time and in order, so that every part of the file is read once. Their transforms run in
    `workers` threads. To bound the memory, only one reader has prepared batches. If readers take turns, each starts
    again at its next batch.

    Args:
        gather: returns the batch at a position before the transform.
        finish: transforms the batch at a position.
        workers: number of threads.
        depth: number of batches ahead.
        batches: number of batches in an epoch.
    """

    gather: Callable[[Position], Batch]
    finish: Callable[[Position, Batch], Batch]
    workers: int
    depth: int
    batches: int

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._gathering = threading.Lock()
        self._series: tuple[object, int] | None = None  # reader and epoch of the prepared batches
        self._next = 0  # number of the batch to prepare next
        self._prepared: dict[int, Future[Batch]] = {}
        self._queue: deque[tuple[Position, Future[Batch]]] = deque()  # batches to gather, in order
        self._closed = False
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="kerasmem-batches")

    def get(self, cursor: object, position: Position) -> Batch:
        """Return a batch, and prepare the following ones for the same reader."""
        epoch, number = position
        with self._lock:
            if self._series != (cursor, epoch):
                self._drop()
                self._series, self._next = (cursor, epoch), number
            if number <= self._next and not self._closed:
                for following in range(self._next, min(number + self.depth, self.batches)):
                    self._enqueue(Position(epoch, following))
            prepared = self._prepared.pop(number, None)
        if prepared is not None:
            try:
                return prepared.result()
            except CancelledError:  # by `stop`, `close` or another reader
                pass
            finally:
                del prepared  # the traceback of its error refers to this frame
        return self.finish(position, self.gather(position))

    def stop(self, cursor: object = None) -> None:
        """Cancel prepared batches: all, or only those of the reader `cursor`."""
        with self._lock:
            if cursor is None or (self._series is not None and self._series[0] is cursor):
                self._drop()

    def close(self) -> None:
        """Cancel queued batches. A batch in progress is finished in its thread."""
        with self._lock:
            self._closed = True
            self._drop()
        self._pool.shutdown(wait=False)

    def join(self) -> None:
        """Wait for the threads after `close`."""
        self._pool.shutdown(wait=True)

    def _enqueue(self, position: Position) -> None:
        future: Future[Batch] = Future()
        self._queue.append((position, future))
        try:
            self._pool.submit(self._prepare)
        except RuntimeError:  # the interpreter is shutting down, so no thread would prepare it
            self._queue.pop()
            raise
        self._prepared[position.batch] = future
        self._next = position.batch + 1

    def _drop(self) -> None:
        for future in self._prepared.values():
            future.cancel()
        self._series, self._prepared = None, {}

    def _prepare(self) -> None:
        try:
            with self._gathering:
                position, future = self._queue.popleft()
                if not future.set_running_or_notify_cancel():
                    return
                values = self.gather(position)
            future.set_result(self.finish(position, values))
        except BaseException as error:
            future.set_exception(error)
            del future  # the traceback refers to this frame, and a cycle would keep windows in memory
