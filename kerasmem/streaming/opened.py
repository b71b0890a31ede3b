"""The open files, windows, threads and worker processes of a sequence in one process, and its batches."""

from __future__ import annotations

import os
import threading

import numpy as np

from kerasmem.errors import DataError
from kerasmem.hdf5.rows.settings import Access
from kerasmem.streaming.ahead import Batch, BatchesAhead, Preparation, TransformFailure, TransformPool, apply_transform
from kerasmem.streaming.cursor import Cursor, Position
from kerasmem.streaming.description import name_batch
from kerasmem.streaming.order import EpochOrder
from kerasmem.streaming.plan import StreamPlan, build_batch
from kerasmem.streaming.reader import RowReader
from kerasmem.streaming.window import WindowRing

_opening = threading.Lock()
_process = object()  # another one in a forked process; asking the system for its number costs more


def opening() -> threading.Lock:
    """Return the lock held while a sequence opens its files. A forked process has its own."""
    return _opening


def _renew_after_fork() -> None:
    global _opening, _process
    _opening, _process = threading.Lock(), object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)


class OpenStream:
    """State of one process, never pickled: locks, open files, windows, threads. Any thread may use it.

    Args:
        plan: what is delivered.
        preparation: how batches are prepared.
        access: what may be read.
    """

    def __init__(self, plan: StreamPlan, preparation: Preparation, access: Access) -> None:
        memory = plan.memory
        self._plan = plan
        self._preparation = preparation
        self._process = _process
        self._order: EpochOrder | None = None
        self.reader = RowReader(plan.layout, plan.columns, resident=memory.cache_bytes, access=access)
        self.windows = WindowRing(self.reader, plan.columns, memory, plan.batch_rows)
        self.ahead: BatchesAhead | None = None
        self._pool: TransformPool | None = None
        if preparation.works_ahead:
            self.ahead = BatchesAhead(
                self._gather,
                self._finish,
                workers=preparation.workers,
                depth=memory.ahead,
                batches=plan.num_batches,
            )
        if preparation.in_processes and preparation.transform is not None:
            self._pool = TransformPool(preparation.transform, preparation.workers)

    @property
    def is_here(self) -> bool:
        """Whether this process opened it, not a fork of it."""
        return self._process is _process

    def batch(self, position: Position, cursor: Cursor | None = None) -> Batch:
        """Return a batch.

        Args:
            position: which.
            cursor: the reader that goes through the epoch and has come to this batch; None for a batch out of turn.
        """
        if self.ahead is not None and cursor is not None:
            return self.ahead.get(cursor, *position)
        return self._finish(*position, self._gather(*position, own=cursor is not None))

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""
        order = self._order
        if order is None or order.epoch != epoch:
            order = self._order = self._plan.order(epoch)
        return order

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

    def _gather(self, epoch: int, batch: int, own: bool = True) -> Batch:
        """Return the batch as read, before `transform`. See `WindowRing.batch` for `own`."""
        arrays = self.windows.batch(self.order(epoch), *self._plan.bounds(batch), own=own)
        if self._plan.settings.remainder == "pad":
            arrays = self._plan.padded(arrays)
        return build_batch(self._plan.parts, self._plan.uses, arrays, again=np.copy)  # a transform may write to one

    def _finish(self, epoch: int, batch: int, values: Batch) -> Batch:
        transform = self._preparation.transform
        try:
            if self._pool is not None:
                values = self._pool.run(values)
            elif transform is not None:
                values = apply_transform(transform, values)
        except RuntimeError:
            self.windows.refuse_if_closed()  # and the pool with it
            raise
        except TransformFailure as failure:
            which = name_batch(batch, epoch, self.batch_rows(Position(epoch, batch)))
            raise DataError(f"transform, on {which}, {failure}") from failure.__cause__
        if self._plan.adds_weights:
            start, stop = self._plan.bounds(batch)
            values = (*values, (np.arange(self._plan.batch_rows) < stop - start).astype(np.float32))
        return values
