"""The position of a run in its data.

A source gives Keras the data, returns its position as JSON values, and moves to such a position.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmem.errors import warn_user
from kerasmem.streaming.sequence import H5ChunkSequence
from kerasmem.training.run_state import RunState


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

    def check_first(self, batch: Any) -> None:
        """Note the first batch that is read, or warn if it has changed since an earlier process."""

    def begin_epoch(self, epoch: int) -> None:
        """Note that Keras begins an epoch."""

    def end_epoch(self, run: RunState) -> None:
        """Note that Keras ends an epoch."""

    def peek(self) -> Any:
        """Return a batch for its shapes, if none is left to train on."""
        return next(iter(self.arguments["x"]))


class StreamSource(Source):
    """A tf.data pipeline or a generator, read again up to the position."""

    kind = "stream"
    reads_skipped = True

    def __init__(self, x: Any = None) -> None:
        self.arguments = {"x": x}
        self._first: int | None = None  # checksum
        self._is_first = True

    def position(self, run: RunState) -> dict[str, Any]:
        """Return the checksum of the first batch, if it is known."""
        return {"first_batch": self._first}

    def go_to(self, position: dict[str, Any], run: RunState, epochs: int) -> None:
        """Adopt the checksum of the first batch."""
        self._first = position.get("first_batch")

    def check_first(self, batch: Any) -> None:
        """Note the first batch that is read, or warn if it has changed since an earlier process."""
        if self._is_first:
            saved, self._first, self._is_first = self._first, checksum(batch), False
            warn_if_changed(self._first, saved)

    def peek(self) -> Any:
        """Return a batch of zeros if the pipeline has specs, as reading it would change its next order."""
        x = self.arguments["x"]
        specs = getattr(x, "element_spec", None)
        leaves = keras.tree.flatten(specs)
        if not leaves or any(not isinstance(leaf, tf.TensorSpec) or leaf.shape.rank is None for leaf in leaves):
            return next(iter(x))
        return keras.tree.map_structure(lambda leaf: tf.zeros([size or 1 for size in leaf.shape], leaf.dtype), specs)


def checksum(batch: Any) -> int:
    """Return a checksum of the arrays in a batch."""
    arrays = [np.asarray(leaf) for leaf in keras.tree.flatten(batch) if hasattr(leaf, "__array__")]
    return zlib.crc32(b"".join(array.tobytes() for array in arrays if array.dtype.kind != "O"))


def warn_if_changed(first: int, saved: int | None) -> None:
    """Warn if the checkpoint has another checksum of the first batch."""
    if saved not in (None, first):
        warn_user(
            "x: the first batch has changed since the checkpoint was written, so the result is not that of an "
            "undisturbed run; give shuffle() a seed, or restore the data",
            RuntimeWarning,
        )


def pass_batches(iterator: Any, count: int) -> Any:
    """Read batches up to the end of the data, at least one, and return the first."""
    first = next(iterator)
    for _ in itertools.islice(iterator, count - 1):
        pass
    return first


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
