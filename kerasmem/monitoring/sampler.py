"""Background thread: slow readings, and readings between hooks."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

from kerasmem.devices.host import TreeReader
from kerasmem.monitoring.phases import BackgroundReading, CurrentPhase, PhaseMaxima, PhasePeaks

_PATIENCE = 600.0  # seconds without a hook after which the run counts as broken off, until another hook comes
_SHARE = 100  # a reading's own time is to be one part in so many of the time between readings,
_LONGEST = 4  # which grows to so many periods for it; peaks are missed in longer ones
_JOIN_SECONDS = 2.0  # at the interpreter's end
_running: set[Sampler] = set()


class Sampler:
    """Reads this process, those under it and the driver now and then, and labels readings with the phase of training.

    A first reading is taken at once; `start` starts the thread. It ends with `stop`, if no hook comes for a while, or
    before the interpreter ends: a thread that runs on while Python is taken apart can crash it.

    Args:
        phase: that training is in, as the hooks set it.
        read_driver: asks the driver, and returns the bytes in use on the fullest card; None where there is none.
        note: called with a sentence on what cannot be read and why.
        hertz: readings a second; 0 starts no thread, and only `read` reads.
        patience: seconds without a hook after which the thread ends.
        name: of the thread.

    Attributes:
        latest: the newest reading.
    """

    def __init__(
        self,
        phase: CurrentPhase,
        read_driver: Callable[[], int | None],
        note: Callable[[str], object],
        hertz: float,
        patience: float = _PATIENCE,
        name: str = "kerasmem sampler",
    ) -> None:
        self._phase, self._read_driver, self._note = phase, read_driver, note
        self._period = 1 / hertz if hertz > 0 else None
        self._patience, self._name = patience, name
        self._tree: TreeReader | None = TreeReader()
        self.lock = threading.Lock()
        self._maxima = PhaseMaxima()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.read()

    @property
    def is_running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, unless it runs or `hertz` is 0."""
        if self._period is None or self.is_running:
            return
        self._end = threading.Event()
        arguments = (self._end, self._period)
        self._thread = threading.Thread(target=self._run, args=arguments, name=self._name, daemon=True)
        self._thread.start()
        _running.add(self)

    def stop(self, timeout: float | None = None) -> None:
        """End the thread and wait for it; may be called more than once, and in the thread itself."""
        self._end.set()
        thread, self._thread = self._thread, None
        _running.discard(self)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def read(self) -> None:
        """Take a reading now; never raises because one failed."""
        with self.lock:
            self.latest = self._reading()
            self._maxima.add(self._phase.phase, self.latest)

    def largest(self, size: str) -> int | None:
        """Return the largest of a size since the last `cut`, in bytes."""
        with self.lock:
            return self._maxima.largest(size)

    def cut(self, run: int, epoch: int | None) -> list[PhasePeaks]:
        """Return each phase's peaks since the last time."""
        with self.lock:
            return self._maxima.cut(run, epoch)

    def _reading(self) -> BackgroundReading:
        used = self._read_driver()
        if self._tree is not None:
            try:
                return BackgroundReading(*self._tree.read(), used)
            except Exception as error:  # psutil has several kinds
                self._tree = None
                self._note(f"host: this process and those under it cannot be read: {error}")
        return BackgroundReading(None, None, None, None, used)

    def _run(self, end: threading.Event, period: float) -> None:
        rest, changes, changed = period, -1, 0.0
        while not end.wait(rest):
            if changes != self._phase.changes:
                changes, changed = self._phase.changes, time.monotonic()
            elif time.monotonic() - changed > self._patience:
                return
            start = time.thread_time()
            self.read()
            spent = time.thread_time() - start
            rest = max(period, min(_SHARE * spent, _LONGEST * period))


@atexit.register
def _before_exit() -> None:
    for sampler in list(_running):
        sampler.stop(_JOIN_SECONDS)


def _after_fork() -> None:
    """Give each sampler a new lock, since the parent's thread may have held it."""
    for sampler in _running:
        sampler.lock = threading.Lock()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
