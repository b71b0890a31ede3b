"""A thread that reads what is too slow for a hook, and what happens between hooks."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from kerasmem.devices.host import TreeReader
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
                return BackgroundReading(*self._tree.read(), used)
            except Exception as error:  # psutil has several kinds
                self._tree = None
                self._note(f"host: this process and those under it cannot be read: {error}")
        return BackgroundReading(None, None, None, None, used)


class Sampler:
    """Reads host, process tree and driver now and then, and labels the readings with the phase of training.

    The thread ends with `stop`, or when no hook has come for ten minutes.
    A first reading is taken at once; `start` starts the thread.

    Args:
        phase: that training is in, as the hooks set it.
        read_driver, note: as for `MachineReader`.
        hertz: readings a second; 0 starts no thread, and only `read` reads.

    Attributes:
        latest: the newest reading.
        seconds: processor time that the thread has taken so far.
    """

    def __init__(
        self,
        phase: CurrentPhase,
        read_driver: Callable[[], int | None],
        note: Callable[[str], None],
        hertz: float,
    ) -> None:
        self.seconds = 0.0
        self._phase, self._machine = phase, MachineReader(read_driver, note)
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
            self.latest = self._machine.read()
            self._maxima.add(self._phase.phase, changes, self.latest)

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


_SHARE = 100  # a call's own time is to be one part in so many of the time between calls,
_LONGEST = 4  # which grows to so many periods for it; peaks are missed in longer ones
_JOIN_SECONDS = 2.0  # at the interpreter's end
_started: set[PeriodicThread] = set()


class PeriodicThread:
    """Calls a function every `period` seconds, less often where it takes long.

    The thread ends with `stop`, when the function says so, or before the interpreter ends: a thread that runs on
    while Python is taken apart can crash it.

    Args:
        name: of the thread.
        tick: the function; returns what it cost in seconds of processor time, None to end.
        period: seconds from one call to the next.
    """

    def __init__(self, name: str, tick: Callable[[], float | None], period: float) -> None:
        self._name, self._tick, self._period = name, tick, period
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None or not self._thread.is_alive():
            self._end = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._end,), name=self._name, daemon=True)
            self._thread.start()
            _started.add(self)

    def stop(self, timeout: float | None = None) -> None:
        """End the thread and wait for it; may be called more than once, and in the thread itself."""
        self._end.set()
        thread, self._thread = self._thread, None
        _started.discard(self)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self, end: threading.Event) -> None:
        rest = self._period
        while not end.wait(rest):
            spent = self._tick()
            if spent is None:
                return
            rest = max(self._period, min(_SHARE * spent, _LONGEST * self._period))


@atexit.register
def _before_exit() -> None:
    for thread in list(_started):
        thread.stop(_JOIN_SECONDS)
