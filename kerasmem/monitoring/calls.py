"""Which `fit`, `evaluate` or `predict` a hook comes from, and whether it is still being executed."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from kerasmem.compat.keras_calls import calls_under_way


class KerasCall:
    """One execution of a Keras method, known by the list of callbacks that Keras made for it. Keeps nothing alive.

    Attributes:
        thread: number of the thread that executes it.
    """

    def __init__(self, method: str, callbacks: Any) -> None:
        self.thread = threading.get_ident()
        self._method = method
        self._owner = weakref.ref(threading.current_thread())
        self._ended: list[Any] = []  # gets an item when Keras's list of callbacks goes away
        self._callbacks = weakref.ref(callbacks, self._ended.append)

    @classmethod
    def innermost(cls, method: str) -> KerasCall | None:
        """Return the innermost execution of a method in this thread; None where hooks are called by hand."""
        call = next(calls_under_way(method), None)
        return None if call is None else cls(method, call["callbacks"])

    def arguments(self) -> dict[str, Any]:
        """Return the local variables of the method, its arguments among them; empty where this thread runs no such."""
        callbacks = self._callbacks()
        calls = () if callbacks is None else calls_under_way(self._method)
        return next((call for call in calls if call["callbacks"] is callbacks), {})

    def is_running(self) -> bool:
        """Return whether it has neither returned nor raised.

        The thread that executes it knows. Another thread does not look at that one's stack, as this crashes Python;
        it says True until the thread has ended or Keras's list of callbacks is gone, which a traceback that is kept
        can delay.
        """
        if self._ended:
            return False
        if self.thread == threading.get_ident():
            return bool(self.arguments())
        owner = self._owner()
        return owner is not None and owner.is_alive()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KerasCall) or (self.thread, self._method) != (other.thread, other._method):
            return False
        return self._callbacks() is other._callbacks()

    __hash__ = None  # type: ignore[assignment]
