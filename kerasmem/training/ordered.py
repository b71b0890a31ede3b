"""A PyDataset of the user's, and an H5ChunkSequence, as sources whose place in an epoch can be found again."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from kerasmem.streaming.sequence import H5ChunkSequence
from kerasmem.training.place import Place
from kerasmem.training.sources import CountedSource


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
        """As many as the other says; without end where Keras's epochs are not the data's."""
        return self._source.batches

    def __getitem__(self, index: int) -> Any:
        """Return the batch that comes at `index` of what is left."""
        return self._dataset[self._source.index(index)]

    def on_epoch_begin(self) -> None:
        """Hand it on."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Hand it on."""
        self._dataset.on_epoch_end()


class DatasetSource(CountedSource):
    """A PyDataset that gives the same batch for the same index.

    Args:
        dataset: the user's.
        shuffle: whether batches come in another order each epoch, as for `fit`.
        steps: of an epoch, where `fit` was given them.
    """

    kind = "dataset"
    reads_skipped = False

    def __init__(self, dataset: Any, shuffle: bool, steps: int | None) -> None:
        super().__init__(steps)
        self._dataset, self._shuffle = dataset, bool(shuffle)
        self._batches = dataset.num_batches
        self._order: tuple[int, np.ndarray] | None = None
        self.arguments = {"x": _Ordered(dataset, self), "shuffle": False}

    @property
    def batches(self) -> int | None:
        """Batches of an epoch, as Keras is told."""
        return None if self._steps else self._batches

    def describe(self) -> dict[str, Any]:
        """See `Source`."""
        return {"batches": self._batches, "shuffle": self._shuffle, "class": type(self._dataset).__qualname__}

    def go_to(self, position: dict[str, Any], epoch: int, done: int) -> None:
        """See `Source`."""
        self.seed = int(position["seed"])
        if self._steps:
            self._place = int(position["passed"])
            self._first = self._place - epoch * self._steps - done
            return
        self._epoch, self._place = epoch, done

    def pass_over(self, epochs: int, walk: Any, at_once: int) -> None:
        """See `Source`; a dataset may change with its epochs."""
        for _ in range(epochs):
            self._dataset.on_epoch_begin()
            self._dataset.on_epoch_end()

    def peek(self) -> Any:
        """See `Source`."""
        return self._dataset[0]

    def index(self, asked: int) -> int:
        """Return which batch Keras means by the number that it asks for."""
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


class SequenceSource:
    """An H5ChunkSequence, which knows its place itself."""

    kind = "sequence"
    reads_skipped = False

    def __init__(self, sequence: H5ChunkSequence) -> None:
        self._sequence = sequence
        self._place = Place(sequence)
        self._skipped = 0
        self._begun = False
        self.arguments = {"x": sequence}

    def describe(self) -> dict[str, Any]:
        """See `Source`; the sequence's own state says the rest."""
        return {}

    def position(self, epoch: int, done: int, steps: int | None) -> dict[str, Any]:
        """See `Source`."""
        at = self._place.after(max(done - self._skipped, 0), steps)
        return self._sequence.state_dict(epoch=at[0], batch=at[1])

    def go_to(self, position: dict[str, Any], epoch: int, done: int) -> None:
        """See `Source`."""
        self._sequence._resume(position, skipped=done)
        self._skipped = done

    def pass_over(self, epochs: int, walk: Any, at_once: int) -> None:
        """See `Source`; its state says it."""

    def check(self) -> None:
        """See `Source`."""

    def begin_epoch(self, epoch: int) -> None:
        """See `Source`."""
        if not self._begun:
            self._place.begin()
        self._begun = True

    def end_epoch(self, done: int, steps: int | None) -> None:
        """See `Source`."""
        self._place.end_epoch(max(done - self._skipped, 0), steps)
        self._skipped = 0

    def seen(self, batch: Any) -> None:
        """See `Source`."""

    def peek(self) -> Any:
        """See `Source`."""
        return self._sequence.batch(0)


def is_sequence(data: Any) -> bool:
    """Return whether it is an H5ChunkSequence."""
    return isinstance(data, H5ChunkSequence)


def is_dataset(data: Any) -> bool:
    """Return whether it is a PyDataset."""
    return isinstance(data, keras.utils.PyDataset)
