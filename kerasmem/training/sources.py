"""Where training stands in its data, and how it gets there again.

A source gives Keras the data and can say, as plain data, what comes after so many batches of an epoch of Keras's.
With a seed (`keras.utils.set_random_seed`) batches come as `model.fit` gives them. If that order cannot be had again
by another process, it depends on a seed of ours and the epoch's number alone.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmem.compat.keras_fit import read_epoch
from kerasmem.errors import UsageError
from kerasmem.training.run_state import RunState
from kerasmem.training.steps.batches import without_optionals

_SAMPLED = 64  # rows of each array that tell one data set from another


class Source:
    """Data that a run can go on with.

    Attributes:
        kind: what it is.
        reads_skipped: whether batches trained on before are read once more, and passed over.
        arguments: for `fit`.
    """

    kind = ""
    reads_skipped = False
    arguments: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """Return the settings that must be the same when the run is resumed, as JSON values."""
        return {}

    def position(self, run: RunState) -> dict[str, Any]:
        """Return the argument of `go_to` for the next batch."""
        raise NotImplementedError

    def go_to(self, position: dict[str, Any], run: RunState) -> None:
        """Have Keras's epoch go on after the batches of it that Keras counts and does not ask for."""
        raise NotImplementedError

    def pass_over(self, epochs: int, epoch_iterator: Any, at_once: int) -> None:
        """Skip whole epochs that an earlier process has trained on.

        Args:
            epochs: how many.
            epoch_iterator: by which Keras goes through the data; if that is read, it stands behind them then.
            at_once: batches between two returns to Keras.
        """

    def finish(self, position: dict[str, Any]) -> None:
        """Set the data's random generators to their state at the end of the run.

        Args:
            position: saved at the end.
        """

    def begin_epoch(self, epoch: int) -> None:
        """Note that Keras begins an epoch."""

    def end_epoch(self, run: RunState) -> None:
        """Note that it is over."""

    def seen(self, batch: Any) -> None:
        """Note the last batch of training."""

    def check(self) -> None:
        """Raise an error if the data read again differs from before."""

    def peek(self) -> Any:
        """Return a batch, for its shapes, if no more are to be trained on."""
        raise NotImplementedError


def whole_number(position: dict[str, Any], name: str) -> int:
    """Return a number from 0 that a checkpoint says of the data.

    Raises:
        KeyError: it says none.
        ValueError: it is something else.
    """
    value = position[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is {value!r}")
    return value


class CountedSource(Source):
    """Data with batches counted from its own beginning, since Keras's epochs may differ from the data's.

    Args:
        steps: of an epoch, if `fit` was given them.
    """

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        # Follows keras.utils.set_random_seed, and leaves the script's generator as it is.
        self.seed = zlib.crc32(repr(random.getstate()).encode())
        self._epoch = self._place = 0
        self._first: int | None = None  # batches taken before Keras's epoch 0, if its epochs are not the data's

    def position(self, run: RunState) -> dict[str, Any]:
        """Return the seed, and how many batches were taken if Keras's epochs are not the data's."""
        passed = run.epoch * self._steps + run.batch + (self._first or 0) if self._steps else 0
        return {"seed": self.seed, "passed": passed}

    def go_to(self, position: dict[str, Any], run: RunState) -> None:
        """Take over the seed and the place."""
        self.seed, passed = whole_number(position, "seed"), whole_number(position, "passed")
        self._epoch, self._place = run.epoch, run.batch
        if self._steps:
            self._first = passed - run.epoch * self._steps - run.batch
            self._epoch, self._place = self._divided(passed)

    def _divided(self, passed: int) -> tuple[int, int]:
        """Return the data's epoch and the batch of it after so many batches."""
        raise NotImplementedError

    def begin_epoch(self, epoch: int) -> None:
        """Begin at the data's beginning, except in the epoch that is gone on with."""
        if not self._steps:
            self._place = self._place if epoch == self._epoch else 0
            self._epoch = epoch
        elif self._first is None:
            self._first = -epoch * self._steps

    def end_epoch(self, run: RunState) -> None:
        """Have the next epoch begin at the data's beginning."""
        if not self._steps:
            self._place = 0


class StreamSource(Source):
    """A tf.data pipeline or a generator, read again up to the position and compared there."""

    kind = "stream"
    reads_skipped = True

    def __init__(self, x: Any, steps: int | None) -> None:
        self._data, self._steps = x, steps
        self._last = 0
        self._expected: int | None = None
        self.arguments = {"x": x}

    def describe(self) -> dict[str, Any]:
        """Return the steps of an epoch."""
        return {"steps": self._steps}

    def position(self, run: RunState) -> dict[str, Any]:
        """Return the digest of the last batch."""
        return {"last": self._last}

    def go_to(self, position: dict[str, Any], run: RunState) -> None:
        """Note the digest of the last batch, to compare it when it is read again."""
        self._expected = int(position["last"])

    def pass_over(self, epochs: int, epoch_iterator: Any, at_once: int) -> None:
        """Read whole epochs as Keras does.

        Keras chooses how often it begins the data (one more time an epoch, if it knows the number of batches), and
        each time a pipeline that shuffles draws another order.
        """
        batch = None
        for _ in range(epochs):
            found = read_epoch(epoch_iterator, lambda iterator: last_of(iterator, at_once))
            batch = batch if found is None else found
        if batch is not None:
            self.seen(batch)

    def seen(self, batch: Any) -> None:
        """Note the digest of the batch."""
        self._last = digest(
            [np.asarray(leaf[:1]) for leaf in keras.tree.flatten(batch) if leaf is not None and hasattr(leaf, "numpy")]
        )

    def peek(self) -> Any:
        """Return a batch, of zeros if the pipeline describes its shapes, so that it need not start."""
        specs = getattr(self._data, "element_spec", None)
        leaves = keras.tree.flatten(specs)
        if not leaves or any(not isinstance(leaf, tf.TensorSpec) or leaf.shape.rank is None for leaf in leaves):
            return next(iter(self._data))
        return keras.tree.map_structure(lambda leaf: tf.zeros([size or 1 for size in leaf.shape], leaf.dtype), specs)

    def check(self) -> None:
        """Refuse if the data was other than before.

        Raises:
            UsageError: the batch before the place is another than the one that was trained on.
        """
        if self._expected is not None and self._expected != self._last:
            raise UsageError(
                "x: the data gives other batches than in the run that was saved, so it cannot be gone on with exactly; "
                "give shuffle() and random operations a seed, or train on arrays, a PyDataset or H5ChunkSequence"
            )
        self._expected = None


def last_of(iterator: Any, count: int) -> Any:
    """Return the last of the next `count` batches, or the last that there is."""
    batch = next(iterator)
    with contextlib.suppress(StopIteration):
        for _ in range(count - 1):
            batch = next(iterator)
    return without_optionals(batch)


def digest(arrays: list[Any]) -> int:
    """Return a number that tells data sets apart by shapes, types and some rows."""
    found = 0
    for array in arrays:
        rows = array[:: max(1, len(array) // _SAMPLED)][:_SAMPLED]
        found = zlib.crc32(f"{array.shape[1:]}{array.dtype}{len(array)}".encode(), found)
        found = zlib.crc32(rows.astype("U").tobytes() if rows.dtype.kind == "O" else rows.tobytes(), found)
    return found
