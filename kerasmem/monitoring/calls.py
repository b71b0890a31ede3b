"""Which `fit`, `evaluate` or `predict` a hook comes from, whether it is still being executed, and what it was given."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from kerasmem.compat.keras_calls import calls_under_way
from kerasmem.units import format_size

ARGUMENTS = ("x", "y", "sample_weight", "validation_data")


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


class Callers:
    """Tells the hooks of the run that a logger follows from those of other calls, which are its guests.

    One logger follows one run, so a `fit` inside another and any call in another thread have to wait until the one
    under way has ended. (`evaluate` and `predict` inside `fit` are parts of it.)

    Attributes:
        call: that began the run under way; None if that was begun by hand.
    """

    def __init__(self) -> None:
        self.call: KerasCall | None = None
        self._taken_up: int | None = None  # the thread in which a Keras method has that has not begun yet
        self._guests: dict[int, KerasCall] = {}  # calls that are not logged, by thread

    def take_up(self) -> None:
        """Note that a Keras method of this thread is about to begin."""
        self._taken_up = threading.get_ident()

    def is_taken_up(self) -> bool:
        """Return whether a Keras method of this thread is about to begin."""
        return self._taken_up == threading.get_ident()

    def has_begun(self) -> None:
        """Note that the method that was about to begin has done so."""
        self._taken_up = None

    def is_guest(self) -> bool:
        """Return whether the hook comes from a call that is not logged."""
        if not self._guests:
            return False
        thread = threading.get_ident()
        guest = self._guests.get(thread)
        if guest is None:
            return False
        if guest.is_running():
            return True
        del self._guests[thread]  # it may have raised; nothing else would tell
        return False

    def refusal(self, method: str) -> str | None:
        """Return why the call that begins now cannot be logged, and make it a guest; None where it can.

        There is nothing to say ("") where it is the call under way itself: the logger is in the list twice.
        """
        under_way = self.call
        if under_way is None:
            return None
        call = KerasCall.innermost(method)
        here = under_way.thread == threading.get_ident()
        if call is None or (here and method != "fit") or not under_way.is_running():
            return None
        if call == under_way:
            return ""
        self._guests[threading.get_ident()] = call
        self._taken_up = None
        where = "inside the run under way" if here else "in another thread while a run was under way"
        return f"run: {method} was called {where} and is not logged; give it a MemoryLogger of its own"


def float64_inputs(arguments: Mapping[str, Any], floatx: str = "float32") -> list[str]:
    """Return a sentence for each float64 array among a Keras method's arguments, nested ones included.

    Args:
        arguments: by name; those that are not `ARGUMENTS` are left alone.
        floatx: what Keras computes in; nothing is too wide where that is float64.

    Examples:
        >>> import numpy as np
        >>> print(*float64_inputs({"x": {"image": np.zeros((4, 2))}, "y": np.zeros(4, "float32")}))
        ... # doctest: +ELLIPSIS
        input: x['image'] is float64 and takes 64 B, twice the 32 B of float32, ...
    """
    if floatx == "float64":
        return []
    return [
        f"input: {place} is float64 and takes {format_size(size)}, twice the {format_size(size // 2)} of float32, "
        "to which Keras converts it by a further copy; pass it .astype('float32')"
        for name in ARGUMENTS
        for place, size in _wide(name, arguments.get(name))
    ]


def _wide(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """Yield where a float64 array was handed in, such as "x" or "validation_data[0]['image']", and its bytes."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _wide(f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            if hasattr(inner, "dtype") or isinstance(inner, (dict, list, tuple)):
                yield from _wide(f"{name}[{place}]", inner)
    else:
        dtype = getattr(value, "dtype", None)
        size = getattr(value, "nbytes", None)
        if getattr(dtype, "name", None) == "float64" and isinstance(size, int):
            yield name, size
