"""What a sequence has open in one process, and the lock under which that is made."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from kerasmem.streaming.ahead import BatchesAhead, TransformPool
from kerasmem.streaming.order import EpochOrder
from kerasmem.streaming.reader import RowReader
from kerasmem.streaming.window import WindowStore

_making = threading.Lock()
_process = object()  # another one in a forked process; asking the system for its number costs more


def making() -> threading.Lock:
    """Return the lock to be held while a sequence comes alive; a forked process has one of its own."""
    return _making


def _start_anew_after_fork() -> None:
    global _making, _process
    _making, _process = threading.Lock(), object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew_after_fork)


@dataclass
class Live:
    """What belongs to one process and is never pickled: locks, the open file, buffers, threads."""

    lock: threading.Lock
    reader: RowReader
    store: WindowStore
    ahead: BatchesAhead | None
    pool: TransformPool | None
    order: EpochOrder | None = None
    process: object = field(default_factory=lambda: _process)

    @property
    def is_here(self) -> bool:
        """Whether this is the process in which it was made, and not a fork of it."""
        return self.process is _process
