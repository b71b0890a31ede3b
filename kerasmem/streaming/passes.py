"""Which batch is meant: Keras's batch indices turned into places in an epoch's own order.

`fit(shuffle=True)`, the default, asks for batch *indices* in random order. The rows are already shuffled,
and following the indices would throw every chunk of the file back and forth, so within a pass of such a
`fit` the first index asked for gets the first batch, the second the second, and so on, each exactly once.
Everybody else, `evaluate`, `predict` and `seq[i]` among them, gets the batch whose index was named.

Each call of `fit`, `evaluate` or `predict` is a reader of its own, known by the adapter that Keras makes
for it, so that none disturbs another, whichever was left unfinished or runs within which.

With `fit(steps_per_epoch=…)` Keras's epochs are no longer the data's. Such a reader is told that the data has
no end: it counts on through one epoch of the data after the other, and Keras's epochs are all of the length
asked for, where it would otherwise break off the last one of each round with a warning.
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
    frame = _find_caller(dataset)
    if frame is None or (asking and not _is_generator(frame)):
        return None
    caller = frame.f_locals.get("self")
    held = getattr(caller, "__dict__", None)
    return caller if isinstance(held, dict) and held.get("py_dataset") is dataset else None


def find_length(dataset: Any, passes: Passes) -> int | None:
    """Return how many batches there are for whoever asks; None, without end, for `fit(steps_per_epoch=…)`."""
    reader, frame = find_reader(dataset, asking=False), _find_caller(dataset)
    if reader is None or frame is None:
        return passes.batches
    if frame.f_code.co_name == "num_batches":
        steps = _find_steps(frame.f_back)
        if steps and called_to_train():
            passes.count_for(reader, steps)
    if frame.f_code.co_name in ("num_batches", "_get_iterator") and passes.goes_on(reader):
        return None
    return passes.left(reader) if _is_generator(frame) else passes.batches


def called_to_start_anew(dataset: Any) -> bool:
    """Return whether Keras ends an epoch only because it will start from the beginning."""
    frame = _find_caller(dataset)
    return frame is not None and frame.f_back is not None and frame.f_back.f_code.co_name == "reset"


def _find_caller(dataset: Any) -> FrameType | None:
    """Return the nearest caller that is neither of this module nor a method of `dataset`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_globals is globals() or frame.f_locals.get("self") is dataset):
        frame = frame.f_back
    return frame


