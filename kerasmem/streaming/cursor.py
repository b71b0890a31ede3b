"""The position of training in a sequence: its epochs and cursors. Pure arithmetic.

Each call of `fit`, `evaluate` or `predict` and each loop over a sequence reads through its own cursor, so they do not
disturb each other, even if one is left unfinished or runs inside another. Only `fit` and loops use up epochs.

With `fit(steps_per_epoch=…)` Keras's epochs are not the data's. The cursor of such a `fit` has no end: it continues
from one epoch of the data to the next.
"""

from __future__ import annotations

import enum
import itertools
import threading
import weakref
from collections.abc import Iterator

from kerasmem.streaming.order import Position
from kerasmem.streaming.workers import ForkLocal


class Progress:
    """Epochs of a sequence that training has used, and the cursors that use them. Thread-safe.

    Args:
        batches: number of batches in an epoch.
        epoch: number of the first epoch.
        batch: number of the first batch in it.

    Attributes:
        upcoming: position at which the next training cursor opens.

    Examples:
        >>> progress = Progress(batches=3)
        >>> cursor = TrainingCursor(progress)
        >>> cursor.begin()
        >>> [position for position, _ in cursor.positions()][-1], cursor.end(), progress.epoch
        (Position(epoch=0, batch=2), True, 1)
    """

    def __init__(self, batches: int, epoch: int = 0, batch: int = 0) -> None:
        self.batches = batches
        self._locks: ForkLocal[threading.Lock] = ForkLocal()
        self.upcoming = Position(epoch, batch)
        self._skipped = 0
        self._latest: TrainingCursor | None = None  # the cursor that opened last
        self._cursors: weakref.WeakSet[TrainingCursor] = weakref.WeakSet()
        # For batches requested by index between `on_epoch_begin` and `on_epoch_end`
        self.direct = TrainingCursor(self)

    def __reduce__(self) -> tuple[type[Progress], tuple[int, int, int]]:
        batch = self.upcoming.batch if self.upcoming.epoch == self.epoch else 0
        return Progress, (self.batches, self.epoch, batch)  # a copy has no readers

    @property
    def lock(self) -> threading.Lock:
        """The lock of all cursors, only held for a few instructions."""
        return self._locks.get(threading.Lock)

    @property
    def epoch(self) -> int:
        """Number of the current epoch, or of the next one between epochs."""
        with self.lock:
            return self.current_epoch()

    @property
    def position(self) -> Position:
        """Position of the training batch that is requested next."""
        with self.lock:
            return self._latest.position if self._latest is not None and self._latest.is_open else self.upcoming

    @property
    def endless(self) -> bool:
        """Whether the latest training cursor continues from epoch to epoch."""
        return self._latest is not None and self._latest.steps > 0

    def go_to(self, epoch: int, batch: int = 0, *, skipped: int = 0) -> None:
        """Move all training cursors to a batch.

        Args:
            epoch: number of its epoch.
            batch: its number in the epoch.
            skipped: number of batches of Keras's next epoch that Keras counts without requesting them.
        """
        with self.lock:
            self.upcoming, self._skipped = Position(epoch, batch), skipped
            for cursor in list(self._cursors):
                cursor.move(self.upcoming)

    def after(self, start: Position, count: int) -> Position:
        """Return the position `count` batches after another."""
        epochs, batch = divmod(start.batch + count, self.batches)
        return Position(start.epoch + epochs, batch)

    # ---- for cursors, under the lock

    def current_epoch(self) -> int:
        """Return the current epoch, or the next one between epochs."""
        return self._latest.epoch if self._latest is not None and self._latest.is_open else self.upcoming.epoch

    def open(self, cursor: TrainingCursor) -> tuple[Position, int]:
        """Return the start of a training cursor, and how many batches Keras counts without requesting them."""
        self._latest = cursor
        self._cursors.add(cursor)
        skipped, self._skipped = self._skipped, 0
        return self.upcoming, skipped

    def use_up(self, epoch: int) -> None:
        """Open the next training cursor after `epoch` or later."""
        if self.upcoming.epoch <= epoch:
            self.upcoming = Position(epoch + 1, 0)


class EvaluationCursor:
    """Reader of the current epoch, from its first batch, that does not use it up.

    Args:
        progress: progress of the sequence.
        peeks: whether the reader peeks at batches before each of its epochs, up to an additional `end`.
    """

    def __init__(self, progress: Progress, *, peeks: bool = False) -> None:
        self._progress = progress
        self._peeks = peeks
        self.is_peeking = peeks

    def begin(self) -> None:
        """Begin to read. Each call of `positions` starts at the first batch."""

    def end(self) -> bool:
        """End peeking, or the epoch. Return whether it was the epoch."""
        was_peeking = self.is_peeking
        self.is_peeking = self._peeks and not was_peeking
        return not was_peeking

    def positions(self) -> Iterator[tuple[Position, bool]]:
        """Yield the positions of the epoch, and for each whether it counts as read."""
        with self._progress.lock:
            epoch, counts = self._progress.current_epoch(), not self.is_peeking
        for batch in range(self._progress.batches):
            yield Position(epoch, batch), counts


