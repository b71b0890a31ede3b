"""The few windows of rows that are in memory, filled block by block, shared by all threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kerasmem.errors import DataError
from kerasmem.streaming.columns import Column
from kerasmem.streaming.order import EpochOrder, Segment
from kerasmem.streaming.reader import RowReader


@dataclass
class _Slot:
    """One window's memory, and what is in it at the moment."""

    arrays: list[np.ndarray]
    key: tuple[int, int] | None = None
    blocks: int = 0  # filled so far
    rows: int = 0
    pins: int = 0
    used: int = 0
    failed: bool = False


class WindowStore:
    """Keeps up to `count` windows; their memory is taken once and used again.

    One thread reads at a time and the others wait; rows are copied out without holding them up.

    Args:
        reader: where the rows come from.
        columns: the columns the reader delivers.
        count: windows kept.
        rows: rows of the largest window.
    """

    def __init__(self, reader: RowReader, columns: Sequence[Column], *, count: int, rows: int) -> None:
        self._reader = reader
        self._columns = tuple(columns)
        self._count = count
        self._rows = rows
        self._slots: list[_Slot] = []
        self._changed = threading.Condition()
        self._clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes the windows occupy."""
        return sum(array.nbytes for slot in self._slots for array in slot.arrays)

    def copy(self, order: EpochOrder, segment: Segment, into: Sequence[np.ndarray]) -> None:
        """Copy the rows of `segment` into the arrays, reading the window if need be."""
        slot = self._pin(order, segment.window)
        try:
            places = order.places(segment)
            for source, target in zip(slot.arrays, into, strict=True):
                if places is None:
                    np.copyto(target, source[segment.start : segment.stop])
                else:
                    # mode="raise" would go through another copy
                    np.take(source, places, axis=0, out=target, mode="clip")
        finally:
            with self._changed:
                slot.pins -= 1
                self._changed.notify_all()

    def read_ahead(self, order: EpochOrder, window: int, share: float) -> None:
        """Fill a share of a window to come, in memory no longer in use; do nothing if there is none.

        Doing a little with every batch spreads the reading evenly: a training step never waits for a whole
        window, and TensorFlow's prefetch, which grows at every stall, stays small.
        """
        if self._count < 2 or not self._changed.acquire(blocking=False):
            return
        try:
            slot = self._find(order, window) or self._free(keep=order.key(window - 1))
            if slot is None or slot.failed:
                return
            if slot.key != order.key(window):
                self._assign(slot, order, window)
            try:
                self._fill(slot, order, window, share)
            except (DataError, MemoryError):
                slot.failed = True  # whoever needs the window reads on from here and meets the error
        finally:
            self._changed.release()

    def read_straight(self, start: int, stop: int, step: int, into: Sequence[np.ndarray]) -> None:
        """Read rows `start` to `stop` of the file into the arrays, `step` at a time, past all windows."""
        with self._changed:
            for first in range(start, stop, step):
                last = min(first + step, stop)
                self._reader.read(first, last, None, [array[first - start : last - start] for array in into])

    def close(self) -> None:
        """Give the memory back and close the file."""
        with self._changed:
            self._slots = []
            self._reader.close()

    def _pin(self, order: EpochOrder, window: int) -> _Slot:
        with self._changed:
            while True:
                slot = self._find(order, window)
                if slot is None:
                    slot = self._free()
                    if slot is not None:
                        self._assign(slot, order, window)
                if slot is not None:
                    break
                self._changed.wait()
            self._clock += 1
            slot.used = self._clock
            slot.failed = False
            self._fill(slot, order, window, 1.0)
            slot.pins += 1
            return slot

    def _find(self, order: EpochOrder, window: int) -> _Slot | None:
        key = order.key(window)
        return next((slot for slot in self._slots if slot.key == key), None)

    def _free(self, keep: tuple[int, int] | None = None) -> _Slot | None:
        """Return a slot that may be overwritten, the one longest out of use; None when all are in use."""
        if len(self._slots) < self._count:
            shapes = [((self._rows, *column.row_shape), column.dtype) for column in self._columns]
            slot = _Slot([np.empty(shape, dtype) for shape, dtype in shapes])
            self._slots.append(slot)
            return slot
        free = [slot for slot in self._slots if not slot.pins and (keep is None or slot.key != keep)]
        return min(free, key=lambda slot: slot.used, default=None)

    def _assign(self, slot: _Slot, order: EpochOrder, window: int) -> None:
        self._clock += 1
        slot.key, slot.blocks, slot.rows = order.key(window), 0, 0
        slot.used, slot.failed = self._clock, False

    def _fill(self, slot: _Slot, order: EpochOrder, window: int, share: float) -> None:
        blocks = order.window_order(window)
        goal = len(blocks) if share >= 1 else int(len(blocks) * share)
        while slot.blocks < goal:
            block = int(blocks[slot.blocks])
            start, stop = order.blocks.span(block)
            picked = order.blocks.picked(block)
            rows = stop - start if picked is None else len(picked)
            into = [array[slot.rows : slot.rows + rows] for array in slot.arrays]
            self._reader.read(start, stop, picked, into)
            slot.blocks += 1
            slot.rows += rows