def _is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def _find_steps(frame: FrameType | None) -> int:
    """Return how many batches Keras's iterator, if that is what asks, takes an epoch; 0 for all there are."""
    iterator = None if frame is None else frame.f_locals.get("self")
    steps = getattr(iterator, "steps_per_epoch", None)
    at_once = getattr(iterator, "steps_per_execution", 1)
    return -(-int(steps) // at_once) * at_once if steps else 0


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
    """One reader's way through an epoch, or, with `steps`, through one epoch after the other.

    Args:
        epoch: which epoch.
        first: the place it begins at.
        trains: whether it uses up the epoch; `evaluate` and `predict` merely look at it.
        permuted: whether indices come in random order.
        steps: batches of one of Keras's epochs where these are not the data's; 0 where they are.
    """

    def __init__(self, epoch: int, first: int = 0, *, trains: bool, permuted: bool, steps: int = 0) -> None:
        self.epoch = epoch
        self.first = first
        self.trains = trains
        self.permuted = permuted and not steps
        self.steps = steps
        self.open = self.begun = True
        self.rounds = 0  # of Keras's epochs, how many are over
        self.skipped = 0  # batches of Keras's first epoch that an earlier process has trained on
        self.given = 0
        self.repeated = False
        self._offset = 0
        self._places: np.ndarray | None = None

    def find(self, index: int, batches: int) -> tuple[int, int]:
        """Return epoch and place of the batch that is meant by `index`."""
        if self.steps:
            self.given = max(self.given, index + 1 - self._offset)
            return self.after(index - self._offset, batches)
        if not self.permuted:
            self.given += 1
            return self.epoch, self.first + index
        if self._places is None:
            self._places = np.full(batches, -1, np.int32 if batches < 2**31 else np.int64)
        place = int(self._places[index])
        if place < 0:
            place = self.first + self.given
            self._places[index] = place
            self.given += 1
        else:
            self.repeated = True
        return self.epoch, place

    def after(self, count: int, batches: int) -> tuple[int, int]:
        """Return epoch and place of the batch that follows the first `count` of the pass."""
        further, place = divmod(self.first + count, batches)
        return self.epoch + further, place

    def after_rounds(self, rounds: int, batches: int) -> tuple[int, int]:
        """Return epoch and place of the batch that follows so many of Keras's epochs."""
        return self.after(max(rounds * self.steps - self.skipped, 0), batches)

    def restart(self, epoch: int, first: int) -> None:
        """Go to batch `first` of an epoch."""
        self.epoch, self.first = epoch, first
        self._offset += self.given
        self.given = self.rounds = self.skipped = 0
        self.repeated = False
        self.open = self.begun
        self._places = None


class Passes:
    """Counts epochs and hands out places, reader by reader; not thread-safe by itself.

    A pass opens with `begin` and closes with the `end` that comes once every batch has been given. It stays
    open where Keras's epochs are shorter than the data's: Keras goes on with it in its next epoch. A second
    `end` without `begin` tells that the reader starts anew: the pass closes.

    A reader is any object, held weakly, or None for calls that do not come from Keras.

    Args:
        batches: batches of an epoch.
        epoch: the first epoch.
        first: the batch it begins with.
    """

    def __init__(self, batches: int, epoch: int = 0, first: int = 0) -> None:
        self.batches = batches
        self._next = (epoch, first)  # what the next training pass gets
        self._skipped = 0
        self._latest: Pass | None = None  # the training pass begun last
        self._nobody: Pass | None = None
        self._passes: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        first = self._next[1] if self._next[0] == self.epoch else 0
        return Passes, (self.batches, self.epoch, first)  # a copy has no readers

    @property
    def epoch(self) -> int:
        """Number of the epoch in progress, or else of the next one."""
        latest = self._latest
        if latest is None or not latest.open:
            return self._next[0]
        return latest.after_rounds(latest.rounds, self.batches)[0]

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and place of the training batch that will be asked for next."""
        latest = self._latest
        if latest is None or not latest.open:
            return self._next
        return latest.after(latest.given, self.batches)

    @property
    def upcoming(self) -> tuple[int, int]:
        """Epoch and place that the next training pass begins with."""
        return self._next

    @property
    def endless(self) -> bool:
        """Whether the training pass begun last goes on through one epoch after the other."""
        return self._latest is not None and self._latest.steps > 0

    def count_for(self, reader: Any, steps: int) -> None:
        """Note that a reader's epochs have `steps` batches, however many the data's have."""
        self._steps[reader] = steps

    def goes_on(self, reader: Any) -> bool:
        """Return whether the data has no end for a reader."""
        return reader is not None and reader in self._steps

    def left(self, reader: Any) -> int:
        """Return how many batches a reader's pass has from its beginning to the end of its epoch."""
        current = self._get(reader)
        return self.batches - (current.first if current is not None and current.open else 0)

    def begin(self, reader: Any = None, *, trains: bool = True) -> None:
        """Note that a reader begins an epoch."""
        current = self._get(reader)
        if current is None or not current.open:
            epoch, first = self._next if trains else (self.epoch, 0)
            steps = self._steps.get(reader, 0) if reader is not None and trains else 0
            permuted = bool(getattr(reader, "shuffle", False))
            current = Pass(epoch, first, trains=trains, permuted=permuted, steps=steps)
            if reader is None:
                self._nobody = current
            else:
                self._passes[reader] = current
            if trains:
                self._latest = current
                current.skipped, self._skipped = self._skipped, 0
        current.begun = True
        if current.steps:
            # Not counted by what was asked for: Keras asks ahead, now more and now less.
            epoch, place = current.after_rounds(current.rounds + 1, self.batches)
            self._use_up(epoch - (place == 0))

    def end(self, reader: Any = None, *, anew: bool = False) -> Pass | None:
        """Note that a reader ends an epoch; return its pass if that is over.

        Args:
            reader: who.
            anew: whether it only looked at the first batches, and will now begin.
        """
        current = self._get(reader)
        if current is None or not current.open:
            return None
        begun, current.begun = current.begun, False
        if anew and current is self._latest:
            self._next = (current.epoch, current.first)
        elif begun and current.steps:
            current.rounds += 1
            return None
        elif begun and current.given < self.left(reader) and not current.repeated:
            return None
        current.open = False
        return current

    def restart(self, epoch: int, first: int = 0, *, skipped: int = 0) -> None:
        """Go to batch `first` of an epoch, whoever reads.

        Args:
            epoch: which epoch.
            first: place of the next training batch.
            skipped: batches that Keras will count in its next epoch without asking for them.
        """
        self._next, self._skipped = (epoch, first), skipped
        for current in (self._nobody, *self._passes.values()):
            if current is not None and current.open:
                current.restart(epoch, first if current.trains else 0)

    def find(self, reader: Any, index: int) -> tuple[int, int, Pass | None]:
        """Return epoch and place of the batch that a reader means by `index`, and the pass it belongs to."""
        current = self._get(reader)
        if current is None or not current.open:
            return self.epoch, index % self.batches, None
        if current.trains and not current.steps:
            self._use_up(current.epoch)
        return *current.find(index, self.batches), current

    def _use_up(self, epoch: int) -> None:
        """Have the next training pass begin after `epoch` at the earliest."""
        if self._next[0] <= epoch:
            self._next = (epoch + 1, 0)

    def _get(self, reader: Any) -> Pass | None:
        return self._nobody if reader is None else self._passes.get(reader)
