"""Where training stands in its data, and how it gets there again.

A source gives Keras the data and can say, as plain data, what comes after so many batches of an epoch of Keras's.
With a seed (`keras.utils.set_random_seed`) batches come as `model.fit` gives them. If that order cannot be had again
by another process, it depends on a seed of ours and the epoch's number alone.
"""

from __future__ import annotations

import contextlib
import math
import random
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmem.compat.keras_training import read_epoch
from kerasmem.errors import UsageError
from kerasmem.streaming.sequence import H5ChunkSequence
from kerasmem.training.run_state import RunState
from kerasmem.training.steps.batches import map_arrays, without_optionals

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
        return next(iter(self.arguments["x"]))


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
        self._steps = steps
        self._last = 0
        self._expected: int | None = None
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

    def check(self) -> None:
        """Refuse if the data was other than before.

        Raises:
            UsageError: the batch before the place is another than the one that was trained on.
        """
        if self._expected is not None and self._expected != self._last:
            raise UsageError(
                "x: the data gives other batches than in the run that was saved; give shuffle() and random operations "
                "a seed, or train on arrays, a PyDataset or H5ChunkSequence"
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
            f"x, y: {type(leaf).__name__} cannot be resumed; use arrays, a PyDataset, H5ChunkSequence or tf.data"
        )
    array = np.asarray(leaf)
    if array.dtype.kind == "f" and array.dtype.name != keras.config.floatx():
        array = array.astype(keras.config.floatx())
    return array


class _Ordered(keras.utils.PyDataset):
    """The batches of another, in an order of its own, from a place on."""

    def __init__(self, dataset: Any, source: DatasetSource) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset, self._source = dataset, source

    @property
    def num_batches(self) -> int | None:
        """Number of batches, or None for endless data."""
        return self._source.batches

    def __getitem__(self, index: int) -> Any:
        """Return the batch at `index` of the remaining ones."""
        return self._dataset[self._source.index(index)]

    def on_epoch_begin(self) -> None:
        """Hand it on."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Hand it on."""
        self._dataset.on_epoch_end()


class DatasetSource(CountedSource):
    """A PyDataset that gives the same batch for the same index.

    Keras shuffles its batches with Python's generator as an epoch begins; so it is here, if Keras's epochs are the
    data's. Its state is saved, so that another process draws the same.

    Args:
        dataset: the user's.
        shuffle: whether batches come in another order each epoch, as for `fit`.
        steps: of an epoch, if `fit` was given them.
    """

    kind = "dataset"

    def __init__(self, dataset: Any, shuffle: bool | str, steps: int | None) -> None:
        super().__init__(steps)
        self._dataset, self._shuffle = dataset, bool(shuffle)
        self._batches = dataset.num_batches
        self._order: tuple[int, Any] | None = None
        self._draws = self._shuffle and not steps and self._batches is not None
        self._drawn_from: Any = None  # the generator's state before this epoch's order
        self._to_restore: Any = None
        self.arguments = {"x": _Ordered(dataset, self), "shuffle": False}

    @property
    def batches(self) -> int | None:
        """Batches of an epoch, as Keras is told."""
        return None if self._steps else self._batches

    def describe(self) -> dict[str, Any]:
        """Return the settings of the order, and the class of the dataset."""
        return {"batches": self._batches, "shuffle": self._shuffle, "class": type(self._dataset).__qualname__}

    def position(self, run: RunState) -> dict[str, Any]:
        """Return the state of Python's generator too, if orders are drawn from it."""
        has_begun = self._order is not None and self._order[0] == run.epoch
        state = self._drawn_from if has_begun else random.getstate()
        return {**super().position(run), **({"random": state} if self._draws else {})}

    def go_to(self, position: dict[str, Any], run: RunState) -> None:
        """Take over the generator's state too, as the epoch begins."""
        super().go_to(position, run)
        self._to_restore = position.get("random")
        if self._to_restore is not None:
            random.Random().setstate(_as_state(self._to_restore))  # raises if it is none

    def finish(self, position: dict[str, Any]) -> None:
        """Leave Python's generator as a run that is over left it."""
        if "random" in position:
            _set_state(position["random"])

    def begin_epoch(self, epoch: int) -> None:
        """Draw the order of the epoch, as Keras does."""
        super().begin_epoch(epoch)
        if not self._draws:
            return
        if self._to_restore is not None:
            _set_state(self._to_restore)
            self._to_restore = None
        self._drawn_from = random.getstate()
        order = list(range(self._batches))
        random.shuffle(order)
        self._order = (epoch, order)

    def _divided(self, passed: int) -> tuple[int, int]:
        return 0, passed

    def pass_over(self, epochs: int, epoch_iterator: Any, at_once: int) -> None:
        """Tell the dataset of the epochs: it may change with them."""
        for _ in range(epochs):
            self._dataset.on_epoch_begin()
            self._dataset.on_epoch_end()

    def peek(self) -> Any:
        """Return the first batch."""
        return self._dataset[0]

    def index(self, asked: int) -> int:
        """Return the index of the requested batch in the dataset."""
        if self._batches is None:
            return asked + self._place
        at = self._place + asked
        epoch, place = divmod(at, self._batches) if self._steps else (self._epoch, at % self._batches)
        if not self._shuffle:
            return place
        order = self._order
        if order is None or order[0] != epoch:
            order = self._order = (epoch, np.random.default_rng((self.seed, epoch)).permutation(self._batches))
        return int(order[1][place])


def _set_state(state: Any) -> None:
    """Set Python's generator to a state that was saved as JSON."""
    random.setstate(_as_state(state))


def _as_state(state: Any) -> Any:
    version, numbers, gauss = state
    return version, tuple(numbers), gauss


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
        source = DatasetSource(x, shuffle, steps)
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
