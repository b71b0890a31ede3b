"""Batches on their way from a hook's bare readings to samples.

After a training step the processor's caches hold nothing of a hook's code, so that all it does takes five to ten times
as long as in a loop. So a hook puts its raw readings into a queue; samples are made of them, and written, in the
background while the next step runs, or for many batches at once.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kerasmem.monitoring.device_reader import DeviceReading, RawReading
from kerasmem.monitoring.timeline import Sample


class OpenBatch:
    """A sampled batch that has begun: its number, the peaks before it, and its own if known early."""

    __slots__ = ("batch", "between", "settled")

    def __init__(self, batch: int, between: list[int | None]) -> None:
        self.batch = batch
        self.between = between
        self.settled: list[int | None] | None = None


class RawBatch(NamedTuple):
    """A batch that has ended, as its hook left it.

    Attributes:
        run, phase, epoch, batch, steps: as in `Sample`.
        clock: when it ended, in seconds of the recorder's clock.
        raw: the readings.
        between: each device's peak before the batch.
        settled: each device's peak of the batch, where that was known early.
    """

    run: int
    phase: str
    epoch: int | None
    batch: int
    steps: int
    clock: float
    raw: RawReading
    between: list[int | None]
    settled: list[int | None] | None

    @property
    def where(self) -> str:
        """The batch in words."""
        return f"in batch {self.batch}" if self.phase == "train" else f"in {self.phase} batch {self.batch}"

    def samples(self, seconds: float, readings: list[DeviceReading]) -> list[Sample]:
        """Return the batch's rows, one a device."""
        head = (self.run, seconds, self.phase, self.epoch, self.batch, self.steps)
        peaks = [reading.peak_bytes for reading in readings] if self.settled is None else self.settled
        return [
            Sample(*head, device, in_use, peak, before, *rest)
            for (device, in_use, _, *rest), peak, before in zip(readings, peaks, self.between, strict=True)
        ]


class BatchQueue:
    """Batches that wait to be taken in, by the thread that trains or the one in the background.

    Args:
        work: takes batches in; a method, whose object is not kept alive.

    Attributes:
        batches: those that wait.
    """

    def __init__(self, work: Callable[[list[RawBatch]], None]) -> None:
        self.batches: deque[RawBatch] = deque()
        self._work = weakref.WeakMethod(work)
        self._fault: Exception | None = None
        self.renew()
        _queues.add(self)

    def renew(self) -> None:
        """Begin with nothing in a forked process: the lock may be held, and what waits is the parent's to write."""
        self._lock = threading.RLock()
        self.batches.clear()

    def flush(self) -> None:
        """Take in what waits; raises what the background thread ran into."""
        with self._lock:
            fault, self._fault = self._fault, None
            if fault is not None:
                raise fault
            waiting = []
            while self.batches:
                waiting.append(self.batches.popleft())
            work = self._work()
            if waiting and work is not None:
                work(waiting)

    def flush_quietly(self) -> None:
        """Do so in the background thread, or where nobody is left to hear of a fault."""
        try:
            self.flush()
        except Exception as error:
            self._fault = error


_queues: weakref.WeakSet[BatchQueue] = weakref.WeakSet()


@atexit.register
def _before_exit() -> None:
    """Take in what waits: a program that ends by an exception in `fit` closes nothing, and threads stop first."""
    for queue in list(_queues):
        queue.flush_quietly()


def _after_fork() -> None:
    for queue in list(_queues):
        queue.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
