"""State that each process makes for itself: locks, threads and open files do not survive a fork or a pickle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class _Process:
    """A process: compared in place of its number, which the system would have to be asked for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # a few instructions long, and never held while a value is used


_process = _Process()


def _renew() -> None:
    global _process
    _process = _Process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class ForkLocal(Generic[Value]):
    """A value of one process. A forked process and a pickled copy begin without one.

    Examples:
        >>> lock = ForkLocal()
        >>> lock.get(threading.Lock) is lock.get(threading.Lock)
        True
    """

    def __init__(self) -> None:
        self._held: tuple[_Process, Value] | None = None

    def get(self, make: Callable[[], Value]) -> Value:
        """Return the value of this process, made by `make` unless there is one."""
        held = self._held
        if held is None or held[0] is not _process:
            with _process.lock:
                held = self._held
                if held is None or held[0] is not _process:
                    held = self._held = _process, make()
        return held[1]

    def peek(self) -> Value | None:
        """Return the value of this process, or None if there is none."""
        held = self._held
        return None if held is None or held[0] is not _process else held[1]

    def take(self) -> Value | None:
        """Remove the value of this process and return it, or None if there is none."""
        with _process.lock:
            value, self._held = self.peek(), None
        return value

    def __getstate__(self) -> dict[str, None]:
        return {"_held": None}
