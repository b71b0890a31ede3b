"""The few windows of rows that are in memory, read by threads of their own ahead of the trainer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.columns import Column
from kerasmem.hdf5.rows.files import CLOSED
from kerasmem.hdf5.rows.memory import Arena
from kerasmem.streaming.budget import MemoryPlan
from kerasmem.streaming.filling import Filling
from kerasmem.streaming.order import EpochOrder, Segment
from kerasmem.streaming.reader import RowReader

_RECYCLED = 64 * 1024  # bytes of a batch from which on its memory is worth using again


@dataclass
class _Slot:
    """One window: its rows in the order of delivery, and the ranges already delivered."""

    arrays: list[np.ndarray]
    filling: Filling
    filled: np.ndarray | None  # in how many datasets each row is there; None if only the whole window is used
    users: int = 0  # threads that wait for it or copy from it
    used: int = 0
    given: list[tuple[int, int]] = field(default_factory=list)

    def was_given(self, start: int, stop: int) -> bool:
        return any(start < last and first < stop for first, last in self.given)

    def has(self, segment: Segment, datasets: int) -> bool:
        """Return whether the rows of a segment are there."""
        if self.filling.over:
            return True
        return self.filled is not None and bool((self.filled[segment.start : segment.stop] == datasets).all())

    def give(self, start: int, stop: int) -> list[np.ndarray]:
        if self.given and self.given[-1][1] == start:
            self.given[-1] = (self.given[-1][0], stop)
        else:
            self.given.append((start, stop))
        return [array[start:stop] for array in self.arrays]


@dataclass
class _Delivered:
    """How far an epoch has been given away: `at` is the next row, `first` to `stop` those of the window."""

    order: EpochOrder
    window: int
    slot: _Slot
    first: int
    stop: int
    at: int


@dataclass(eq=False)
class WindowStore:
    """Keep the planned number of windows. Threads read the next one while one is being delivered.

    Rows lie in a window in the order in which they are delivered, so a batch is a view of it. A batch that
    is the caller's own is given away for good: should its rows be asked for again, they are read again. It waits for
    its own rows only.
    Where all rows fit into one window, it stays, and batches are copies. Memory is used again when nobody
    holds an array in it any more.

    Args:
        reader: where the rows come from.
        columns: the columns the reader delivers.
        memory: number and size of windows, batches whose memory is reused, and threads that read.
        batch_rows: rows of the largest batch.
    """

    reader: RowReader
    columns: Sequence[Column]
    memory: MemoryPlan
    batch_rows: int

    def __post_init__(self) -> None:
        self._shapes = [(column.row_shape, column.dtype) for column in self.columns]
        self._datasets = len({column.name for column in self.columns})
        self._recycles = self.batch_rows * sum(column.row_bytes for column in self.columns) >= _RECYCLED
        self._changed = threading.Condition()
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._clock = 0
        self._delivered: _Delivered | None = None
        self._shared: tuple[int, int] | None = None  # the latest window that had to be read again
        self._windows = Arena(self._shapes, self.memory.window_rows, self.memory.windows)
        self._single = Arena(self._shapes, self.batch_rows, self.memory.queued_batches)

    @property
    def nbytes(self) -> int:
        """Bytes the windows occupy."""
        return self._windows.nbytes

    def batch(self, order: EpochOrder, start: int, stop: int, *, own: bool) -> list[np.ndarray]:
        """Return the rows delivered as rows `start` to `stop` of an epoch, an array a column.

        Args:
            order: the order of the epoch.
            start: first row.
            stop: row after the last.
            own: the caller goes through the epoch and will not ask for these rows again. Otherwise it gets
                a copy.

        Raises:
            DataError: If the rows cannot be read.
            UsageError: If the store is closed, also while the rows are waited for.
        """
        if own:
            with self._changed:
                now = self._delivered
                straight = now is not None and now.at == start and stop <= now.stop and now.order is order
                if now is not None and straight and now.slot.filling.done:
                    now.at = stop
                    arrays = now.slot.give(start - now.first, stop - now.first)
                    self._read_ahead(order, now.window + 1)
                    return arrays
        return self._any_batch(order, start, stop, own)

    def _any_batch(self, order: EpochOrder, start: int, stop: int, own: bool) -> list[np.ndarray]:
        segments = order.segments(start, stop)
        arrays: list[np.ndarray] | None = None
        done = 0
        for segment in segments:
            slot = self._use(order, segment)
            try:
                if own and len(segments) == 1 and self._may_give(order, segment.window):
                    with self._changed:
                        arrays = slot.give(segment.start, segment.stop)
                        first, last = start - segment.start, order.window_end(segment.window)
                        self._delivered = _Delivered(order, segment.window, slot, first, last, stop)
                else:
                    arrays = self._batch_arrays(stop - start) if arrays is None else arrays
                    self._copy(order, slot, segment, [array[done:] for array in arrays])
                done += segment.stop - segment.start
            finally:
                self._leave(slot)
        assert arrays is not None
        with self._changed:
            self._read_ahead(order, segments[-1].window + 1)
        return arrays

    def refuse_if_closed(self) -> None:
        """Raise if the store is closed.

        Raises:
            UsageError: If it is.
        """
        if self._closed:
            raise UsageError(CLOSED)

    def close(self) -> None:
        """End the threads, give the memory back and close the file for good. Whoever waits for rows gets an error."""
        with self._changed:
            self._closed = True
            for key in list(self._slots):
                self._drop(key)
            pool, self._pool = self._pool, None
        self.reader.files.break_off()  # a thread may be waiting for a store
        if pool is not None:
            pool.shutdown(wait=True)
        self.reader.close()
        with self._changed:
            self._windows.clear()
            self._single.clear()

    def _may_give(self, order: EpochOrder, window: int) -> bool:
        return order.windows > 1 and self._shared != order.key(window)

    def _batch_arrays(self, rows: int) -> list[np.ndarray]:
        if self._recycles:
            return self._single.take(rows)
        return [np.empty((rows, *shape), dtype) for shape, dtype in self._shapes]

    def _copy(self, order: EpochOrder, slot: _Slot, segment: Segment, into: Sequence[np.ndarray]) -> None:
        rows = segment.stop - segment.start
        # A window that stays from epoch to epoch has its rows in file order.
        places = order.places(segment) if order.windows == 1 else None
        for source, target in zip(slot.arrays, into, strict=True):
            if places is None:
                np.copyto(target[:rows], source[segment.start : segment.stop])
            else:
                # mode="raise" would go through another copy
                np.take(source, places, axis=0, out=target[:rows], mode="clip")

    # ---- which windows there are

    def _use(self, order: EpochOrder, segment: Segment) -> _Slot:
        """Return the window of a segment once its rows are there. It stays until `_leave`."""
        key = order.key(segment.window)
        with self._changed:
            while True:
                self.refuse_if_closed()
                slot = self._slots.get(key)
                if slot is not None and slot.was_given(segment.start, segment.stop):
                    if slot.users:
                        self._changed.wait()
                        continue
                    if slot.given != [(0, len(slot.arrays[0]))]:
                        # Two go through the same epoch at once: from now on both get copies.
                        self._shared = key
                    self._drop(key)
                    slot = None
                slot = slot or self._begin(order, segment.window, ahead=False)
                if slot is None:
                    self._changed.wait()
                elif self._wait_for(slot, key, segment):
                    return slot

    def _wait_for(self, slot: _Slot, key: tuple[int, int], segment: Segment) -> bool:
        """Wait for rows of a window as one of its users. Return False if it was dropped."""
        slot.users += 1
        try:
            while not slot.has(segment, self._datasets):
                self._changed.wait()
            if not slot.filling.over:
                self.reader.check()
        except BaseException:
            slot.users -= 1
            raise
        if slot.filling.error is None and not slot.filling.stopped:
            self._clock += 1
            slot.used = self._clock
            return True
        slot.users -= 1
        if self._slots.get(key) is slot:
            self._drop(key)  # whoever asks again has it read again
        self._changed.notify_all()
        self.refuse_if_closed()
        if slot.filling.error is not None:
            raise slot.filling.error
        return False

    def _leave(self, slot: _Slot) -> None:
        with self._changed:
            slot.users -= 1
            if not slot.users:
                self._changed.notify_all()

    def _drop(self, key: tuple[int, int]) -> None:
        slot = self._slots.pop(key)
        slot.filling.stop()
        if self._delivered is not None and self._delivered.slot is slot:
            self._delivered = None

    def _read_ahead(self, order: EpochOrder, window: int) -> None:
        """Have the window to come read, unless that takes more memory than there is."""
        if self._closed:
            return
        if window < order.windows and self.memory.windows > 1 and order.key(window) not in self._slots:
            self._begin(order, window, ahead=True)

    def _begin(self, order: EpochOrder, window: int, *, ahead: bool) -> _Slot | None:
        """Begin to read a window, evicting the least recently used one; None if all are in use.

        Args:
            order: the order of the epoch.
            window: which.
            ahead: whether nobody waits for it yet.
        """
        keep = order.key(window - 1) if ahead else None
        while len(self._slots) >= self.memory.windows:
            free = [key for key, slot in self._slots.items() if not slot.users and key != keep]
            if not free:
                return None
            oldest = min(free, key=lambda key: self._slots[key].used)
            if ahead and not self._slots[oldest].filling.over:
                return None
            self._drop(oldest)
        if ahead and not self._windows.idle:
            return None  # somebody still holds batches of the window before
        rows = order.window_rows(window)
        arrays = self._windows.take(rows)
        reader = self.reader
        in_file_order = order.windows == 1
        filled = None if in_file_order or not reader.checked_at_once else np.zeros(rows, np.uint16)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.memory.threads, thread_name_prefix="kerasmem-reader")
        filling = Filling(
            self._pool,
            self.memory.threads,
            reader,
            lambda: reader.tasks(order, window, arrays, in_file_order=in_file_order, ahead=ahead),
            self._changed,
            filled,
        )
        self._clock += 1
        slot = self._slots[order.key(window)] = _Slot(arrays, filling, filled, used=self._clock)
        return slot
