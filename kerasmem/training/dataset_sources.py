"""Sources for a PyDataset and an H5ChunkSequence, and the choice of a source for any data."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np

from kerasmem.streaming.sequence import H5ChunkSequence
from kerasmem.training.array_source import ArraySource, split_rows
from kerasmem.training.run_state import RunState
from kerasmem.training.sources import CountedSource, Source, StreamSource


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
