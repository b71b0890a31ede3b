"""The position of a run in its data, and the way back to it.

A source gives Keras the data and describes its position, as plain data, after some batches of Keras's epoch.
The order of arrays and of a PyDataset depends on the epoch's number and a saved seed alone.
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

from kerasmem.compat.keras_training import read_epoch
from kerasmem.errors import UsageError
from kerasmem.streaming.sequence import H5ChunkSequence
from kerasmem.training.run_state import RunState
from kerasmem.training.steps.batches import map_arrays

_NO_ORDER = (-1, np.arange(0))


class Source:
    """Data that a run can go on with.

    Attributes:
        kind: what it is.
        reads_skipped: whether batches trained on before are read once more, and passed over.
        is_bare: whether Keras's batches are tuples of one array, and a step would get the array itself.
        arguments: for `fit`.
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

    def go_to(self, position: dict[str, Any], run: RunState) -> None:
        """Have Keras's epoch go on after the batches of it that Keras counts and does not ask for."""

    def pass_over(self, epochs: int, epoch_iterator: Any, at_once: int) -> None:
        """Skip whole epochs that an earlier process has trained on.

        Args:
            epochs: how many.
            epoch_iterator: by which Keras goes through the data; if that is read, it stands behind them then.
            at_once: batches between two returns to Keras.
        """

    def begin_epoch(self, epoch: int) -> None:
        """Note that Keras begins an epoch."""

    def end_epoch(self, run: RunState) -> None:
        """Note that it is over."""

    def peek(self) -> Any:
        """Return a batch, for its shapes, if no more are to be trained on."""
        return next(iter(self.arguments["x"]))


class BatchSource(Source):
    """A PyDataset that gives the same batch for the same index.

    The order of an epoch depends on its number and a seed, so that another process has the same one.

    Args:
        dataset: the user's; None if a subclass has the batches.
        batches: batches of the data; None if it has no end.
        shuffle: whether each epoch has an order of its own, as for `fit`.
        steps: steps of an epoch, if `fit` was given them.
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
        """Batches of the epoch that Keras reads; None for endless data.

        In a resumed epoch it is those that are left: Keras's workers keep batches that were not asked for.
        """
        return None if self._steps or self._batches is None else self._batches - self._trained

    def describe(self) -> dict[str, Any]:
        """Return the settings of the order, and the class of the dataset."""
        return {"batches": self._batches, "shuffle": self._shuffle, "class": type(self._dataset).__qualname__}

    def position(self, run: RunState) -> dict[str, Any]:
        """Return the seed."""
        return {"seed": self._seed}

    def go_to(self, position: dict[str, Any], run: RunState) -> None:
        """Take over the seed and the position."""
        seed = position["seed"]
        if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
            raise ValueError(f"seed is {seed!r}")
        self._seed, self._epoch, self._trained = seed, run.epoch, run.batch
        self._order = _NO_ORDER  # Keras has read a batch for its shapes

    def begin_epoch(self, epoch: int) -> None:
        """Begin at the data's beginning, unless an epoch is resumed or Keras's epochs are not the data's."""
        if self._epoch is None or not self._steps:
            self._trained = self._trained if epoch == self._epoch else 0
            self._epoch = epoch

    def pass_over(self, epochs: int, epoch_iterator: Any, at_once: int) -> None:
        """Tell the dataset of the epochs: it may change with them."""
        for _ in range(epochs if self._dataset is not None else 0):
            self._dataset.on_epoch_begin()
            self._dataset.on_epoch_end()

    def peek(self) -> Any:
        """Return the first batch."""
        return self.batch(0, 0)

    def next_batch(self, index: int) -> Any:
        """Return the batch that Keras counts as `index` since it began to read."""
        epoch, index = self._epoch or 0, index + self._trained
        if self._steps:  # counted from the beginning of the run
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
    """The batches of a source, in its order and from its position on."""

    def __init__(self, source: BatchSource, dataset: Any) -> None:
        names = ("workers", "use_multiprocessing", "max_queue_size")
        super().__init__(**{name: getattr(dataset, name) for name in names if dataset is not None})
        self._source, self._dataset = source, dataset

    @property
    def num_batches(self) -> int | None:
        """Number of batches, or None for endless data."""
        return self._source.batches

    def __getitem__(self, index: int) -> Any:
        """Return the batch at `index` of the remaining ones."""
        return self._source.next_batch(index)

    def on_epoch_begin(self) -> None:
        """Tell the user's dataset."""
        if self._dataset is not None:
            self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tell the user's dataset."""
        if self._dataset is not None:
            self._dataset.on_epoch_end()


class ArraySource(BatchSource):
    """Arrays in memory, with rows in the order of the epoch.

    Args:
        x, y, sample_weight: as for `fit`.
        batch_size: rows of a batch; None as Keras does.
        shuffle: as for `fit`; "batch" changes the order within batches only, so they are taken as they are.
        steps: steps of an epoch, if `fit` was given them.
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
            raise UsageError("x: no data was given; give arrays, a PyDataset, H5ChunkSequence or tf.data")
        self._rows = len(leaves[0])
        for leaf in leaves:
            if len(leaf) != self._rows:
                raise UsageError(f"x, y: arrays of {self._rows} and {len(leaf)} rows; they must have as many")
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
    """Return strings as a tensor, since Keras takes no batches of Python's."""
    return tf.convert_to_tensor(array) if array.dtype.kind in "OSU" else array


