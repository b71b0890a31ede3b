"""What a sequence has open in one process, and the lock under which that is made."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from kerasmem.streaming.ahead import BatchesAhead, TransformPool
from kerasmem.streaming.order import EpochOrder
from kerasmem.streaming.reader import RowReader
from kerasmem.streaming.window import WindowStore

_making = threading.Lock()


def making() -> threading.Lock:
    """Return the lock to be held while a sequence comes alive; a forked process has one of its own."""
    return _making


def _new_lock_after_fork() -> None:
    global _making
    _making = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock_after_fork)


@dataclass
class Live:
    """What belongs to one process and is never pickled: locks, the open file, buffers, threads."""

    pid: int
    lock: threading.Lock
    reader: RowReader
    store: WindowStore
    ahead: BatchesAhead | None
    pool: TransformPool | None
    order: EpochOrder | None = None
