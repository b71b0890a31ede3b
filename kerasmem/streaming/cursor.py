"""The position of training in a sequence: its cursors, and states that are saved. Pure arithmetic.

Each call of `fit`, `evaluate` or `predict` and each loop over a sequence reads through its own cursor, so they do not
disturb each other, even if one is left unfinished or runs inside another. Only cursors that train use up epochs.

With `fit(steps_per_epoch=…)` Keras's epochs are not the data's. The cursor of such a `fit` has no end: it continues
from one epoch of the data to the next.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from kerasmem.errors import DataError, UsageError
from kerasmem.streaming.order import Position
from kerasmem.streaming.stream_plan import StreamPlan
from kerasmem.streaming.workers import ForkLocal

FORMAT_VERSION = 1
_SHOWN = 100  # characters
_POSITION = ("seed", "epoch", "batch")
# Fixes for settings that are not simply an argument of the same name.
_REMEDIES = {
    "shard": "use as many workers as before, and load in each worker the state that it saved",
    "datasets": "the files, or the names, shapes, types or roles of the datasets have changed; use the saved ones",
    "selection": "use the saved `rows`",
    "batches": "use the saved data and settings",
    "windows": "the order of rows depends on it; use the saved memory_budget",
    "block_rows": "the order of rows depends on it; use the saved memory_budget and the same chunks",
}


class Progress:
    """Epochs of a sequence that training has used, and the cursors that read it. Thread-safe.

    Args:
        batches: number of batches in an epoch.
        epoch: number of the first epoch.
        batch: number of the first batch in it.

    Examples:
        >>> progress = Progress(batches=3)
        >>> cursor = Cursor(progress)
        >>> cursor.begin()
        >>> [position for position, _ in cursor.positions()][-1], cursor.end(), progress.epoch
        (Position(epoch=0, batch=2), True, 1)
    """

    def __init__(self, batches: int, epoch: int = 0, batch: int = 0) -> None:
        self.batches = batches
        self._locks: ForkLocal[threading.Lock] = ForkLocal()
        self._next = Position(epoch, batch)
        self._skipped = 0
        self._latest: Cursor | None = None  # the training cursor that began last
        self._cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()
        self.direct = Cursor(self)  # for batches requested by index between `on_epoch_begin` and `on_epoch_end`

    def __reduce__(self) -> tuple[type[Progress], tuple[int, int, int]]:
        batch = self._next.batch if self._next.epoch == self.epoch else 0
        return Progress, (self.batches, self.epoch, batch)  # a copy has no readers

    @property
    def lock(self) -> threading.Lock:
        """The lock of all cursors, only held for a few instructions."""
        return self._locks.get(threading.Lock)

    @property
    def epoch(self) -> int:
        """Number of the current epoch, or of the next one between epochs."""
        with self.lock:
            return self.epoch_reached()

    @property
    def position(self) -> Position:
        """Position of the training batch that is requested next."""
        with self.lock:
            latest = self._latest
            return latest.at(latest.delivered) if latest is not None and latest.is_open else self._next

    @property
    def upcoming(self) -> Position:
        """Position at which the next training cursor begins."""
        return self._next

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
            self._next, self._skipped = Position(epoch, batch), skipped
            for cursor in list(self._cursors):
                cursor.move(self._next)

    def after(self, start: Position, count: int) -> Position:
        """Return the position `count` batches after another."""
        epochs, batch = divmod(start.batch + count, self.batches)
        return Position(start.epoch + epochs, batch)

    # ---- for cursors, under the lock

    def epoch_reached(self) -> int:
        """Return the current epoch, or the next one between epochs."""
        latest = self._latest
        return latest.epoch_reached if latest is not None and latest.is_open else self._next.epoch

    def start(self, cursor: Cursor) -> tuple[Position, int]:
        """Return the start of a training cursor, and how many batches Keras counts without requesting them."""
        self._latest = cursor
        self._cursors.add(cursor)
        skipped, self._skipped = self._skipped, 0
        return self._next, skipped

    def use_up(self, epoch: int) -> None:
        """Start the next training cursor after `epoch` or later."""
        if self._next.epoch <= epoch:
            self._next = Position(epoch + 1, 0)


class Cursor:
    """Position of one reader in the epochs of a sequence.

    `begin` opens a cursor, and the first `end` after all batches of the epoch closes it. A cursor that does not train
    reads the current epoch.

    Args:
        progress: progress of the sequence.
        trains: whether the cursor uses up epochs; those of `evaluate` and `predict` do not.
        steps: batches in one of Keras's epochs if these are not the data's, else 0.
        peeks: whether the reader peeks at batches first. Nothing counts until the first `end`. `evaluate` peeks again
            before each of its epochs.
    """

    def __init__(self, progress: Progress, *, trains: bool = True, steps: int = 0, peeks: bool = False) -> None:
        self._progress = progress
        self._trains = trains
        self._peeks_again = peeks and not trains
        self.steps = steps if trains else 0
        self.is_peeking = peeks
        self.is_open = False
        self.delivered = 0  # batches since the start
        self._start = Position(0, 0)
        self._begun = False
        self._rounds = 0  # finished epochs of Keras
        self._skipped = 0  # batches of Keras's first epoch that an earlier process trained on
        self._moved = 0  # batches delivered before the latest `move`
        self._times_opened = 0

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch, or None if the cursor has no end."""
        return None if self.steps else self._progress.batches

    @property
    def epoch_reached(self) -> int:
        """The data's epoch at the start of Keras's current epoch."""
        return self._after_rounds(self._rounds).epoch

    def at(self, count: int) -> Position:
        """Return the position `count` batches after the start."""
        return self._progress.after(self._start, count)

    def begin(self) -> None:
        """Begin an epoch."""
        with self._progress.lock:
            if self.is_peeking or not self._trains:
                return
            if not self.is_open:
                self._start, self._skipped = self._progress.start(self)
                self.delivered = self._rounds = self._moved = 0
                self.is_open = True
                self._times_opened += 1
            self._begun = True
            if self.steps:
                # Requests are not counted, because Keras prefetches a varying number of batches.
                epoch, batch = self._after_rounds(self._rounds + 1)
                self._progress.use_up(epoch - (batch == 0))

    def end(self) -> bool:
        """End an epoch. Return whether all its batches were delivered."""
        with self._progress.lock:
            if self.is_peeking:
                self.is_peeking = False
                return False
            if not self._trains:
                self.is_peeking = self._peeks_again
                return True
            if not self.is_open:
                return False
            begun, self._begun = self._begun, False
            if self.steps:
                self._rounds += begun
                return False
            self.is_open = begun and self.delivered < self._left()
            return not self.is_open

    def positions(self) -> Iterator[tuple[Position, bool]]:
        """Yield the positions of the rest of the epoch, and for each whether it counts as read."""
        with self._progress.lock:
            opened = self._times_opened if self.is_open else 0
            counts = self.is_open or (not self._trains and not self.is_peeking)
            start = self._start if self.is_open else self._next_start()
            first, left = self._moved if self.is_open else 0, self._left() if self.is_open else None
        left = self._progress.batches - start.batch if left is None else left
        for index in itertools.count() if self.steps else range(left):
            if not opened:
                yield self._progress.after(start, index), counts
                continue
            with self._progress.lock:
                if self._times_opened != opened:  # a later epoch has begun, so these batches are not needed
                    return
                position = self._take(first + index)
            yield position, True

    def position_of(self, index: int) -> tuple[Position, bool]:
        """Return the position of batch `index` in the epoch, and whether it counts as read."""
        with self._progress.lock:
            if not self.is_open:
                return Position(self._progress.epoch_reached(), index), False
            self.delivered += 1
            self._progress.use_up(self._start.epoch)
            return self.at(index), True

    def move(self, start: Position) -> None:
        """Continue from another position. `Progress` calls this under the lock."""
        if self.is_open:
            self._start = start
            self._moved += self.delivered
            self.delivered = self._rounds = self._skipped = 0
            self.is_open = self._begun

    def _take(self, index: int) -> Position:
        self.delivered = max(self.delivered, index + 1 - self._moved)
        if not self.steps:
            self._progress.use_up(self._start.epoch)
        return self.at(index - self._moved)

    def _next_start(self) -> Position:
        return self._progress.upcoming if self._trains else Position(self._progress.epoch_reached(), 0)

    def _left(self) -> int:
        return self._progress.batches - self._start.batch

    def _after_rounds(self, rounds: int) -> Position:
        return self.at(max(rounds * self.steps - self._skipped, 0))


