"""A callback that follows Keras's `fit` and saves its position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from kerasmem import checks
from kerasmem.training.run_state import RunState
from kerasmem.training.sources import Source

SAVE_FREQ = 100  # batches


class SavingCallback(keras.callbacks.Callback):
    """Keeps a run's state up to date, and saves it every few batches and at each epoch's end.

    Args:
        run: the state.
        source: the data; None if nothing is saved.
        save_freq: batches from one saving to the next.
    """

    def __init__(self, run: RunState, source: Source | None, save_freq: int) -> None:
        super().__init__()
        self.run, self.source, self.save_freq = run, source, save_freq

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Note how many batches an epoch has."""
        self.run.steps = (self.params or {}).get("steps")

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count the epoch's batches from 0."""
        self.run.begin_epoch(epoch)
        if self.source is not None:
            self.source.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save, if it is time."""
        if self.run.count(batch + 1) and self.run.unsaved >= self.save_freq and self.can_save():
            self.run.keep_logs(logs)
            self.save()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save the start of the next epoch."""
        if self.source is not None:
            self.source.end_epoch(self.run)
        self.run.end_epoch(logs)
        self.save()

    def can_save(self) -> bool:
        """Return whether a run can be resumed here."""
        return True

    def save(self) -> None:
        """Write the position of the run."""
        raise NotImplementedError


def read_save_freq(save_freq: int | None) -> int:
    """Return the batches between two savings.

    Raises:
        UsageError: it is no whole number above 0.
    """
    return SAVE_FREQ if save_freq is None else checks.whole("save_freq", save_freq)
