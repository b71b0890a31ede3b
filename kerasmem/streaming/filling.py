"""Fill one window in the background with the threads of a pool."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kerasmem.hdf5.format.filters import Scratch
from kerasmem.streaming.reader import RowReader, Task

_mine = threading.local()  # each thread's buffers


class Filling:
    """Work in progress on a window. It is submitted to the pool at once.

    Args:
        pool: its threads plan the tasks and run them.
        threads: how many of them run tasks.
        reader: its files are checked once all is read.
        plan: returns the tasks.
        changed: notified when the filling is over, and with `filled` after each task.
        filled: how many datasets of each row are read; None if nobody asks.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        threads: int,
        reader: RowReader,
        plan: Callable[[], Sequence[Task]],
        changed: threading.Condition,
        filled: np.ndarray | None = None,
    ) -> None:
        self._pool = pool
        self._reader = reader
        self._filled = filled
        self._changed = changed
        self._tasks: deque[Task] = deque()
        self._threads = threads
        self._left = 0  # jobs in the pool
        self.over = False
        self.stopped = False
        self.error: BaseException | None = None
        self._submit(self._plan, plan)

    @property
    def done(self) -> bool:
        """Whether the whole window was read. An error or `stop` leaves rows out."""
        return self.over and self.error is None and not self.stopped

    def stop(self) -> None:
        """Begin no further task. The window stays unfinished."""
        self.stopped = True

    def _submit(self, step: Callable[..., None], *arguments: object) -> None:
        with self._changed:
            self._left += 1
        try:
            self._pool.submit(self._run, step, *arguments)
        except RuntimeError:  # the pool was shut down
            with self._changed:
                self._left -= 1
            raise

    def _plan(self, plan: Callable[[], Sequence[Task]]) -> None:
        self._tasks.extend(plan())
        for _ in range(min(self._threads, len(self._tasks))):
            self._submit(self._read)

    def _read(self) -> None:
        """Run tasks until none is left: a job for each task would cost more than a small task itself."""
        if not hasattr(_mine, "scratch"):
            _mine.scratch = Scratch()
        while not self.stopped:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            places = task(_mine.scratch)
            if self._filled is not None and places is not None:
                with self._changed:
                    self._filled[places] += 1
                    self._changed.notify_all()

    def _run(self, step: Callable[..., None], *arguments: object) -> None:
        try:
            if not self.stopped:
                step(*arguments)
        except BaseException as error:  # whoever waits for the window gets it
            self.error = self.error or error
            self.stop()
        with self._changed:
            self._left -= 1
            if self._left:
                return
        try:
            self._reader.check()
        except BaseException as error:
            self.error = error  # that the file was cut or replaced explains whatever else went wrong
        with self._changed:
            self.over = True
            self._changed.notify_all()
