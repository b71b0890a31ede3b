"""Replacement of other packages' functions in one thread, while a context lasts.

The first patch of an attribute installs a dispatcher, and the end of the last patch restores the original. The
dispatcher uses the calling thread's stack of replacements, so threads do not affect each other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

_dispatchers: dict[tuple[int, str], _Dispatcher] = {}
_lock = threading.Lock()  # held while dispatchers are installed and removed, not while they are used


@contextlib.contextmanager
def patch(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a class or module in this thread.

    Args:
        owner: the class or module.
        name: the function's name in it.
        replacement: function to call with the replaced function and the call's arguments.

    Examples:
        >>> import json
        >>> with patch(json, "dumps", lambda dumps, value: f"<{dumps(value)}>"):
        ...     json.dumps(1)
        '<1>'
    """
    with _lock:
        dispatcher = _dispatchers.get((id(owner), name)) or _Dispatcher(owner, name)
        dispatcher.enter()
    stack = dispatcher.in_thread.stack
    inner = functools.partial(replacement, stack[-1] if stack else dispatcher.original)
    try:
        with dispatcher.in_thread.push(inner):
            yield
    finally:
        with _lock:
            dispatcher.leave()


class ThreadStack(threading.local):
    """Thread-local stack, with the entry of the innermost scope last."""

    def __init__(self) -> None:
        self.stack: list[Any] = []

    @contextlib.contextmanager
    def push(self, entry: Any) -> Iterator[None]:
        """Push an entry while the context lasts."""
        self.stack.append(entry)
        try:
            yield
        finally:
            self.stack.remove(entry)  # scopes of a failed `fit` may end in another order


class _Dispatcher:
    """Substitute for one function while any thread patches it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.in_thread = ThreadStack()
        self._owner, self._name, self._users = owner, name, 0
        self._is_inherited = name not in vars(owner)
        self.original = original = getattr(owner, name)
        in_thread = self.in_thread

        @functools.wraps(original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            stack = in_thread.stack
            return (stack[-1] if stack else original)(*args, **kwargs)

        self._dispatch = dispatch

    def enter(self) -> None:
        """Add a user. The first one installs the dispatcher."""
        if self._users == 0:
            _dispatchers[id(self._owner), self._name] = self
            setattr(self._owner, self._name, self._dispatch)
        self._users += 1

    def leave(self) -> None:
        """Remove a user. The last one restores the original, unless other code has replaced the dispatcher."""
        self._users -= 1
        if self._users > 0:
            return
        del _dispatchers[id(self._owner), self._name]
        if vars(self._owner).get(self._name) is not self._dispatch:
            return
        if self._is_inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self.original)


def _unlock() -> None:
    """Replace the lock in a forked child, because the thread that held it may not exist there."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)
