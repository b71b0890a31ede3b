"""The position of a run in its data.

A source gives Keras the data, returns its position as JSON values, and moves to such a position. The order of arrays
and of a PyDataset depends only on the epoch's number and a saved seed.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmem.errors import UsageError
from kerasmem.streaming.sequence import H5ChunkSequence
from kerasmem.training.run_state import RunState
from kerasmem.training.steps.batches import map_arrays

_NO_ORDER = (-1, np.arange(0))


class Source:
    """The data of a run that can be resumed.

    Attributes:
        kind: name of the kind of data.
        reads_skipped: whether a resumed run reads the earlier batches again.
        is_bare: whether the user gave one array, which Keras's batches wrap in a tuple.
        arguments: arguments of `fit`.
    """

    kind = ""
    reads_skipped = is_bare = False
    arguments: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """Return the settings that must be the same when the run is resumed, as JSON values."""
        return {}

    def position(self, run: RunState) -> dict[str, Any]:
        """Return the argument of `go_to` for the next batch."""
        return {}

    def go_to(self, position: dict[str, Any], run: RunState, epochs: int) -> None:
        """Move to a saved position.

        Args:
            position: result of `position`.
            run: position in Keras's epochs.
            epochs: whole epochs that earlier processes have trained on.
        """

    def begin_epoch(self, epoch: int) -> None:
        """Note that Keras begins an epoch."""

    def end_epoch(self, run: RunState) -> None:
        """Note that Keras ends an epoch."""

    def peek(self) -> Any:
        """Return a batch for its shapes, if none is left to train on."""
        return next(iter(self.arguments["x"]))


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
        batch_size: rows of a batch; None for Keras's default.
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

    def batch(self, epoch: int, index: int) -> Any:
        """Return a batch of an epoch of the data."""
        rows: Any = slice(index * self._batch_size, (index + 1) * self._batch_size)
        if self._shuffle:
            rows = self.order(epoch, self._rows)[rows]
        return map_arrays(lambda leaf: _without_objects(leaf[rows]), self._parts)


def _without_objects(array: np.ndarray) -> Any:
    """Return strings as a tensor, as Keras refuses arrays of Python strings."""
    return tf.convert_to_tensor(array) if array.dtype.kind in "OSU" else array


class StreamSource(Source):
    """A tf.data pipeline or a generator, read again up to the position."""

    kind = "stream"
    reads_skipped = True

    def __init__(self, x: Any = None) -> None:
        self.arguments = {"x": x}

    def peek(self) -> Any:
        """Return a batch of zeros if the pipeline has specs, as reading it would change its next order."""
        x = self.arguments["x"]
        specs = getattr(x, "element_spec", None)
        leaves = keras.tree.flatten(specs)
        if not leaves or any(not isinstance(leaf, tf.TensorSpec) or leaf.shape.rank is None for leaf in leaves):
            return next(iter(x))
        return keras.tree.map_structure(lambda leaf: tf.zeros([size or 1 for size in leaf.shape], leaf.dtype), specs)


def pass_batches(iterator: Any, count: int) -> Any:
    """Read batches up to the end of the data, at least one, and return the first."""
    first = next(iterator)
    with contextlib.suppress(StopIteration):
        for _ in range(count - 1):
            next(iterator)
    return first


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
    if array.dtype.kind == "f" and array.dtype.name != keras.config.floatx():
        array = array.astype(keras.config.floatx())
    return array


class SequenceSource(Source):
    """An H5ChunkSequence.

    Keras requests batches ahead of training, so the position follows from the batches trained on.

    Args:
        sequence: the sequence given to `fit`, itself or through `as_tf_dataset()`.
    """

    kind = "sequence"

    def __init__(self, sequence: H5ChunkSequence) -> None:
        self._sequence = sequence
        self._first: tuple[int, int] | None = None  # the sequence's epoch and batch when Keras's epoch began
        self.arguments = {"x": sequence}

    def position(self, run: RunState) -> dict[str, Any]:
        """Return the sequence's state for the next batch."""
        epoch, batch = self._next(run)
        return self._sequence.state_dict(epoch=epoch, batch=batch)

    def go_to(self, position: dict[str, Any], run: RunState, epochs: int) -> None:
        """Move the sequence there."""
        self._sequence.load_state_dict(position, skipped=run.skipped)

    def begin_epoch(self, epoch: int) -> None:
        """Note the position of the sequence when `fit` begins."""
        if self._first is None:
            self._first = self._sequence.progress.upcoming

    def end_epoch(self, run: RunState) -> None:
        """Note the beginning of the next epoch."""
        epoch, batch = self._next(run)
        # If `fit` trains whole epochs and is stopped within one, it continues with the next.
        self._first = (epoch + 1, 0) if batch and not self._spans_epochs(run) else (epoch, batch)

    def _next(self, run: RunState) -> tuple[int, int]:
        """Return epoch and number of the batch that follows those trained on."""
        assert self._first is not None
        epoch, batch = self._first
        batches, trained = len(self._sequence), run.trained
        if not self._spans_epochs(run):
            trained = min(trained, batches - batch)  # several steps in one execution count past the end
        further, batch = divmod(batch + trained, batches)
        return epoch + further, batch

    def _spans_epochs(self, run: RunState) -> bool:
        """Return whether Keras's epochs differ from the data's."""
        return self._sequence.progress.endless or run.steps != len(self._sequence)

    def peek(self) -> Any:
        """Return a batch of the first epoch."""
        return self._sequence.batch(0)


def make_source(arguments: dict[str, Any]) -> Source:
    """Return the data of a call of `fit` as a source.

    Args:
        arguments: arguments of `fit`, by name; those that the source replaces are changed.

    Raises:
        UsageError: If the data has no position to resume from.
    """
    x, y, weight = (arguments.get(name) for name in ("x", "y", "sample_weight"))
    steps, shuffle = arguments.get("steps_per_epoch"), arguments.get("shuffle", True)
    source: Source
    if isinstance(x, H5ChunkSequence):
        source = SequenceSource(x)
    elif isinstance(x, keras.utils.PyDataset):
        source = BatchSource(x, x.num_batches, shuffle, steps)
    elif hasattr(x, "element_spec") or hasattr(x, "__next__"):
        source = StreamSource(x)
    else:
        if arguments.get("validation_split") and arguments.get("validation_data") is None:
            (x, y, weight), arguments["validation_data"] = split_rows((x, y, weight), arguments["validation_split"])
        if arguments.get("validation_data") is not None and not arguments.get("validation_batch_size"):
            arguments["validation_batch_size"] = arguments.get("batch_size")
        source = ArraySource(x, y, weight, arguments.get("batch_size"), shuffle, steps)
        arguments.update(y=None, sample_weight=None, batch_size=None, validation_split=0.0)
    arguments.update(source.arguments)
    return source
