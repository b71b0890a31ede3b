"""Data by index: a PyDataset, or arrays in memory, in an order that depends on the epoch's number and a saved seed."""

from __future__ import annotations

import functools
import math
import random
import sys
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmem.errors import UsageError
from kerasmem.training.run_state import RunState
from kerasmem.training.sources import Source, checksum, warn_if_changed
from kerasmem.training.steps.batches import map_arrays

_NO_ORDER = (-1, np.arange(0))


class BatchSource(Source):
    """A PyDataset that returns the same batch for the same index.

    Args:
        dataset: the user's PyDataset; None if a subclass has the batches.
        batches: batches of the data; None if it is endless.
        shuffle: whether each epoch has another order, as for `fit`.
        steps: `steps_per_epoch` of `fit`, if set.
    """

    kind = "dataset"

    def __init__(self, dataset: Any, batches: int | None, shuffle: Any, steps: int | None) -> None:
        self._dataset, self._batches, self._steps = dataset, batches, steps
        self._shuffle = bool(shuffle)
        # Follows keras.utils.set_random_seed, and leaves the script's generator as it is.
        self._seed = zlib.crc32(repr(random.getstate()).encode())
        self._epoch: int | None = None
        self._trained = 0  # batches of `_epoch` that an earlier process has trained on
        self._order = _NO_ORDER
        self.arguments = {"x": _Ordered(self, dataset), "shuffle": False}

    @property
    def batches(self) -> int | None:
        """Batches of the epoch that Keras reads, or None for endless data.

        In a resumed epoch only the remaining ones count, as Keras's workers keep batches that were not requested.
        """
        return None if self._steps or self._batches is None else self._batches - self._trained

    def describe(self) -> dict[str, Any]:
        """Return the settings of the order, and the class of the dataset."""
        return {"batches": self._batches, "shuffle": self._shuffle, "class": type(self._dataset).__qualname__}

    def position(self, run: RunState) -> dict[str, Any]:
        """Return the seed."""
        return {"seed": self._seed}

    def go_to(self, position: dict[str, Any], run: RunState, epochs: int) -> None:
        """Adopt the seed and the position, and call the dataset's hooks of whole epochs, as it may change with them."""
        seed = position["seed"]
        if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
            raise ValueError(f"seed is {seed!r}")
        self._seed, self._epoch, self._trained = seed, run.epoch, run.batch
        self._order = _NO_ORDER  # Keras has already read a batch for its shapes
        for _ in range(epochs if self._dataset is not None else 0):
            self._dataset.on_epoch_begin()
            self._dataset.on_epoch_end()

    def begin_epoch(self, epoch: int) -> None:
        """Start at the first batch, unless an epoch is resumed or Keras's epochs differ from the data's."""
        if self._epoch is None or not self._steps:
            self._trained = self._trained if epoch == self._epoch else 0
            self._epoch = epoch

    def peek(self) -> Any:
        """Return the first batch."""
        return self.batch(0, 0)

    def next_batch(self, index: int) -> Any:
        """Return the batch of Keras's index."""
        epoch, index = self._epoch or 0, index + self._trained
        if self._steps:  # the index counts from the beginning of the run
            epoch, index = divmod(index + epoch * self._steps, self._batches or sys.maxsize)
        return self.batch(epoch, index)

    def batch(self, epoch: int, index: int) -> Any:
        """Return a batch of an epoch of the data."""
        if self._shuffle and self._batches is not None:
            index = int(self.order(epoch, self._batches)[index])
        return self._dataset[index]

    def order(self, epoch: int, count: int) -> np.ndarray:
        """Return the order of an epoch's rows or batches."""
        order = self._order
        if order[0] != epoch:
            order = self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(count))
        return order[1]


class _Ordered(keras.utils.PyDataset):
    """Batches of a source, in its order from its position on."""

    def __init__(self, source: BatchSource, dataset: Any) -> None:
        names = ("workers", "use_multiprocessing", "max_queue_size")
        super().__init__(**{name: getattr(dataset, name) for name in names if dataset is not None})
        self._source, self._dataset = source, dataset

    @property
    def num_batches(self) -> int | None:
        return self._source.batches

    def __getitem__(self, index: int) -> Any:
        return self._source.next_batch(index)

    def on_epoch_begin(self) -> None:
        if self._dataset is not None:
            self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._dataset is not None:
            self._dataset.on_epoch_end()