class _Phase(enum.Enum):
    PEEKING = enum.auto()  # before the first `end`: nothing counts
    CLOSED = enum.auto()  # `begin` opens the next epoch
    READING = enum.auto()  # between `begin` and `end`
    PAUSED = enum.auto()  # after `end`, with batches left: `begin` continues, another `end` closes


class TrainingCursor:
    """Reader that uses up epochs. `begin` and `end` mark Keras's epochs.

    Its batches are numbered from its opening, also if it is moved or continues in the next epoch.

    Args:
        progress: progress of the sequence.
        steps: batches in one of Keras's epochs if these are not the data's, else 0. The cursor then has no end.
        peeks: whether the reader peeks at batches first, up to the first `end`.
    """

    def __init__(self, progress: Progress, *, steps: int = 0, peeks: bool = False) -> None:
        self.steps = steps
        self._progress = progress
        self._phase = _Phase.PEEKING if peeks else _Phase.CLOSED
        self._openings = 0
        self._start = Position(0, 0)  # where the cursor opened, or the target of the latest `move`
        self._first = 0  # number of the batch at `_start`
        self._keras_first = 0  # number of the first batch of Keras's epoch; below `_first` if it was skipped
        self._delivered = 0  # number of the next batch

    @property
    def is_peeking(self) -> bool:
        """Whether nothing counts yet."""
        return self._phase is _Phase.PEEKING

    # ---- for `Progress`, under the lock

    @property
    def is_open(self) -> bool:
        """Whether an epoch has begun and is not finished."""
        return self._phase in (_Phase.READING, _Phase.PAUSED)

    @property
    def epoch(self) -> int:
        """The data's epoch at the start of Keras's current epoch."""
        return self._position_of(max(self._keras_first, self._first)).epoch

    @property
    def position(self) -> Position:
        """Position of the next batch."""
        return self._position_of(self._delivered)

    def move(self, start: Position) -> None:
        """Continue from another position."""
        if self.is_open:
            self._start = start
            self._first = self._keras_first = self._delivered
            if self._phase is _Phase.PAUSED and not self.steps:  # with steps, Keras goes on with the same iterator
                self._phase = _Phase.CLOSED

    # ---- for the reader

    def begin(self) -> None:
        """Begin an epoch of Keras."""
        with self._progress.lock:
            if self._phase is _Phase.PEEKING:
                return
            if self._phase is _Phase.CLOSED:
                self._start, skipped = self._progress.open(self)
                self._first, self._keras_first, self._delivered = 0, -skipped, 0
                self._openings += 1
            self._phase = _Phase.READING
            if self.steps:
                # Requests are not counted, because Keras prefetches a varying number of batches.
                epoch, batch = self._position_of(max(self._keras_first + self.steps, self._first))
                self._progress.use_up(epoch - (batch == 0))

    def end(self) -> bool:
        """End an epoch of Keras. Return whether this closes the cursor."""
        with self._progress.lock:
            if not self.is_open:
                self._phase = _Phase.CLOSED
                return False
            is_unfinished = False
            if self._phase is _Phase.READING:
                self._keras_first += self.steps
                is_unfinished = self._delivered - self._first < self._progress.batches - self._start.batch
            stays_open = is_unfinished or self.steps > 0
            self._phase = _Phase.PAUSED if stays_open else _Phase.CLOSED
            return not stays_open

    def positions(self) -> Iterator[tuple[Position, bool]]:
        """Yield the positions from the latest start to the end of its epoch, and for each whether it counts as read."""
        with self._progress.lock:
            counts, opening = self.is_open, self._openings
            start, first = (self._start, self._first) if counts else (self._progress.upcoming, 0)
        stop = first + self._progress.batches - start.batch
        for number in itertools.count(first) if self.steps else range(first, stop):
            if not counts:
                yield self._progress.after(start, number), False
                continue
            with self._progress.lock:
                if self._openings != opening:  # a later epoch has begun, so these batches are not needed
                    return
                self._delivered = max(self._delivered, number + 1)
                if not self.steps:
                    self._progress.use_up(self._start.epoch)
                position = self._position_of(number)
            yield position, True

    def take(self, index: int) -> tuple[Position, bool]:
        """Deliver a batch by its index in the epoch. Return its position, and whether it counts as read."""
        with self._progress.lock:
            if not self.is_open:
                return Position(self._progress.current_epoch(), index), False
            self._delivered += 1
            self._progress.use_up(self._start.epoch)
            return self._progress.after(self._start, index), True

    def _position_of(self, number: int) -> Position:
        return self._progress.after(self._start, number - self._first)


Cursor = TrainingCursor | EvaluationCursor
