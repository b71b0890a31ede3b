"""Which batch of a sequence comes after those that Keras has trained on, whatever was asked for ahead of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kerasmem.streaming.sequence import H5ChunkSequence


class Place:
    """Follows one `fit` through a sequence.

    Args:
        sequence: given to that `fit`.
    """

    def __init__(self, sequence: H5ChunkSequence) -> None:
        self._sequence = sequence
        self._at = (0, 0)  # the sequence's epoch and place at the first batch trained on in Keras's epoch

    def begin(self) -> None:
        """Note that `fit` begins, with whatever the sequence would give next."""
        self._at = self._sequence._passes.upcoming

    def after(self, trained: int, steps: int | None) -> tuple[int, int]:
        """Return the sequence's epoch and place of the batch that comes next.

        Args:
            trained: batches trained on in Keras's epoch, by this process.
            steps: batches that Keras's epoch has; None where Keras does not know.
        """
        epoch, place = self._at
        batches = len(self._sequence)
        if not self._goes_on(steps):
            trained = min(trained, batches - place)  # several steps in one execution count past the end
        further, place = divmod(place + trained, batches)
        return epoch + further, place

    def end_epoch(self, trained: int, steps: int | None) -> tuple[int, int]:
        """Note that Keras's epoch is over; return where the next one begins."""
        epoch, place = self.after(trained, steps)
        # Stopped before its end, a `fit` of whole epochs goes on with the next one.
        self._at = (epoch + 1, 0) if place and not self._goes_on(steps) else (epoch, place)
        return self._at

    def _goes_on(self, steps: int | None) -> bool:
        """Return whether Keras's epochs are others than the data's."""
        return self._sequence._passes.endless or steps != len(self._sequence)
