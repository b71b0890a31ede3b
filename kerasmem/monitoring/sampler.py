"""A thread that reads what is too slow for a hook, and what happens between hooks."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from kerasmem.devices.tree import TreeReader
from kerasmem.monitoring.phases import Mark, Moment, PhaseBook, PhasePeaks, is_saving

_SHARE = 100  # a reading's own time is to be one part in so many of the time between readings,
_LONGEST = 4  # which grows to so many periods for it; peaks are missed in longer ones


class Sampler:
    """Reads host, process tree and driver now and then, and labels the readings with the phase of training.

    The thread ends with `stop`, when the run that it watches has broken off, or when nobody holds the sampler; it
    rests longer between readings where those take long.

    A first reading is taken at once, the thread is started by `start`.

    Args:
        mark: the phase, as the hooks set it.
        read_driver: asks the driver, and returns the bytes in use on the fullest card; None where there is none.
        note: called with each new sentence on what cannot be read and why.
        hertz: readings a second; 0 starts no thread, and only `read` reads.
        busy: whether the run is still going on, where that can be told.
        behind: work that the hooks leave to the thread; called at each of its readings, and as it ends by itself.

    Attributes:
        pid: of the process that it belongs to.
        seconds: processor time that the thread has taken so far.
    """

    def __init__(
        self,
        mark: Mark,
        read_driver: Callable[[], int | None],
        note: Callable[[str], None],
        hertz: float,
        busy: Callable[[], bool] | None = None,
        behind: Callable[[], None] | None = None,
    ) -> None:
        self.pid = os.getpid()
        self.seconds = 0.0
        self._mark, self._read_driver, self._note, self._busy = mark, read_driver, note, busy
        self._behind = None if behind is None else weakref.WeakMethod(behind)  # its owner holds the sampler
        self._watched = threading.get_ident()
        self._lock = threading.Lock()
        self._book = PhaseBook()
        self._tree: TreeReader | None = TreeReader()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._hertz = hertz
        self.read()

    def start(self) -> None:
        """Start the thread, where there is to be one."""
        if self._hertz > 0:
            arguments = (weakref.ref(self), self._stop, 1 / self._hertz)
            self._thread = threading.Thread(target=loop, args=arguments, name="kerasmem sampler", daemon=True)
            self._thread.start()

    def read(self) -> None:
        """Take a reading now; never raises because one failed."""
        with self._lock:
            changes = self._mark.changes
            phase = self._mark.phase
            if is_saving(self._watched):
                phase = "save"
            self._book.add(phase, changes, self._moment())

    def largest(self, size: str) -> int | None:
        """Return the largest of a size since the last `cut`, in bytes."""
        with self._lock:
            return self._book.largest(size)

    def cut(self, run: int, epoch: int | None) -> list[PhasePeaks]:
        """Return each phase's peaks since the last time."""
        with self._lock:
            return self._book.cut(run, epoch)

    def stop(self) -> None:
        """End the thread and wait for it; may be called more than once."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread() and self.pid == os.getpid():
            thread.join()

    def tick(self) -> float | None:
        """Take a reading in the thread; return its cost in seconds of processor time, None to end."""
        start = time.thread_time()
        running = self._busy is None or self._busy()
        if self._behind is not None and (work := self._behind()) is not None:
            work()
        if not running:
            return None
        self.read()
        spent = time.thread_time() - start
        self.seconds += spent
        return spent

    def _moment(self) -> Moment:
        used = self._read_driver()
        if self._tree is not None:
            try:
                rss, tree, _, high, swap = self._tree.read()
                return Moment(rss, tree, high, swap, used)
            except Exception as error:  # psutil has several kinds
                self._tree = None
                self._note(f"host: this process and those under it cannot be read: {error}")
        return Moment(None, None, None, None, used)


class Ticking(Protocol):
    """What `loop` drives."""

    def tick(self) -> float | None:
        """Return what a reading cost in seconds of processor time, None to end."""


def loop(reference: weakref.ref[Any], stop: threading.Event, period: float) -> None:
    """Drive a `Ticking` every `period` seconds, less often where its readings take long; holds nothing alive."""
    rest = period
    while not stop.wait(rest):
        ticking: Ticking | None = reference()
        spent = None if ticking is None else ticking.tick()
        if spent is None:
            return
        rest = max(period, min(_SHARE * spent, _LONGEST * period))
        del ticking
