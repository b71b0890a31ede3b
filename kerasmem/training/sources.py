"""Where training stands in its data, and how it gets there again: arrays, H5ChunkSequence, PyDataset, tf.data.

A source gives Keras the data and can say, as plain data, what comes after so many batches of an epoch of Keras's.
Keras shuffles arrays by a generator whose state is not to be had; here the order of an epoch depends on a seed and the
epoch's number alone, so that any process can go on in its middle.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from typing import Any, Protocol

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.training.steps.batches import without_optionals

_SAMPLED = 64  # rows of each array that tell one data set from another


class Source(Protocol):
    """Data that a run can go on with."""

    kind: str
    reads_skipped: bool  # whether batches trained on before are read once more, and passed over
    arguments: dict[str, Any]  # for `fit`

    def describe(self) -> dict[str, Any]:
        """Return what must agree between the run that was saved and the one that goes on, as JSON has it."""

    def position(self, epoch: int, done: int, steps: int | None) -> dict[str, Any]:
        """Return what `go_to` wants after `done` batches of Keras's epoch."""

    def go_to(self, position: dict[str, Any], epoch: int, done: int) -> None:
        """Have Keras's epoch go on after `done` batches that Keras counts and does not ask for."""

    def pass_over(self, epochs: int, walk: Any, at_once: int) -> None:
        """Bring the data to where it was after whole epochs that an earlier process has trained on.

        Args:
            epochs: how many.
            walk: Keras's, epoch by epoch through the data; one that is to be read stands behind them then.
            at_once: batches between two returns to Keras.
        """

    def begin_epoch(self, epoch: int) -> None:
        """Note that Keras begins an epoch."""

    def end_epoch(self, done: int, steps: int | None) -> None:
        """Note that it is over."""

    def seen(self, batch: Any) -> None:
        """Note what was trained on last."""

    def check(self) -> None:
        """Refuse where what was read once more is other than before."""

    def peek(self) -> Any:
        """Return a batch, for its shapes, where no more are to be trained on."""


class CountedSource:
    """Data whose batches are counted from its own beginning, as Keras's epochs need not be the data's."""

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self.seed = random.getrandbits(32)  # follows keras.utils.set_random_seed
        self._epoch = self._place = 0
        self._first: int | None = None  # batches taken before Keras's epoch 0, where its epochs are not the data's

    def position(self, epoch: int, done: int, steps: int | None) -> dict[str, Any]:
        """See `Source`."""
        return {"seed": self.seed, "passed": epoch * self._steps + done + (self._first or 0) if self._steps else 0}

    def pass_over(self, epochs: int, walk: Any, at_once: int) -> None:
        """See `Source`; where an epoch's number says all there is nothing to do."""

    def begin_epoch(self, epoch: int) -> None:
        """See `Source`."""
        if not self._steps:
            self._place = self._place if epoch == self._epoch else 0
            self._epoch = epoch
        elif self._first is None:
            self._first = -epoch * self._steps

    def end_epoch(self, done: int, steps: int | None) -> None:
        """See `Source`."""
        if not self._steps:
            self._place = 0

    def seen(self, batch: Any) -> None:
        """See `Source`."""

    def check(self) -> None:
        """See `Source`."""


