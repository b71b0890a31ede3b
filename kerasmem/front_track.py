"""`kerasmem.track`: tracked actions, and the table of them at the program's end."""

from __future__ import annotations

import atexit
import os
import sys
import threading

from rich.console import Console

from kerasmem.monitoring.tracking import Span, Tracker
from kerasmem.rendering.track_table import track_table

_spans: list[Span] = []
_lock = threading.Lock()
_shown_by: int | None = None  # the process that has promised the table


def track(label: str, *, show: bool = True) -> Tracker:
    """Measure what an action costs: TensorFlow's allocator, the card, and the host, before, after and at the peak.

    Use it around a block or as a decorator, nested and in any thread. When the program ends, one table of all
    actions is written to standard error. The allocator's peak is exact, and had by resetting its statistics, as
    `MemoryLogger` does; card and host are read 20 times a second by a thread that ends with the last action.
    TensorFlow is neither loaded nor made to start its devices.

    Args:
        label: the action, such as "load data".
        show: False keeps it out of the table.

    Returns:
        A context manager and decorator; its `result` is the `Span` of the call that ended last.

    Raises:
        UsageError: the label is no text, or empty.

    Example:
        >>> import kerasmem
        >>> with kerasmem.track("load data", show=False) as tracker:
        ...     data = bytearray(2**24)
        >>> tracker.result.host.kept_bytes is not None
        True
    """
    return Tracker(label, _keep if show else None)


def tracked() -> tuple[Span, ...]:
    """Return the spans of the table so far, in the order in which they ended.

    Example:
        >>> isinstance(tracked(), tuple)
        True
    """
    with _lock:
        return tuple(_spans)


def _keep(span: Span) -> None:
    global _shown_by
    with _lock:
        if _shown_by != os.getpid():  # a forked child has its own
            _shown_by = os.getpid()
            _spans.clear()
            atexit.register(_show, _shown_by)
        _spans.append(span)


def _show(pid: int) -> None:
    stream = sys.stderr
    if pid != os.getpid() or stream is None or stream.closed or not _spans:
        return
    rich_look = stream.isatty()
    console = Console(file=stream, width=None if rich_look else 400, emoji=False, markup=False, highlight=False)
    console.print(track_table(tracked(), rich_look=rich_look))


if hasattr(os, "register_at_fork"):

    def _after_fork() -> None:
        global _lock
        _lock = threading.Lock()

    os.register_at_fork(after_in_child=_after_fork)
