"""Which `fit`, `evaluate` or `predict` a hook comes from, and whether it is still being executed.

Nothing tells a callback that `fit` raised, nor that another `fit` has begun inside or beside it; the stack does.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any


class KerasCall:
    """One execution of a Keras method, known by the list of callbacks that it made. Holds nothing alive.

    Attributes:
        thread: the thread that executes it.
    """

    def __init__(self, method: str, callbacks: Any) -> None:
        self.thread = threading.get_ident()
        self._method = method
        self._callbacks = weakref.ref(callbacks)

    @classmethod
    def innermost(cls, method: str) -> KerasCall | None:
        """Return the innermost execution of a method in this thread; None where hooks are called by hand."""
        found = next(_callback_lists(sys._getframe(1), method), None)
        return None if found is None else cls(method, found)

    def arguments(self) -> dict[str, Any]:
        """Return the local variables of the method, its arguments among them; empty where it has ended."""
        here = self.thread == threading.get_ident()
        frame = sys._getframe(1) if here else sys._current_frames().get(self.thread)
        while frame is not None:
            if frame.f_code.co_name == self._method and frame.f_locals.get("callbacks") is self._callbacks():
                return dict(frame.f_locals)
            frame = frame.f_back
        return {}

    def is_running(self) -> bool:
        """Whether it has neither returned nor raised."""
        wanted = self._callbacks()
        if wanted is None:
            return False
        here = self.thread == threading.get_ident()
        frame = sys._getframe(1) if here else sys._current_frames().get(self.thread)
        return any(found is wanted for found in _callback_lists(frame, self._method))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KerasCall) and (self.thread, self._method, self._callbacks()) == (
            other.thread,
            other._method,
            other._callbacks(),
        )

    __hash__ = None  # type: ignore[assignment]


def _callback_lists(frame: FrameType | None, method: str) -> Iterator[Any]:
    """Yield the callback lists of a method's executions, the innermost first."""
    while frame is not None:
        if frame.f_code.co_name == method:
            found = frame.f_locals.get("callbacks")
            if hasattr(found, "on_train_batch_begin"):  # a CallbackList; not a user's plain list, in a fit around it
                yield found
        frame = frame.f_back
