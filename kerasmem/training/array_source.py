"""Arrays in memory as a source: in the order of Keras, or one that depends on a seed and the epoch's number alone."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmem.errors import UsageError
from kerasmem.training.run_state import RunState
from kerasmem.training.sources import CountedSource, digest
from kerasmem.training.steps.batches import map_arrays


class ArraySource(CountedSource):
    """Arrays in memory.

    Where TensorFlow has a global seed, Keras shuffles each epoch in the same order, which the seed gives; so it is
    here. Without one the order is drawn from a seed of ours and the epoch's number.

    Args:
        x, y, sample_weight: as for `fit`.
        batch_size: rows a batch; None as Keras does.
        shuffle: as for `fit`.
        steps: of an epoch, if `fit` was given them.
    """

    kind = "arrays"

    def __init__(
        self, x: Any, y: Any, sample_weight: Any, batch_size: int | None, shuffle: Any, steps: int | None
    ) -> None:
        parts = map_arrays(keras_array, keras.utils.pack_x_y_sample_weight(x, y, sample_weight))
        leaves = [leaf for leaf in keras.tree.flatten(parts) if leaf is not None]
        if not leaves:
            raise UsageError("x: no data was given; give arrays, a PyDataset, H5ChunkSequence or tf.data")
        self._rows = len(leaves[0])
        for leaf in leaves:
            if len(leaf) != self._rows:
                raise UsageError(f"x, y: arrays of {self._rows} and {len(leaf)} rows; they must have as many")
        self._batch_size = batch_size or (-(-self._rows // steps) if steps else 32)
        self._shuffle = shuffle
        super().__init__(steps)
        self._batches = -(-self._rows // self._batch_size)
        self._keras_seeds = _global_seeds() if shuffle else None
        self._keras_order: np.ndarray | None = None
        self._digest = digest(leaves)
        self.arguments = {"x": self._dataset(parts), "shuffle": False}

    def describe(self) -> dict[str, Any]:
        """Return the settings of the order, and a digest of the data."""
        return {"rows": self._rows, "batch_size": self._batch_size, "shuffle": str(self._shuffle), "data": self._digest}

    def position(self, run: RunState) -> dict[str, Any]:
        """Return the seeds of the order too."""
        return {**super().position(run), "keras_seeds": self._keras_seeds}

    def go_to(self, position: dict[str, Any], run: RunState) -> None:
        """Take over the seeds too."""
        super().go_to(position, run)
        seeds = position["keras_seeds"]
        self._keras_seeds = None if seeds is None else (int(np.int64(seeds[0])), int(np.int64(seeds[1])))

    def _divided(self, passed: int) -> tuple[int, int]:
        return divmod(passed, self._batches)

    def peek(self) -> Any:
        """Return the first batch."""
        return next(iter(self.arguments["x"]))

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch."""
        rows = np.arange(self._rows)
        if not self._shuffle:
            return rows
        if self._keras_seeds is not None:
            if self._keras_order is None:
                parts = self._batches if self._shuffle == "batch" else 1
                self._keras_order = _shuffled(self._rows, self._batch_size, parts, self._keras_seeds)
            return self._keras_order
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
        with tf.device("CPU:0"):
            held = map_arrays(tf.convert_to_tensor, keras.tree.lists_to_tuples(parts))

        def take(rows: Any) -> Any:
            return map_arrays(lambda leaf: tf.gather(leaf, rows, axis=0), held)

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


def _global_seeds() -> tuple[int, int] | None:
    """Return the seeds of Keras's shuffle, or None without a global seed of TensorFlow."""
    first, second = tf.compat.v1.get_seed(0)
    seeds = (int(first), int(second))
    with_seeds = _shuffled(64, 64, 1, seeds)  # without a global one, `get_seed` gives a default
    drawn = next(iter(tf.data.Dataset.range(1).map(lambda _: tf.random.shuffle(tf.range(64))))).numpy()
    return seeds if np.array_equal(with_seeds, drawn) else None


def _shuffled(rows: int, size: int, parts: int, seeds: tuple[int, int]) -> np.ndarray:
    """Return the numbers of rows, shuffled as one operation of a tf.data pipeline does: all, or part by part.

    Args:
        rows: how many.
        size: rows of a part, if there are several.
        parts: how many; 1 for all rows together.
        seeds: of the graph and of the operation.
    """

    def shuffle(part: Any) -> Any:
        first = part * size
        last = rows if parts == 1 else tf.minimum(first + size, rows)
        return tf.raw_ops.RandomShuffle(value=tf.range(first, last, dtype=tf.int64), seed=seeds[0], seed2=seeds[1])

    return np.concatenate([part.numpy() for part in tf.data.Dataset.range(parts).map(shuffle)])


def split_rows(parts: Any, share: float) -> tuple[Any, Any]:
    """Return arrays without their last rows, and those rows, as `fit(validation_split=…)` cuts them.

    Raises:
        UsageError: one of the two would be empty.
    """
    parts = map_arrays(keras_array, parts)
    rows = next((len(leaf) for leaf in keras.tree.flatten(parts) if leaf is not None), 0)
    at = math.floor(rows * (1.0 - share))
    if not 0 < at < rows:
        raise UsageError(f"validation_split: {share!r} of {rows} rows leaves none for training or none to validate on")

    return map_arrays(lambda leaf: leaf[:at], parts), map_arrays(lambda leaf: leaf[at:], parts)


def keras_array(leaf: Any) -> Any:
    """Return an array as Keras would have it: floats as the default float."""
    if not getattr(leaf, "shape", ()) or not hasattr(leaf, "__array__"):
        raise UsageError(
            f"x, y: {type(leaf).__name__} is no array of rows; for a run that can be gone on with give arrays, a "
            "PyDataset, H5ChunkSequence or tf.data"
        )
    array = np.asarray(leaf)
    if array.dtype.kind == "f" and array.dtype.name != keras.config.floatx():
        array = array.astype(keras.config.floatx())
    return array