def compatibility(plan: StreamPlan) -> dict[str, Any]:
    """Return the settings that determine every batch together with the seed.

    They include names, shapes, types and roles of the datasets, the order of several files, and the sizes that the
    memory budget gives to windows and blocks. Paths and the code of `transform` are not included.
    """
    layout, settings, selection = plan.layout, plan.settings, plan.selection
    datasets = repr([(dataset.name, dataset.shape, dataset.dtype) for dataset in layout.datasets]) + repr(plan.parts)
    files = repr(layout.identity) if layout.identity else ""
    sizes = plan.blocks.grid.sizes
    block_rows = sizes[0] if len(sizes) == 1 else _digest(repr(sizes).encode())
    rows = repr(selection).encode() if isinstance(selection, range) else selection.tobytes()
    windows = -(-plan.blocks.count // plan.memory.window_blocks)
    shared = settings.shard[1] > 1
    return {
        "shard": list(settings.shard),
        "batch_size": settings.batch_size,
        "shuffle": settings.shuffle,
        "remainder": settings.remainder,
        "datasets": _digest((datasets + files).encode("utf-8", "surrogateescape")),
        "dtype": _short([column.dtype for column in plan.columns]),
        "scale": _short([column.scale and [column.scale, column.offset] for column in plan.columns]),
        "selection": _digest(rows),
        "batches": plan.num_batches,
        "windows": windows if settings.shuffle else None,
        "block_rows": block_rows if settings.shuffle and (windows > 1 or shared) else None,
    }


def make_state(plan: StreamPlan, position: Position) -> dict[str, Any]:
    """Return the state of a sequence before the training batch at `position`."""
    return {
        "format_version": FORMAT_VERSION,
        "seed": plan.settings.seed,
        "epoch": position.epoch,
        "batch": position.batch,
        "agrees": compatibility(plan),
    }


def read_state(state: Any, plan: StreamPlan) -> tuple[int, Position]:
    """Return the seed and the position of a state, which may have been through JSON.

    Args:
        state: result of `make_state`.
        plan: plan of the sequence to resume. If its seed was drawn, any seed of the state is accepted.

    Raises:
        DataError: If this is not a state, or has another version.
        UsageError: If the sequence would deliver other batches. The message names the setting.
    """
    current = compatibility(plan)
    if not isinstance(state, Mapping) or not isinstance(state.get("agrees"), Mapping):
        raise DataError("state must be the result of state_dict()")
    if state.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"state: format_version must be {FORMAT_VERSION}; got {state.get('format_version')!r}. Load the state with "
            "the version of kerasmem that saved it"
        )
    for name in _POSITION:
        value = state.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise DataError(f"state: {name} must be a whole number from 0; got {value!r}")
    for name, value in current.items():
        saved = state["agrees"].get(name)
        if saved != value:
            remedy = _REMEDIES.get(name, f"create the sequence with the saved {name}")
            raise UsageError(f"state: {name} was {saved!r} when it was saved and is {value!r} now; {remedy}")
    if not plan.settings.seed_drawn and plan.settings.shuffle and state["seed"] != plan.settings.seed:
        raise UsageError(
            f"state: seed was {state['seed']} when it was saved and is {plan.settings.seed} now; "
            "create the sequence with the saved seed, or with seed=None to adopt it"
        )
    if state["batch"] >= plan.num_batches:
        raise DataError(f"state: batch must be below {plan.num_batches}, the batches of an epoch; got {state['batch']}")
    return state["seed"], Position(state["epoch"], state["batch"])


def _short(values: list[Any]) -> list[Any] | str:
    """Return the values if a message can show them, or else their digest."""
    text = repr(values)
    return values if len(text) <= _SHOWN else _digest(text.encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
