"""A thread that reads what is too slow for a hook, and what happens between hooks."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

from kerasmem.devices.processes import TreeReader
from kerasmem.monitoring.periodic import PeriodicThread
from kerasmem.monitoring.phases import BackgroundReading, CurrentPhase, PhaseMaxima, PhasePeaks

_PATIENCE = 600.0  # seconds without a hook after which the run counts as broken off, until another hook comes


class MachineReader:
    """Reads this process, those under it and the driver; what can be read no more is None from then on.

    Args:
        read_driver: asks the driver, and returns the bytes in use on the fullest card; None where there is none.
        note: called with a sentence on what cannot be read and why.
    """

    def __init__(self, read_driver: Callable[[], int | None], note: Callable[[str], object]) -> None:
        self._read_driver, self._note = read_driver, note
        self._tree: TreeReader | None = TreeReader()

    def read(self) -> BackgroundReading:
        """Take a reading; never raises because one failed."""
        used = self._read_driver()
        if self._tree is not None:
            try:
                rss, tree, _, high, swap = self._tree.read()
                return BackgroundReading(rss, tree, high, swap, used)
            except Exception as error:  # psutil has several kinds
                self._tree = None
                self._note(f"host: this process and those under it cannot be read: {error}")
        return BackgroundReading(None, None, None, None, used)


class Sampler:
    """Reads host, process tree and driver now and then, and labels the readings with the phase of training.

    The thread ends with `stop`, when no hook has come for ten minutes, or when nobody holds the sampler.
    A first reading is taken at once; `start` starts the thread.

    Args:
        phase: that training is in, as the hooks set it.
        read_driver, note: as for `MachineReader`.
        hertz: readings a second; 0 starts no thread, and only `read` reads.
        behind: work that the hooks leave to the thread; called at each of its readings, and as it ends by itself.

    Attributes:
        pid: of the process that it belongs to.
        seconds: processor time that the thread has taken so far.
    """

    def __init__(
        self,
        phase: CurrentPhase,
        read_driver: Callable[[], int | None],
        note: Callable[[str], None],
        hertz: float,
        behind: Callable[[], None] | None = None,
    ) -> None:
        self.pid = os.getpid()
        self.seconds = 0.0
        self._phase, self._machine = phase, MachineReader(read_driver, note)
        self._behind = None if behind is None else weakref.WeakMethod(behind)  # its owner holds the sampler
        self._lock = threading.Lock()
        self._maxima = PhaseMaxima()
        self._thread = PeriodicThread("kerasmem sampler", self.tick, 1 / hertz) if hertz > 0 else None
        self._last_change = (-1, 0.0)  # how often the phase had changed, and when that was first seen
        self.read()

    def start(self) -> None:
        """Start the thread, where there is to be one and none runs."""
        if self._thread is not None:
            self._thread.start()

    def read(self) -> None:
        """Take a reading now; never raises because one failed."""
        with self._lock:
            changes = self._phase.changes
            self._maxima.add(self._phase.phase, changes, self._machine.read())

    def largest(self, size: str) -> int | None:
        """Return the largest of a size since the last `cut`, in bytes."""
        with self._lock:
            return self._maxima.largest(size)

    def cut(self, run: int, epoch: int | None) -> list[PhasePeaks]:
        """Return each phase's peaks since the last time."""
        with self._lock:
            return self._maxima.cut(run, epoch)

    def stop(self) -> None:
        """End the thread and wait for it; may be called more than once."""
        if self._thread is not None:
            self._thread.stop()

    def tick(self) -> float | None:
        """Take a reading in the thread; return its cost in seconds of processor time, None to end."""
        start = time.thread_time()
        if self._behind is not None and (work := self._behind()) is not None:
            work()
        if self._is_idle():
            return None
        self.read()
        spent = time.thread_time() - start
        self.seconds += spent
        return spent

    def _is_idle(self) -> bool:
        now = time.monotonic()
        if self._phase.changes != self._last_change[0]:
            self._last_change = (self._phase.changes, now)
        return now - self._last_change[1] > _PATIENCE
