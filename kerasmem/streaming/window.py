"""The window of rows that is being delivered and the one after it, loaded by a pool of threads."""

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

_RECYCLED = 64 * 1024  # bytes of a batch from which on its memory is worth using again
_mine = threading.local()  # each thread's buffers


class Window:
    """One window of an epoch, its rows in the order of delivery.

    Args:
        order: the order of the epoch.
        number: which of its windows.
        arrays: an array a column.
        counts: whether to count the datasets of each row that are loaded.

    Attributes:
        given: rows from the first on that were delivered for good.
        stopped: whether no further task begins.
        over: whether no task runs any more.
        error: the error that ended the loading.
    """

    def __init__(self, order: EpochOrder, number: int, arrays: list[np.ndarray], *, counts: bool) -> None:
        self.order = order
        self.number = number
        self.arrays = arrays
        self.first, self.stop = order.window_bounds(number)
        self.given = 0
        self.stopped = self.over = False
        self.error: BaseException | None = None
        self.tasks: deque[Task] = deque()
        self.jobs = 0  # in the pool
        self.loaded = np.zeros(self.stop - self.first, np.uint16) if counts else None

    @property
    def is_kept(self) -> bool:
        """Whether it holds all rows, in file order, and stays from epoch to epoch."""
        return self.order.windows == 1

    @property
    def is_delivered(self) -> bool:
        """Whether all rows were delivered for good."""
        return self.given == self.stop - self.first

    @property
    def has_failed(self) -> bool:
        """Whether rows are missing or wrong."""
        return self.stopped or self.error is not None

    def has_next(self, order: EpochOrder, start: int, stop: int) -> bool:
        """Return whether it is complete, and these rows of an epoch are those to be delivered for good next."""
        follows = self.order is order and self.first + self.given == start and stop <= self.stop
        return follows and self.over and not self.has_failed and not self.is_kept

    def has(self, segment: Segment, datasets: int) -> bool:
        """Return whether the rows of a segment are loaded, or will not be."""
        if self.over:
            return True
        return self.loaded is not None and bool((self.loaded[segment.start : segment.stop] == datasets).all())


