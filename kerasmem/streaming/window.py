"""The current window of rows and the next one, loaded by a pool of threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.columns import Column
from kerasmem.hdf5.format.filters import Scratch
from kerasmem.hdf5.rows.arena import Arena
from kerasmem.hdf5.rows.open_files import CLOSED
from kerasmem.streaming.budget import MemoryPlan
from kerasmem.streaming.order import EpochOrder, Segment
from kerasmem.streaming.reader import RowReader, Task

_RECYCLED = 64 * 1024  # bytes; the memory of smaller batches is not reused
_thread = threading.local()  # buffers of each thread

Arrays = list[np.ndarray]
"""One array per column."""


def _make_buffers() -> None:
    _thread.scratch = Scratch()


class Window:
    """One window of an epoch, with its rows in the order of delivery.

    Args:
        order: the order of the epoch.
        number: number of the window in the epoch.
        arrays: one array per column.

    Attributes:
        delivered: number of rows, from the first, that readers own by now.
        stopped: whether loading failed or was cancelled, so rows are missing or wrong.
        over: whether all tasks have ended.
        errors: the error that stopped the loading, until it is raised.
    """

    def __init__(self, order: EpochOrder, number: int, arrays: Arrays) -> None:
        self.order = order
        self.number = number
        self.arrays = arrays
        self.first, self.stop = order.window_bounds(number)
        self.delivered = 0
        self.stopped = self.over = False
        self.errors: list[BaseException] = []
        self.tasks: deque[Task] = deque()
        self.jobs = 0  # in the pool
        # Number of datasets loaded of each row. A batch of a kept window needs rows from anywhere in it.
        self.loaded = None if self.is_kept else np.zeros(self.stop - self.first, np.uint16)

    @property
    def is_kept(self) -> bool:
        """Whether the window holds all rows, in file order, and is kept across epochs."""
        return self.order.windows == 1

    @property
    def is_delivered(self) -> bool:
        """Whether readers own all rows."""
        return self.delivered == self.stop - self.first

    def has_next(self, order: EpochOrder, start: int, stop: int) -> bool:
        """Return whether the window is complete, and its next rows to deliver are `start` to `stop` of the epoch."""
        follows = self.order is order and self.first + self.delivered == start and stop <= self.stop
        return follows and self.over and not self.stopped and not self.is_kept

    def has(self, segment: Segment, datasets: int) -> bool:
        """Return whether the rows of a segment are loaded, or will never be."""
        if self.over:
            return True
        return self.loaded is not None and bool((self.loaded[segment.start : segment.stop] == datasets).all())


@dataclass(eq=False)
class WindowRing:
    """At most two windows: one is delivered while the next one is loaded.

    A window holds its rows in the order of delivery, so a batch of a reader that follows the epoch is a view. The
    reader then owns these rows and may write to them. A batch waits only for its own rows. If all rows fit in one
    window, it is kept, and batches are copies.

    All other batches are read directly: those of rows that a reader owns already, and those of a reader of another
    epoch until its next batch or window. Memory is reused once no array refers to it.

    Args:
        reader: reads the rows.
        columns: the columns that the reader delivers.
        memory: number and size of windows, number of batches to reuse memory for, and number of threads.
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
        self._windows: list[Window] = []
        self._next: tuple[EpochOrder, int] | None = None  # the row after the latest owned batch
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._arena = Arena(self._shapes, self.memory.window_rows, self.memory.windows)
        self._single = Arena(self._shapes, self.batch_rows, self.memory.queued_batches)

    @property
    def nbytes(self) -> int:
        """Bytes of the windows."""
        return self._arena.nbytes

    def batch(self, order: EpochOrder, start: int, stop: int, *, own: bool) -> Arrays:
        """Return rows `start` to `stop` of an epoch in the order of delivery, one array per column.

        Args:
            order: the order of the epoch.
            start: first row.
            stop: row after the last.
            own: whether the caller follows the epoch and requests these rows only once.

        Raises:
            DataError: If the rows cannot be read.
            UsageError: If the ring is closed, even while the caller waits for the rows.
        """
        follows = False
        if own:
            with self._changed:
                window = self._windows[0] if self._windows else None
                if window is not None and window.has_next(order, start, stop):
                    return self._give(window, stop)
                follows, self._next = self._next == (order, start), (order, stop)
        arrays = self._deliver(order, order.segments(start, stop), own, follows)
        return self.reader.read(order.rows(start, stop), order.blocks.grid) if arrays is None else arrays

    def refuse_if_closed(self) -> None:
        """Raise `UsageError` if the ring is closed."""
        if self._closed:
            raise UsageError(CLOSED)

    def close(self) -> None:
        """Stop the threads, free the memory and close the files. Callers that wait for rows get an error."""
        with self._changed:
            self._closed = True
            self._drop_all()
            pool, self._pool = self._pool, None
        self.reader.files.break_off()  # ends requests that threads wait for
        if pool is not None:
            pool.shutdown(wait=True)
        self.reader.close()
        with self._changed:
            self._arena.clear()
            self._single.clear()

    # ---- delivery

    def _give(self, window: Window, stop: int) -> Arrays:
        """Return views of the next rows of a complete window."""
        first, window.delivered = window.delivered, stop - window.first
        self._next = window.order, stop
        self._load_ahead()
        return [array[first : window.delivered] for array in window.arrays]

    def _deliver(self, order: EpochOrder, segments: Sequence[Segment], own: bool, follows: bool) -> Arrays | None:
        """Return the rows of some segments, or None if they have to be read directly.

        Args:
            order: the order of the epoch.
            segments: the segments.
            own: as in `batch`.
            follows: whether the latest owned batch ended where the first segment starts.
        """
        rows = sum(segment.stop - segment.start for segment in segments)
        arrays: Arrays | None = None
        done = 0
        for segment in segments:
            window = self._wait(order, segment, own, follows)
            if window is None:
                return None
            if own and len(segments) == 1 and not window.is_kept:
                return [array[segment.start : segment.stop] for array in window.arrays]
            arrays = self._batch_arrays(rows) if arrays is None else arrays
            self._copy(order, window, segment, [array[done:] for array in arrays])
            if window.delivered > segment.start and not own:
                return None  # another reader owns these rows by now, and may have written to them
            done += segment.stop - segment.start
        return arrays

    def _wait(self, order: EpochOrder, segment: Segment, own: bool, follows: bool) -> Window | None:
        """Wait for the rows of a segment. Return their window, or None if they have to be read directly."""
        with self._changed:
            self.refuse_if_closed()
            window = self._claim(order, segment, own, follows)
            if window is None:
                return None
            while not window.has(segment, self._datasets):
                self._changed.wait()
            if not window.over:
                self.reader.check(order, window.first + segment.start, window.first + segment.stop)
            if window.stopped:
                if window in self._windows:
                    self._windows.remove(window)  # so that the next request reads it again
                self.refuse_if_closed()
                if window.errors:
                    raise window.errors.pop()  # its traceback refers to the window; a cycle would keep its memory
                return None  # cancelled by another reader
            if own and window in self._windows:  # it may have been dropped
                self._load_ahead()
            return window

    def _batch_arrays(self, rows: int) -> Arrays:
        if self._recycles:
            return self._single.take(rows)
        return [np.empty((rows, *shape), dtype) for shape, dtype in self._shapes]

    def _copy(self, order: EpochOrder, window: Window, segment: Segment, into: Sequence[np.ndarray]) -> None:
        rows = segment.stop - segment.start
        slots = order.slots(segment) if window.is_kept else None
        for source, target in zip(window.arrays, into, strict=True):
            if slots is None:
                np.copyto(target[:rows], source[segment.start : segment.stop])
            else:
                # mode="raise" would make another copy
                np.take(source, slots, axis=0, out=target[:rows], mode="clip")

    # ---- current windows, under the lock

    def _claim(self, order: EpochOrder, segment: Segment, own: bool, follows: bool) -> Window | None:
        """Return the window of a segment, which may have to be loaded, or None if its rows have to be read directly.

        With `own`, the reader then owns the rows. Nobody else gets them from the window.
        """
        window = self._find(order, segment.window)
        if window is None:
            if not self._may_replace(order, segment, own, follows):
                return None
            self._drop_all()
            window = self._begin(order, segment.window, ahead=False)
        if window.delivered > segment.start:
            return None  # readers own these rows, and may have written to them
        if own and not window.is_kept:
            window.delivered = segment.stop
        return window

    def _may_replace(self, order: EpochOrder, segment: Segment, own: bool, follows: bool) -> bool:
        """Return whether to drop the current windows and load the one of a segment."""
        if all(window.is_delivered for window in self._windows):
            return True
        if own:  # the reader jumped, or another one follows an epoch
            return segment.start == 0 or follows
        is_unfinished = any(window.delivered and not window.is_delivered for window in self._windows)
        return not is_unfinished and self._find(order, segment.window - 1) is not None

    def _find(self, order: EpochOrder, number: int) -> Window | None:
        key = order.key(number)
        return next((window for window in self._windows if window.order.key(window.number) == key), None)

    def _drop_all(self) -> None:
        for window in self._windows:
            window.stopped |= not window.over
        self._windows = []

    def _load_ahead(self) -> None:
        """Start to load the next window if there is memory for it."""
        while len(self._windows) > 1 and self._windows[0].is_delivered and self._windows[0].over:
            del self._windows[0]
        last = self._windows[-1]
        if last.number + 1 == last.order.windows or len(self._windows) == self.memory.windows:
            return
        if self._arena.idle:  # else there are still references to batches of the previous window
            self._begin(last.order, last.number + 1, ahead=True)

    def _begin(self, order: EpochOrder, number: int, *, ahead: bool) -> Window:
        """Start to load a window. With `ahead`, no reader waits for it yet."""
        window = Window(order, number, self._arena.take(order.window_rows(number)))
        self._submit(window, lambda: self._plan(window, ahead=ahead))
        self._windows.append(window)
        return window

    # ---- loading, in the threads of the pool

    def _submit(self, window: Window, step: Callable[[], None]) -> None:
        with self._changed:
            self.refuse_if_closed()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.memory.threads, "kerasmem-reader", _make_buffers)
            self._pool.submit(self._run, window, step)
            window.jobs += 1

    def _plan(self, window: Window, *, ahead: bool) -> None:
        tasks = self.reader.tasks(window.order, window.number, window.arrays, in_file_order=window.is_kept, ahead=ahead)
        window.tasks.extend(tasks)
        for _ in range(min(self.memory.threads, len(tasks))):
            self._submit(window, lambda: self._load(window))

    def _load(self, window: Window) -> None:
        """Run tasks until none is left. One job per task would cost more than a small task."""
        while not window.stopped:
            try:
                task = window.tasks.popleft()
            except IndexError:
                return
            rows = task(_thread.scratch)
            if window.loaded is not None and rows is not None:
                with self._changed:
                    window.loaded[rows] += 1
                    self._changed.notify_all()

    def _run(self, window: Window, step: Callable[[], None]) -> None:
        try:
            if not window.stopped:
                step()
        except BaseException as error:  # raised by `_wait`
            window.errors = window.errors or [error]
            window.stopped = True
        with self._changed:
            window.jobs -= 1
            if window.jobs:
                return
        try:
            self.reader.check()
        except BaseException as error:
            window.errors = [error]  # a file that was cut or replaced explains all other errors
            window.stopped = True
        with self._changed:
            window.over = True
            self._changed.notify_all()
