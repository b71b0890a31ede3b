"""Background thread for slow readings and for readings between hooks."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kerasmem.devices.host import TreeReader
from kerasmem.monitoring.timeline import PhasePeaks, largest_known

# "between": data loading, other callbacks, tracing's aftermath; "epoch end": callbacks after the epoch's last batch
PHASES = ("train batch", "validation", "evaluate", "predict", "epoch end", "between")
_PATIENCE = 600.0  # seconds without a hook after which the thread ends, until the next hook
_SHARE = 100  # a reading takes at most 1 % of the time between readings,
_LONGEST = 4  # which is extended to at most 4 periods
_JOIN_SECONDS = 2.0  # at the interpreter's end
_running: set[Sampler] = set()


class BackgroundReading(NamedTuple):
    """One background reading, in bytes, or None if unknown.

    Attributes:
        rss_bytes: resident in this process.
        tree_bytes: resident in this process and its subprocesses; shared pages count for each.
        high_water_bytes: maximum of rss_bytes since the process started.
        swap_bytes: memory of this process in swap.
        driver_used_bytes: in use on the fullest card, by all processes.
    """

    rss_bytes: int | None
    tree_bytes: int | None
    high_water_bytes: int | None
    swap_bytes: int | None
    driver_used_bytes: int | None


class CurrentPhase:
    """Current phase of the training, written by hooks and read by the sampler's thread.

    Attributes:
        phase: current phase.
        rest: phase between batches.
        changes: number of times that `phase` was set.
    """

    __slots__ = ("changes", "phase", "rest")

    def __init__(self) -> None:
        self.phase = self.rest = "between"
        self.changes = 0

    def enter(self, phase: str) -> None:
        """Set the phase until another is set."""
        self.phase = self.rest = phase
        self.changes += 1


class PhaseMaxima:
    """Keeps the largest sizes of each phase.

    Examples:
        >>> maxima = PhaseMaxima()
        >>> maxima.add("epoch end", BackgroundReading(100, 120, None, 0, None))
        >>> maxima.cut(run=0, epoch=1)[0].tree_bytes
        120
    """

    def __init__(self) -> None:
        self._peaks: dict[str | None, PhasePeaks] = {}
        self._high_water: int | None = None
        self._last_rss: int | None = None

    def add(self, phase: str, reading: BackgroundReading) -> None:
        """Add a reading in a phase."""
        rss, tree, high, swap, used = reading
        self.put(PhasePeaks(0, None, phase, 1, rss, tree, swap, used))
        if high is not None and rss is not None:
            rose = self._high_water is not None and high > self._high_water
            if rose and high > max(rss, self._last_rss or 0):
                self.put(PhasePeaks(0, None, None, 0, high, high + (tree or rss) - rss))
            self._high_water = high
        self._last_rss = rss

    def largest(self, size: str) -> int | None:
        """Return the largest "rss_bytes", "tree_bytes", "swap_bytes" or "driver_used_bytes" since the last cut."""
        return largest_known(getattr(peaks, size) for peaks in self._peaks.values())

    def cut(self, run: int, epoch: int | None) -> list[PhasePeaks]:
        """Return the peaks so far, in the order of `PHASES` and others last, and reset them."""
        ordered = sorted(self._peaks.values(), key=lambda peaks: (*PHASES, peaks.phase).index(peaks.phase))
        self._peaks = {}
        return [replace(peaks, run=run, epoch=epoch) for peaks in ordered]

    def put(self, peaks: PhasePeaks) -> None:
        """Add peaks of a phase."""
        before = self._peaks.get(peaks.phase)
        self._peaks[peaks.phase] = peaks if before is None else before.joined(peaks)


class Sampler:
    """Reads this process, its subprocesses and the driver regularly, and labels readings with the phase of training.

    The constructor takes a first reading, and `start` starts the thread. The thread ends with `stop`, after a time
    without hooks, or before the interpreter ends, because it could crash a Python that is shutting down.

    Args:
        phase: phase of the training, set by the hooks.
        read_driver: returns the bytes in use on the fullest card, or None without a driver.
        note: called with a sentence about a reading that fails.
        hertz: readings per second. 0 starts no thread.
        patience: seconds without a hook after which the thread ends. Defaults to 600.
        name: name of the thread.

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
        self.lock = threading.RLock()  # garbage collection in the thread may end the run
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
        """End the thread and wait for it. May be called again, and by the thread itself."""
        self._end.set()
        thread, self._thread = self._thread, None
        _running.discard(self)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def read(self) -> None:
        """Take a reading now. If it fails, its sizes are None."""
        with self.lock:
            self.latest = self._reading()
            self._maxima.add(self._phase.phase, self.latest)

    def largest(self, size: str) -> int | None:
        """Return the largest of a size since the last `cut`, in bytes."""
        with self.lock:
            return self._maxima.largest(size)

    def cut(self, run: int, epoch: int | None) -> list[PhasePeaks]:
        """Return each phase's peaks since the last `cut`."""
        with self.lock:
            return self._maxima.cut(run, epoch)

    def _reading(self) -> BackgroundReading:
        used = self._read_driver()
        if self._tree is not None:
            try:
                return BackgroundReading(*self._tree.read(), used)
            except Exception as error:  # psutil has several kinds
                self._tree = None
                self._note(f"host: this process and its subprocesses cannot be read: {error}")
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
        sampler.lock = threading.RLock()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
