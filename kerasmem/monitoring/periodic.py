"""A background thread that calls one method again and again."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable

_SHARE = 100  # a call's own time is to be one part in so many of the time between calls,
_LONGEST = 4  # which grows to so many periods for it; peaks are missed in longer ones
_JOIN_SECONDS = 2.0  # at the interpreter's end


class PeriodicThread:
    """Calls a method every `period` seconds, less often where it takes long. Does not keep the method's object alive.

    The thread ends with `stop`, when the method says so, when its object is gone, or before the interpreter ends: a
    thread that runs on while Python is taken apart can crash it.

    Args:
        name: of the thread.
        tick: the method; returns what it cost in seconds of processor time, None to end.
        period: seconds from one call to the next.
    """

    def __init__(self, name: str, tick: Callable[[], float | None], period: float) -> None:
        self._name, self._tick, self._period = name, weakref.WeakMethod(tick), period
        self._pid = os.getpid()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs, or is that of the process from which this one was forked."""
        if self._pid == os.getpid() and (self._thread is None or not self._thread.is_alive()):
            self._end = threading.Event()
            arguments = (self._tick, self._end, self._period)
            self._thread = threading.Thread(target=_run, args=arguments, name=self._name, daemon=True)
            self._thread.start()
            _started.add(self)

    def stop(self, timeout: float | None = None) -> None:
        """End the thread and wait for it; may be called more than once, and in the thread itself."""
        self._end.set()
        thread, self._thread = self._thread, None
        is_own = self._pid == os.getpid()  # not the parent's of a forked process
        if thread is not None and thread is not threading.current_thread() and is_own:
            thread.join(timeout)


def _run(tick: weakref.WeakMethod[Callable[[], float | None]], end: threading.Event, period: float) -> None:
    rest = period
    while not end.wait(rest):
        method = tick()
        spent = None if method is None else method()
        if spent is None:
            return
        rest = max(period, min(_SHARE * spent, _LONGEST * period))
        del method


_started: weakref.WeakSet[PeriodicThread] = weakref.WeakSet()


@atexit.register
def _before_exit() -> None:
    for thread in list(_started):
        thread.stop(_JOIN_SECONDS)