class ArraySource(BatchSource):
    """Arrays in memory, with rows in the order of the epoch.

    Args:
        x, y, sample_weight: as for `fit`.
        batch_size: rows per batch; None for Keras's default.
        shuffle: as for `fit`; "batch" only changes the order within batches, so they stay as they are.
        steps: `steps_per_epoch` of `fit`, if set.
    """

    kind = "arrays"

    def __init__(
        self, x: Any, y: Any, sample_weight: Any, batch_size: int | None, shuffle: Any, steps: int | None
    ) -> None:
        parts = map_arrays(keras_array, keras.utils.pack_x_y_sample_weight(x, y, sample_weight))
        self.is_bare = not isinstance(parts, tuple)
        self._parts = keras.tree.lists_to_tuples((parts,) if self.is_bare else parts)
        leaves = [leaf for leaf in keras.tree.flatten(parts) if leaf is not None]
        if not leaves:
            raise UsageError("x must be arrays, a PyDataset, H5ChunkSequence or tf.data; got no data")
        self._rows = len(leaves[0])
        for leaf in leaves:
            if len(leaf) != self._rows:
                raise UsageError(f"x, y must have the same number of rows; got {self._rows} and {len(leaf)}")
        self._batch_size = batch_size or (-(-self._rows // steps) if steps else 32)
        super().__init__(None, -(-self._rows // self._batch_size), shuffle and shuffle != "batch", steps)

    def describe(self) -> dict[str, Any]:
        """Return the settings of the order."""
        return {"rows": self._rows, "batch_size": self._batch_size, "shuffle": self._shuffle}

    def position(self, run: RunState) -> dict[str, Any]:
        """Return the seed, and the checksum of the first rows."""
        return {**super().position(run), "first_batch": self._first}

    def go_to(self, position: dict[str, Any], run: RunState, epochs: int) -> None:
        """Adopt the seed and the position, and warn if the first rows have changed."""
        super().go_to(position, run, epochs)
        warn_if_changed(self._first, position.get("first_batch"))

    @functools.cached_property
    def _first(self) -> int:
        """Checksum of the first rows, contained in every checkpoint."""
        return checksum(map_arrays(lambda leaf: leaf[: self._batch_size], self._parts))

    def batch(self, epoch: int, index: int) -> Any:
        """Return a batch of an epoch of the data."""
        rows: Any = slice(index * self._batch_size, (index + 1) * self._batch_size)
        if self._shuffle:
            rows = self.order(epoch, self._rows)[rows]
        return map_arrays(lambda leaf: _without_objects(leaf[rows]), self._parts)


def _without_objects(array: np.ndarray) -> Any:
    """Return strings as a tensor, as Keras refuses arrays of Python strings."""
    return tf.convert_to_tensor(array) if array.dtype.kind in "OSU" else array


def split_rows(parts: Any, share: float) -> tuple[Any, Any]:
    """Split arrays into rows for training and for validation, as `fit(validation_split=…)` does.

    Raises:
        UsageError: If one of the two would be empty.
    """
    parts = map_arrays(keras_array, parts)
    rows = next((len(leaf) for leaf in keras.tree.flatten(parts) if leaf is not None), 0)
    at = math.floor(rows * (1.0 - share))
    if not 0 < at < rows:
        raise UsageError(f"validation_split must leave rows for training and validation; got {share!r} of {rows} rows")
    return map_arrays(lambda leaf: leaf[:at], parts), map_arrays(lambda leaf: leaf[at:], parts)


def keras_array(leaf: Any) -> Any:
    """Convert an array as Keras does, floats to the default float."""
    if not getattr(leaf, "shape", ()) or not hasattr(leaf, "__array__"):
        raise UsageError(
            f"x, y must be arrays, a PyDataset, H5ChunkSequence or tf.data to be resumed; got {type(leaf).__name__}"
        )
    array = np.asarray(leaf)
    return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array