class StreamSource(Source):
    """A tf.data pipeline or a generator, read again up to the position."""

    kind = "stream"
    reads_skipped = True

    def __init__(self, x: Any, steps: int | None) -> None:
        self._steps = steps
        self.arguments = {"x": x}

    def peek(self) -> Any:
        """Return a batch of zeros if the pipeline has specs, since starting it would change its next order."""
        x = self.arguments["x"]
        specs = getattr(x, "element_spec", None)
        leaves = keras.tree.flatten(specs)
        if not leaves or any(not isinstance(leaf, tf.TensorSpec) or leaf.shape.rank is None for leaf in leaves):
            return next(iter(x))
        return keras.tree.map_structure(lambda leaf: tf.zeros([size or 1 for size in leaf.shape], leaf.dtype), specs)

    def describe(self) -> dict[str, Any]:
        """Return the steps of an epoch."""
        return {"steps": self._steps}

    def pass_over(self, epochs: int, epoch_iterator: Any, at_once: int) -> None:
        """Read whole epochs as Keras does.

        Keras chooses how often it begins the data (one more time an epoch, if it knows the number of batches), and
        each time a pipeline that shuffles draws another order.
        """
        for _ in range(epochs):
            read_epoch(epoch_iterator, lambda iterator: pass_batches(iterator, at_once))


def pass_batches(iterator: Any, count: int) -> None:
    """Read batches up to the end of the data, at least one."""
    next(iterator)
    with contextlib.suppress(StopIteration):
        for _ in range(count - 1):
            next(iterator)


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
            f"x, y: {type(leaf).__name__} cannot be resumed; use arrays, a PyDataset, H5ChunkSequence or tf.data"
        )
    array = np.asarray(leaf)
    if array.dtype.kind == "f" and array.dtype.name != keras.config.floatx():
        array = array.astype(keras.config.floatx())
    return array


class SequenceSource(Source):
    """An H5ChunkSequence, with a state of its own.

    Keras asks for batches ahead of training, so the place is counted from what was trained on.

    Args:
        sequence: given to `fit`, itself or through `as_tf_dataset()`.
    """

    kind = "sequence"

    def __init__(self, sequence: H5ChunkSequence) -> None:
        self._sequence = sequence
        self._first: tuple[int, int] | None = None  # the sequence's epoch and place where Keras's epoch began
        self.arguments = {"x": sequence}

    def position(self, run: RunState) -> dict[str, Any]:
        """Return the sequence's own state for the next batch."""
        epoch, batch = self._next(run)
        return self._sequence.state_dict(epoch=epoch, batch=batch)

    def go_to(self, position: dict[str, Any], run: RunState) -> None:
        """Have the sequence go on there."""
        self._sequence.load_state_dict(position, skipped=run.skipped)

    def begin_epoch(self, epoch: int) -> None:
        """Note the position of the sequence when `fit` begins."""
        if self._first is None:
            self._first = self._sequence.progress.upcoming

    def end_epoch(self, run: RunState) -> None:
        """Note the beginning of the next epoch."""
        epoch, batch = self._next(run)
        # A `fit` of whole epochs that was stopped within one goes on with the next one.
        self._first = (epoch + 1, 0) if batch and not self._goes_on(run) else (epoch, batch)

    def _next(self, run: RunState) -> tuple[int, int]:
        """Return the sequence's epoch and place of the batch that comes after those trained on."""
        assert self._first is not None
        epoch, place = self._first
        batches, trained = len(self._sequence), run.trained
        if not self._goes_on(run):
            trained = min(trained, batches - place)  # several steps in one execution count past the end
        further, place = divmod(place + trained, batches)
        return epoch + further, place

    def _goes_on(self, run: RunState) -> bool:
        """Return whether Keras's epochs are others than the data's."""
        return self._sequence.progress.endless or run.steps != len(self._sequence)

    def peek(self) -> Any:
        """Return a batch of the first epoch."""
        return self._sequence.batch(0)


def make_source(arguments: dict[str, Any]) -> Source:
    """Return the data of a call of `fit` as a source.

    Args:
        arguments: of `fit`, by name; those that the source takes the place of are changed.

    Raises:
        UsageError: it is nothing whose place could be found again.
    """
    x, y, weight = (arguments.get(name) for name in ("x", "y", "sample_weight"))
    steps, shuffle = arguments.get("steps_per_epoch"), arguments.get("shuffle", True)
    source: Source
    if isinstance(x, H5ChunkSequence):
        source = SequenceSource(x)
    elif isinstance(x, keras.utils.PyDataset):
        source = BatchSource(x, x.num_batches, shuffle, steps)
    elif hasattr(x, "element_spec") or hasattr(x, "__next__"):
        source = StreamSource(x, steps)
    else:
        if arguments.get("validation_split") and arguments.get("validation_data") is None:
            (x, y, weight), arguments["validation_data"] = split_rows((x, y, weight), arguments["validation_split"])
        if arguments.get("validation_data") is not None and not arguments.get("validation_batch_size"):
            arguments["validation_batch_size"] = arguments.get("batch_size")
        source = ArraySource(x, y, weight, arguments.get("batch_size"), shuffle, steps)
        arguments.update(y=None, sample_weight=None, batch_size=None, validation_split=0.0)
    arguments.update(source.arguments)
    return source
