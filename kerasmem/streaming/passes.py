"""Which batch is meant: Keras's batch indices turned into places in the epoch's own order.

`fit(shuffle=True)`, the default, asks for batch *indices* in random order. The rows are already shuffled,
and following the indices would throw every chunk of the file back and forth, so inside a pass of Keras the
first index asked for gets the first batch, the second the second, and so on, each exactly once. Outside
such a pass an index is simply a place.
"""

from __future__ import annotations

import numpy as np


class Passes:
    """Counts epochs and hands out places; not thread-safe by itself.

    A pass opens with `begin` and closes with the `end` that comes once every batch has been given.
    With `steps_per_epoch` below the number of batches Keras goes on with the same pass in its next epoch,
    so a pass that is incomplete at `end` stays open. A second `end` without `begin` (what `fit` does before
    its first epoch), or an index asked for twice, tells that somebody new is reading: the pass closes.

    Args:
        batches: batches of an epoch.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.epoch = 0
        self.open = False
        self._begun = False
        self._start()

    def begin(self) -> None:
        """Note that Keras begins an epoch."""
        self._begun = True
        if not self.open:
            self.open = True
            self._start()

    def end(self) -> bool:
        """Note that Keras ends an epoch; return whether the pass is over."""
        begun, self._begun = self._begun, False
        if self.open and (self._given == self.batches or self._repeated or not begun):
            self.open = False
            if self._given:
                self.epoch += 1
            return True
        return False

    def restart(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.epoch = epoch
        self.open = self._begun
        self._start()

    def place(self, index: int) -> int:
        """Return the place of the batch that Keras means by `index`."""
        if not self.open:
            return index
        place = int(self._places[index])
        if place < 0:
            place = self._given
            self._places[index] = place
            self._given += 1
        else:
            self._repeated = True
        return place

    def _start(self) -> None:
        self._places = np.full(self.batches, -1, np.int32)
        self._given = 0
        self._repeated = False
