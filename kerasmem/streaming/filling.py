"""A window on its way into memory: the tasks that fill it, done by threads of a pool."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kerasmem.hdf5.direct.delivery import Scratch
from kerasmem.streaming.reader import RowReader, Task

_mine = threading.local()  # each thread's buffers


class Filling:
    """Work in progress on a window.

    Args:
        reader: whose file is checked once all is read.
        plan: returns the tasks; called by the first thread.
        changed: told when the filling is over, and with `filled` after each task.
        filled: in how many columns of the files each row is there; None where nobody asks.
    """

    def __init__(
        self,
        reader: RowReader,
        plan: Callable[[], Sequence[Task]],
        changed: threading.Condition,
        filled: np.ndarray | None = None,
    ) -> None:
        self._reader = reader
        self._filled = filled
        self._plan: Callable[[], Sequence[Task]] | None = plan
        self._planning = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._running = 0
        self._changed = changed
        self.over = False
        self.stopped = False
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether all of the window is there; once it is over, an error or `stop` may have left rows out."""
        return self.over and self.error is None and not self.stopped

    def start(self, pool: ThreadPoolExecutor, threads: int) -> None:
        """Let `threads` threads of the pool work on it."""
        self._running = threads
        for _ in range(threads):
            pool.submit(self._work)

    def stop(self) -> None:
        """Begin no further task; the window stays unfinished."""
        self.stopped = True
        self._plan = None
        self._tasks.clear()

    def _work(self) -> None:
        try:
            with self._planning:
                plan, self._plan = self._plan, None
                if plan is not None:
                    self._tasks.extend(plan())
            scratch = getattr(_mine, "scratch", None)
            if scratch is None:
                scratch = _mine.scratch = Scratch()
            while self._tasks:
                try:
                    task = self._tasks.popleft()
                except IndexError:
                    break
                places = task(scratch)
                if self._filled is not None and places is not None:
                    with self._changed:
                        self._filled[places] += 1
                        self._changed.notify_all()
        except BaseException as error:  # whoever waits for the window gets it
            self.error = self.error or error
            self.stop()
        finally:
            self._end()

    def _end(self) -> None:
        with self._changed:
            self._running -= 1
            last = not self._running
        if not last:
            return
        try:
            self._reader.check()
        except BaseException as error:
            self.error = error  # that the file was cut or replaced explains whatever else went wrong
        with self._changed:
            self.over = True
            self._changed.notify_all()
