"""Which batch is meant: Keras's batch indices turned into places in an epoch's own order.

`fit(shuffle=True)`, the default, asks for batch *indices* in random order. The rows are already shuffled,
and following the indices would throw every chunk of the file back and forth, so within a pass of such a
`fit` the first index asked for gets the first batch, the second the second, and so on, each exactly once.
Everybody else, `evaluate`, `predict` and `seq[i]` among them, gets the batch whose index was named.

Each call of `fit`, `evaluate` or `predict` is a reader of its own, known by the adapter that Keras makes
for it, so that none disturbs another, whichever was left unfinished or runs within which.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from types import FrameType
from typing import Any

import numpy as np

_FRAMES = 16  # looked at on the way from the data set up to `fit`


def find_reader(dataset: Any, *, asking: bool) -> Any:
    """Return the object through which Keras reads `dataset`, or None when somebody else calls.

    It is the nearest caller that is no method of `dataset`, where that caller holds `dataset` as its
    `py_dataset`. Keras says nowhere that it does; where another version does not, there is no reader, and an
    index is a place.

    Args:
        dataset: the `PyDataset` whose method was called.
        asking: a batch is asked for. Then the caller has to be a generator: the adapter looks at some
            batches for their shapes before it reads, and these do not count.
    """
    frame: FrameType | None = sys._getframe(1)
    caller = None
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not dataset:
            break
        frame = frame.f_back
    if frame is None or (asking and not frame.f_code.co_flags & inspect.CO_GENERATOR):
        return None
    held = getattr(caller, "__dict__", None)
    return caller if isinstance(held, dict) and held.get("py_dataset") is dataset else None


def called_to_train() -> bool:
    """Return whether the call comes from `fit` itself, and not from `evaluate` or `predict`."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None or frame.f_code.co_name == "fit":
            break
        if frame.f_code.co_name in ("evaluate", "predict"):
            return False
        frame = frame.f_back
    return True


class Pass:
    """One reader's way through an epoch.

    Args:
        epoch: which epoch.
        trains: whether it uses up the epoch; `evaluate` and `predict` merely look at it.
        permuted: whether indices come in random order.
    """

    def __init__(self, epoch: int, *, trains: bool, permuted: bool) -> None:
        self.epoch = epoch
        self.trains = trains
        self.permuted = permuted
        self.open = self.begun = True
        self.given = 0
        self.repeated = False
        self._places: np.ndarray | None = None

    def place(self, index: int, batches: int) -> int:
        """Return the place of the batch that is meant by `index`."""
        if not self.permuted:
            self.given += 1
            return index
        if self._places is None:
            self._places = np.full(batches, -1, np.int32 if batches < 2**31 else np.int64)
        place = int(self._places[index])
        if place < 0:
            place = self.given
            self._places[index] = place
            self.given += 1
        else:
            self.repeated = True
        return place

    def restart(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.epoch = epoch
        self.given = 0
        self.repeated = False
        self.open = self.begun
        self._places = None


class Passes:
    """Counts epochs and hands out places, reader by reader; not thread-safe by itself.

    A pass opens with `begin` and closes with the `end` that comes once every batch has been given.
    With `steps_per_epoch` below the number of batches Keras goes on with the same pass in its next epoch,
    so a pass that is incomplete at `end` stays open. A second `end` without `begin` tells that the reader
    starts anew: the pass closes.

    A reader is any object, held weakly, or None for calls that do not come from Keras.

    Args:
        batches: batches of an epoch.
        epoch: the first epoch.
    """

    def __init__(self, batches: int, epoch: int = 0) -> None:
        self.batches = batches
        self._next = epoch  # what the next training pass gets
        self._latest: Pass | None = None  # the training pass begun last
        self._nobody: Pass | None = None
        self._passes: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, (self.batches, self.epoch)  # a copy has no readers

    @property
    def epoch(self) -> int:
        """Number of the epoch in progress, or else of the next one."""
        latest = self._latest
        return latest.epoch if latest is not None and latest.open else self._next

    def begin(self, reader: Any = None, *, trains: bool = True) -> None:
        """Note that a reader begins an epoch."""
        current = self._get(reader)
        if current is not None and current.open:
            current.begun = True
            return
        permuted = bool(getattr(reader, "shuffle", False))
        new = Pass(self._next if trains else self.epoch, trains=trains, permuted=permuted)
        if reader is None:
            self._nobody = new
        else:
            self._passes[reader] = new
        if trains:
            self._latest = new

    def end(self, reader: Any = None) -> Pass | None:
        """Note that a reader ends an epoch; return its pass if that is over."""
        current = self._get(reader)
        if current is None or not current.open:
            return None
        begun, current.begun = current.begun, False
        if begun and current.given < self.batches and not current.repeated:
            return None
        current.open = False
        return current

    def restart(self, epoch: int) -> None:
        """Go to the start of an epoch, whoever reads."""
        self._next = epoch
        for current in (self._nobody, *self._passes.values()):
            if current is not None and current.open:
                current.restart(epoch)

    def find(self, reader: Any, index: int) -> tuple[int, int, Pass | None]:
        """Return epoch and place of the batch that a reader means by `index`, and the pass it belongs to."""
        current = self._get(reader)
        if current is None or not current.open:
            return self.epoch, index, None
        if current.trains:
            self._next = max(self._next, current.epoch + 1)
        return current.epoch, current.place(index, self.batches), current

    def _get(self, reader: Any) -> Pass | None:
        return self._nobody if reader is None else self._passes.get(reader)