class ArraySource(CountedSource):
    """Arrays in memory, in an order that depends on the seed and the epoch alone.

    Args:
        x, y, sample_weight: as for `fit`.
        batch_size: rows a batch; None as Keras does.
        shuffle: as for `fit`.
        steps: of an epoch, where `fit` was given them.
    """

    kind = "arrays"
    reads_skipped = False

    def __init__(
        self, x: Any, y: Any, sample_weight: Any, batch_size: int | None, shuffle: Any, steps: int | None
    ) -> None:
        import keras

        parts = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
        parts = keras.tree.map_structure(_array, parts)
        leaves = [leaf for leaf in keras.tree.flatten(parts) if leaf is not None]
        self._rows = len(leaves[0])
        for leaf in leaves:
            if len(leaf) != self._rows:
                raise UsageError(f"x, y: arrays of {self._rows} and {len(leaf)} rows; they must have as many")
        self._batch_size = batch_size or (-(-self._rows // steps) if steps else 32)
        self._shuffle = shuffle
        super().__init__(steps)
        self._batches = -(-self._rows // self._batch_size)
        self._digest = _digest(leaves)
        self.arguments = {"x": self._dataset(parts), "shuffle": False}

    def describe(self) -> dict[str, Any]:
        """See `Source`."""
        return {"rows": self._rows, "batch_size": self._batch_size, "shuffle": str(self._shuffle), "data": self._digest}

    def go_to(self, position: dict[str, Any], epoch: int, done: int) -> None:
        """See `Source`."""
        self.seed = int(position["seed"])
        if self._steps:
            passed = int(position["passed"])
            self._epoch, self._place = divmod(passed, self._batches)
            self._first = passed - epoch * self._steps - done
        else:
            self._epoch, self._place = epoch, done

    def peek(self) -> Any:
        """See `Source`."""
        return next(iter(self.arguments["x"]))

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch."""
        rows = np.arange(self._rows)
        if not self._shuffle:
            return rows
        generator = np.random.default_rng((self.seed, epoch))
        if self._shuffle != "batch":
            return generator.permutation(rows)
        for start in range(0, self._rows, self._batch_size):
            generator.shuffle(rows[start : start + self._batch_size])
        return rows

    def _next_order(self) -> tuple[np.ndarray, np.int64]:
        """Return the rows, and the first batch, for an iterator that Keras makes now."""
        epoch, place = self._epoch, self._place
        if self._steps:
            self._epoch, self._place = epoch + 1, 0
        return self.order(epoch), np.int64(place)

    def _dataset(self, parts: Any) -> Any:
        import keras
        import tensorflow as tf

        with tf.device("CPU:0"):
            held = keras.tree.map_structure(
                lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), keras.tree.lists_to_tuples(parts)
            )

        def take(rows: Any) -> Any:
            return keras.tree.map_structure(lambda leaf: None if leaf is None else tf.gather(leaf, rows, axis=0), held)

        def order(_: Any) -> Any:
            rows, place = tf.numpy_function(self._next_order, [], (tf.int64, tf.int64))
            rows.set_shape([self._rows])
            place.set_shape([])
            return rows, place

        def cut(rows: Any, place: Any) -> Any:
            numbers = tf.data.Dataset.range(place, self._batches)
            if not self._steps:  # Keras counts those before too; it does not come to them
                numbers = numbers.concatenate(tf.data.Dataset.range(place))
            size = self._batch_size
            return numbers.map(lambda number: rows[number * size : (number + 1) * size])

        once = tf.data.Dataset.range(1)
        batches = (once.repeat() if self._steps else once).map(order).flat_map(cut)
        dataset = batches.map(take, num_parallel_calls=tf.data.AUTOTUNE)
        if not self._steps:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(self._batches))
        return dataset.prefetch(tf.data.AUTOTUNE)


class StreamSource:
    """A tf.data pipeline or a generator: what was trained on is read once more, and compared at the place."""

    kind = "stream"
    reads_skipped = True

    def __init__(self, x: Any, steps: int | None) -> None:
        self._data, self._steps = x, steps
        self._last = 0
        self._expected: int | None = None
        self.arguments = {"x": x}

    def describe(self) -> dict[str, Any]:
        """See `Source`."""
        return {"steps": self._steps}

    def position(self, epoch: int, done: int, steps: int | None) -> dict[str, Any]:
        """See `Source`."""
        return {"last": self._last}

    def go_to(self, position: dict[str, Any], epoch: int, done: int) -> None:
        """See `Source`."""
        self._expected = int(position["last"])

    def pass_over(self, epochs: int, walk: Any, at_once: int) -> None:
        """See `Source`.

        How often the data is begun anew is Keras's affair (one more time an epoch, where it knows the number of
        batches), and each time a pipeline that shuffles draws another order.
        """
        batch = None
        for _ in range(epochs):
            with walk.catch_stop_iteration():
                for _, _, iterator in walk:
                    batch = last_of(iterator, at_once)
        if batch is not None:
            self.seen(batch)

    def begin_epoch(self, epoch: int) -> None:
        """See `Source`."""

    def end_epoch(self, done: int, steps: int | None) -> None:
        """See `Source`."""

    def seen(self, batch: Any) -> None:
        """See `Source`."""
        import keras

        self._last = _digest(
            [np.asarray(leaf[:1]) for leaf in keras.tree.flatten(batch) if leaf is not None and hasattr(leaf, "numpy")]
        )

    def peek(self) -> Any:
        """See `Source`; a pipeline is not begun for it where its description will do, since it may shuffle anew."""
        import keras
        import tensorflow as tf

        specs = getattr(self._data, "element_spec", None)
        leaves = keras.tree.flatten(specs)
        if not leaves or any(not isinstance(leaf, tf.TensorSpec) or leaf.shape.rank is None for leaf in leaves):
            return next(iter(self._data))
        return keras.tree.map_structure(lambda leaf: tf.zeros([size or 1 for size in leaf.shape], leaf.dtype), specs)

    def check(self) -> None:
        """Refuse where the data was other than before.

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


def _array(leaf: Any) -> Any:
    """Return an array as Keras would have it: floats as the default float."""
    import keras

    if leaf is None:
        return None
    if not hasattr(leaf, "shape") or not hasattr(leaf, "__array__"):
        raise UsageError(
            f"x, y: {type(leaf).__name__} is no array; for a run that can be gone on with give arrays, a PyDataset, "
            "H5ChunkSequence or tf.data"
        )
    array = np.asarray(leaf)
    if array.dtype.kind == "f" and array.dtype.name != keras.config.floatx():
        array = array.astype(keras.config.floatx())
    return array


def _digest(arrays: list[Any]) -> int:
    """Return a number that tells data sets apart by shapes, types and some rows."""
    found = 0
    for array in arrays:
        rows = array[:: max(1, len(array) // _SAMPLED)][:_SAMPLED]
        found = zlib.crc32(f"{array.shape[1:]}{array.dtype}{len(array)}".encode(), found)
        found = zlib.crc32(rows.astype("U").tobytes() if rows.dtype.kind == "O" else rows.tobytes(), found)
    return found
