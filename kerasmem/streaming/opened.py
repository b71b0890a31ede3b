"""The open files, windows, threads and worker processes of a sequence in one process, and its batches."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kerasmem.errors import DataError
from kerasmem.hdf5.rows.settings import Access
from kerasmem.streaming.cursor import Cursor, Position
from kerasmem.streaming.plan import StreamPlan, build_batch
from kerasmem.streaming.reader import RowReader
from kerasmem.streaming.transforms import Batch, TransformFailure, TransformPool, apply_transform
from kerasmem.streaming.window import WindowRing


class OpenStream:
    """State of one process, never pickled: locks, open files, windows, threads. Any thread may use it.

    Args:
        plan: what is delivered.
        access: what may be read.
    """

    def __init__(self, plan: StreamPlan, access: Access) -> None:
        memory, settings = plan.memory, plan.settings
        self._plan = plan
        self._transform = settings.transform
        self.order = functools.lru_cache(2)(plan.order)
        self.reader = RowReader(plan.layout, plan.columns, resident=memory.cache_bytes, access=access)
        self.windows = WindowRing(self.reader, plan.columns, memory, plan.batch_rows)
        self.ahead: BatchesAhead | None = None
        self._pool: TransformPool | None = None
        if settings.works_ahead:
            self.ahead = BatchesAhead(
                self._gather, self._finish, settings.workers, depth=memory.ahead, batches=plan.num_batches
            )
        if settings.in_processes and settings.transform is not None:
            self._pool = TransformPool(settings.transform, settings.workers)

    def batch(self, position: Position, cursor: Cursor | None = None) -> Batch:
        """Return a batch.

        Args:
            position: which.
            cursor: the reader that goes through the epoch and has come to this batch; None for a batch out of turn.
        """
        if self.ahead is not None and cursor is not None:
            return self.ahead.get(cursor, position)
        return self._finish(position, self._gather(position, own=cursor is not None))

    def batch_rows(self, position: Position) -> np.ndarray:
        """Return the row numbers of a batch."""
        return self.order(position.epoch).rows(*self._plan.bounds(position.batch))

    def stop_ahead(self, cursor: Cursor | None = None) -> None:
        """Drop the batches that are prepared, all or only those for one reader."""
        if self.ahead is not None:
            self.ahead.stop(cursor)

    def close(self) -> None:
        """Close the files, end the workers and free the windows."""
        if self.ahead is not None:
            self.ahead.close()
        if self._pool is not None:
            self._pool.close()
        self.windows.close()
        if self.ahead is not None and self._transform is None:  # a transform may take long
            self.ahead.join()

    def _gather(self, position: Position, own: bool = True) -> Batch:
        """Return the batch as read, before `transform`. See `WindowRing.batch` for `own`."""
        order = self.order(position.epoch)
        arrays = self.windows.batch(order, *self._plan.bounds(position.batch), own=own)
        if self._plan.settings.remainder == "pad":
            arrays = self._plan.padded(arrays)
        return build_batch(self._plan.parts, self._plan.uses, arrays, again=np.copy)  # a transform may write to one

    def _finish(self, position: Position, values: Batch) -> Batch:
        try:
            if self._pool is not None:
                values = self._pool.run(values)
            elif self._transform is not None:
                values = apply_transform(self._transform, values)
        except RuntimeError:
            self.windows.refuse_if_closed()  # and the pool with it
            raise
        except TransformFailure as failure:
            which = _name_batch(position.batch, position.epoch, self.batch_rows(position))
            raise DataError(f"transform, on {which}, {failure}") from failure.__cause__
        if self._plan.adds_weights:
            start, stop = self._plan.bounds(position.batch)
            values = (*values, (np.arange(self._plan.batch_rows) < stop - start).astype(np.float32))
        return values


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


def _name_batch(batch: int, epoch: int, rows: np.ndarray) -> str:
    """Name a batch for a message: its number, epoch and some of its rows."""
    low, high = int(rows.min()), int(rows.max())
    if high - low + 1 == len(rows):
        which = f"rows {low:,} to {high:,}" if high > low else f"row {low:,}"
    else:
        some = ", ".join(f"{row:,}" for row in rows[:6])
        which = f"rows {some}{', …' if len(rows) > 6 else ''} (within {low:,} to {high:,})"
    return f"batch {batch:,} of epoch {epoch:,}, {which}"