@dataclass(eq=False)
class WindowRing:
    """At most two windows: one is delivered while the next one is loaded.

    Rows lie in a window in the order in which they are delivered, so a batch of a reader that goes through an epoch is
    a view of it. These rows are the reader's for good. A batch waits for its own rows only. If all rows fit into one
    window, it stays, and batches are copies. Any other batch is read by itself: one of delivered rows, and one of a
    reader that goes through another epoch, until its next batch or window. Memory is used again when nobody holds an
    array in it any more.

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
        self._windows: list[Window] = []
        self._next: tuple[EpochOrder, int] | None = None  # the row after the latest batch of a reader of an epoch
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._arena = Arena(self._shapes, self.memory.window_rows, self.memory.windows)
        self._single = Arena(self._shapes, self.batch_rows, self.memory.queued_batches)

    @property
    def nbytes(self) -> int:
        """Bytes the windows occupy."""
        return self._arena.nbytes

    def batch(self, order: EpochOrder, start: int, stop: int, *, own: bool) -> list[np.ndarray]:
        """Return the rows delivered as rows `start` to `stop` of an epoch, an array a column.

        Args:
            order: the order of the epoch.
            start: first row.
            stop: row after the last.
            own: whether the caller goes through the epoch and will not ask for these rows again.

        Raises:
            DataError: If the rows cannot be read.
            UsageError: If the ring is closed, also while the rows are waited for.
        """
        if own:
            with self._changed:
                window = self._windows[0] if self._windows else None
                if window is not None and window.has_next(order, start, stop):
                    return self._give(window, stop)
        segments = order.segments(start, stop)
        with self._changed:
            self.refuse_if_closed()
            held = self._is_held(order, segments[0], start, own)
            if own:
                self._next = order, stop
        arrays = self._deliver(order, segments, own) if held else None
        return self.reader.read(order.rows(start, stop), order.blocks.grid) if arrays is None else arrays

    def refuse_if_closed(self) -> None:
        """Raise if the ring is closed.

        Raises:
            UsageError: If it is.
        """
        if self._closed:
            raise UsageError(CLOSED)

    def close(self) -> None:
        """End the threads, give the memory back and close the file for good. Whoever waits for rows gets an error."""
        with self._changed:
            self._closed = True
            self._drop_all()
            pool, self._pool = self._pool, None
        self.reader.files.break_off()  # a thread may be waiting for a store
        if pool is not None:
            pool.shutdown(wait=True)
        self.reader.close()
        with self._changed:
            self._arena.clear()
            self._single.clear()

    # ---- delivery

    def _is_held(self, order: EpochOrder, segment: Segment, start: int, own: bool) -> bool:
        """Return whether a batch is delivered out of windows, which may have to be loaded for it."""
        window = self._find(order, segment.window)
        if window is not None:
            return window.given <= segment.start
        if all(window.is_delivered for window in self._windows):
            return True
        if own:  # its reader goes on elsewhere, or another one does
            return segment.start == 0 or self._next == (order, start)
        return self._is_free and self._find(order, segment.window - 1) is not None

    def _deliver(self, order: EpochOrder, segments: Sequence[Segment], own: bool) -> list[np.ndarray] | None:
        """Return the rows of some segments; None if their windows went to another reader meanwhile."""
        rows = sum(segment.stop - segment.start for segment in segments)
        arrays: list[np.ndarray] | None = None
        done = 0
        for segment in segments:
            window = self._wait(order, segment, own)
            if window is None:
                return None
            if own and len(segments) == 1 and not window.is_kept:
                return [array[segment.start : segment.stop] for array in window.arrays]
            arrays = self._batch_arrays(rows) if arrays is None else arrays
            self._copy(order, window, segment, [array[done:] for array in arrays])
            if window.given > segment.start and not own:
                return None  # they were delivered for good meanwhile, and may have been written to
            done += segment.stop - segment.start
        return arrays

    def _wait(self, order: EpochOrder, segment: Segment, own: bool) -> Window | None:
        """Return the window of a segment once its rows are there; None if the window was dropped."""
        with self._changed:
            self.refuse_if_closed()
            window = self._find(order, segment.window)
            if window is None:
                if not own and not self._is_free:
                    return None
                self._drop_all()
                window = self._begin(order, segment.window, ahead=False)
            if own and not window.is_kept:
                window.given = max(window.given, segment.stop)
            while not window.has(segment, self._datasets):
                self._changed.wait()
            if not window.over:
                self.reader.check(order, window.first + segment.start, window.first + segment.stop)
            if window.has_failed:
                if window in self._windows:
                    self._windows.remove(window)  # whoever asks again has it read again
                self.refuse_if_closed()
                if window.error is not None:
                    raise window.error
                return None
            if own and window in self._windows:  # not dropped meanwhile
                self._load_ahead()
            return window

    def _give(self, window: Window, stop: int) -> list[np.ndarray]:
        first, window.given = window.given, stop - window.first
        self._next = window.order, stop
        self._load_ahead()
        return [array[first : window.given] for array in window.arrays]

    def _batch_arrays(self, rows: int) -> list[np.ndarray]:
        if self._recycles:
            return self._single.take(rows)
        return [np.empty((rows, *shape), dtype) for shape, dtype in self._shapes]

    def _copy(self, order: EpochOrder, window: Window, segment: Segment, into: Sequence[np.ndarray]) -> None:
        rows = segment.stop - segment.start
        places = order.places(segment) if window.is_kept else None
        for source, target in zip(window.arrays, into, strict=True):
            if places is None:
                np.copyto(target[:rows], source[segment.start : segment.stop])
            else:
                # mode="raise" would go through another copy
                np.take(source, places, axis=0, out=target[:rows], mode="clip")

    # ---- which windows there are, under the lock

    @property
    def _is_free(self) -> bool:
        """Whether no reader that goes through an epoch is within a window."""
        return not any(window.given and not window.is_delivered for window in self._windows)

    def _find(self, order: EpochOrder, number: int) -> Window | None:
        key = order.key(number)
        return next((window for window in self._windows if window.order.key(window.number) == key), None)

    def _drop_all(self) -> None:
        for window in self._windows:
            window.stopped = window.stopped or not window.over
        self._windows = []

    def _load_ahead(self) -> None:
        """Begin to load the window after the one that is delivered, unless that takes more memory than there is."""
        while len(self._windows) > 1 and self._windows[0].is_delivered and self._windows[0].over:
            del self._windows[0]
        last = self._windows[-1]
        if last.number + 1 == last.order.windows or len(self._windows) == self.memory.windows:
            return
        if self._arena.idle:  # else somebody still holds batches of the window before
            self._begin(last.order, last.number + 1, ahead=True)

    def _begin(self, order: EpochOrder, number: int, *, ahead: bool) -> Window:
        """Begin to load a window. With `ahead`, nobody waits for it yet."""
        arrays = self._arena.take(order.window_rows(number))
        window = Window(order, number, arrays, counts=order.windows > 1)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.memory.threads, thread_name_prefix="kerasmem-reader")
        self._submit(window, lambda: self._plan(window, ahead=ahead))
        self._windows.append(window)
        return window

    # ---- loading, in the threads of the pool

    def _submit(self, window: Window, step: Callable[[], None]) -> None:
        with self._changed:
            pool = self._pool
            if pool is None:
                raise UsageError(CLOSED)
            pool.submit(self._run, window, step)
            window.jobs += 1

    def _plan(self, window: Window, *, ahead: bool) -> None:
        tasks = self.reader.tasks(window.order, window.number, window.arrays, in_file_order=window.is_kept, ahead=ahead)
        window.tasks.extend(tasks)
        for _ in range(min(self.memory.threads, len(tasks))):
            self._submit(window, lambda: self._load(window))

    def _load(self, window: Window) -> None:
        """Run tasks until none is left: a job for each task would cost more than a small task itself."""
        if not hasattr(_mine, "scratch"):
            _mine.scratch = Scratch()
        while not window.stopped:
            try:
                task = window.tasks.popleft()
            except IndexError:
                return
            places = task(_mine.scratch)
            if window.loaded is not None and places is not None:
                with self._changed:
                    window.loaded[places] += 1
                    self._changed.notify_all()

    def _run(self, window: Window, step: Callable[[], None]) -> None:
        try:
            if not window.stopped:
                step()
        except BaseException as error:  # whoever waits for the window gets it
            window.error = window.error or error
            window.stopped = True
        with self._changed:
            window.jobs -= 1
            if window.jobs:
                return
        try:
            self.reader.check()
        except BaseException as error:
            window.error = error  # that the file was cut or replaced explains whatever else went wrong
        with self._changed:
            window.over = True
            self._changed.notify_all()
