"""How a sequence makes its batches: what one process has open for it, and batch `place` of an epoch from that."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kerasmem.errors import DataError
from kerasmem.hdf5.columns import Column, Part
from kerasmem.hdf5.layout import DataLayout
from kerasmem.hdf5.settings import Access, read_whole
from kerasmem.streaming.ahead import BatchesAhead, TransformFailure, TransformPool, apply_transform
from kerasmem.streaming.budget import MemoryPlan
from kerasmem.streaming.description import name_batch
from kerasmem.streaming.live import Live, making
from kerasmem.streaming.order import Blocks, EpochOrder
from kerasmem.streaming.reader import RowReader
from kerasmem.streaming.sharding import ShardBlocks
from kerasmem.streaming.window import WindowStore


class Batches:
    """The part of a sequence that makes batches; not to be made by itself."""

    batch_size: int
    seed: int
    shuffle: bool
    layout: DataLayout
    plan: MemoryPlan
    transform: Callable[..., Any] | None
    _parts: tuple[Part, ...]
    _columns: tuple[Column, ...]
    _uses: Sequence[Sequence[int]]
    _blocks: Blocks | ShardBlocks
    _access: Access
    _check_finite: bool
    _processes: bool
    _preparers: int
    _live: Live | None

    if TYPE_CHECKING:  # what the sequence has to have
        epoch: int

        def __len__(self) -> Any: ...
        def _bounds(self, place: int) -> Any: ...

    def batch(self, place: int, epoch: int | None = None) -> tuple[Any, ...]:
        """Return batch number `place` of an epoch, whatever has been asked for before.

        Args:
            place: 0 to `len(self) - 1`.
            epoch: which epoch; the current one by default.
        """
        place = self._check_index(place)
        epoch = self.epoch if epoch is None else read_whole("epoch", epoch, 0)
        return self._finish(epoch, place, self._gather(epoch, place, own=False))

    def batch_rows(self, place: int, epoch: int | None = None) -> np.ndarray:
        """Return the row numbers of batch number `place`, int64, in the order delivered, counted through all files."""
        place = self._check_index(place)
        order = self._order(self.epoch if epoch is None else read_whole("epoch", epoch, 0))
        return order.rows(*self._bounds(place))

    def close(self) -> None:
        """Close the file, end the workers and free the windows; the sequence can be used again afterwards."""
        live, self._live = self._live, None
        if live is not None and live.is_here:
            if live.ahead is not None:
                live.ahead.close()
            if live.pool is not None:
                live.pool.close()
            live.store.close()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_live"] = None
        return state

    # ---- within

    @property
    def _works_ahead(self) -> bool:
        return self._preparers > 1 or self._processes

    def _here(self) -> Live:
        """Return what this process has open; a forked or unpickled copy starts afresh."""
        live = self._live
        if live is None or not live.is_here:
            with making():
                live = self._live
                if live is None or not live.is_here:
                    live = self._live = self._come_alive()
        return live

    def _come_alive(self) -> Live:
        reader = RowReader(
            self.layout,
            self._columns,
            resident=self.plan.cache_bytes,
            check_finite=self._check_finite,
            access=self._access,
        )
        store = WindowStore(
            reader,
            self._columns,
            count=self.plan.windows,
            rows=self.plan.window_rows,
            batch_rows=self.batch_size,
            batches=self.plan.queued_batches,
            threads=self.plan.threads,
        )
        ahead = pool = None
        if self._works_ahead:
            ahead = BatchesAhead(
                self._gather, self._finish, workers=self._preparers, depth=self.plan.ahead, batches=len(self)
            )
        if self._processes and self.transform is not None:
            pool = TransformPool(self.transform, self._preparers)
        return Live(threading.Lock(), reader, store, ahead, pool)

    def _order(self, epoch: int) -> EpochOrder:
        live = self._here()
        order = live.order
        if order is None or order.epoch != epoch:
            seed = self.seed if self.shuffle else None
            order = live.order = EpochOrder(self._blocks, self.plan.window_blocks, seed, epoch)
        return order

    def _gather(self, epoch: int, place: int, own: bool = True) -> tuple[Any, ...]:
        """Return the batch as read, before `transform`; `own` is as in `WindowStore.batch`."""
        arrays = self._here().store.batch(self._order(epoch), *self._bounds(place), own=own)
        taken: set[int] = set()
        parts = []
        for part, uses in zip(self._parts, self._uses, strict=True):
            # A dataset used twice (an autoencoder's) comes as two arrays: a transform may write to one.
            values = []
            for use in uses:
                values.append(arrays[use].copy() if use in taken else arrays[use])
                taken.add(use)
            parts.append(part.build(values))
        return tuple(parts)

    def _finish(self, epoch: int, place: int, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.transform is None:
            return batch
        pool = self._here().pool
        try:
            return apply_transform(self.transform, batch) if pool is None else pool.run(batch)
        except TransformFailure as failure:
            which = name_batch(place, epoch, self.batch_rows(place, epoch))
            raise DataError(f"transform, on {which}, {failure}") from failure.__cause__

    def _check_index(self, index: int) -> int:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} does not exist; there are {len(self)} batches, 0 to {len(self) - 1}")
        return index
