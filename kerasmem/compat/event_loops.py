"""Private parts of Python: a thread's running event loop, and hooks before threads are joined."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

GET_LOOP = Borrowed("asyncio:_get_running_loop", feature="a file behind a URL opened in a notebook")
SET_LOOP = Borrowed("asyncio:_set_running_loop", feature="a file behind a URL opened in a notebook")
BEFORE_THREADS = Borrowed(
    "threading:_register_atexit", feature="leaving Python at once while a file behind a URL is read"
)


@contextlib.contextmanager
def no_running_loop() -> Iterator[None]:
    """Let this thread run another event loop inside a running one, as in a notebook."""
    try:
        get_loop, set_loop = GET_LOOP.get(), SET_LOOP.get()
    except NotAvailableError:
        yield
        return
    running = get_loop()
    set_loop(None)
    try:
        yield
    finally:
        set_loop(running)


def call_before_threads_are_joined(function: Callable[[], None]) -> None:
    """Call a function when Python exits, before it joins the threads of pools.

    If this version of Python cannot, leaving takes as long as what is under way.
    """
    with contextlib.suppress(NotAvailableError, RuntimeError):  # RuntimeError: already at its end
        BEFORE_THREADS.get()(function)
