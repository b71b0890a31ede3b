"""What Keras's `fit` calls between steps: one callback before the user's, and one after them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

if TYPE_CHECKING:
    from kerasmem.training.running import Run


class First(keras.callbacks.Callback):
    """Comes before the user's callbacks."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def on_train_begin(self, logs: Any = None) -> None:
        """Find the place to begin at."""
        run, model = self._run, self.model
        run.begin(self.params or {})
        if run.checkpoint is not None and run.checkpoint.point is not None:
            model._initial_epoch = max(run.checkpoint.point.epoch, run.initial_epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note that an epoch begins."""
        self.model._initial_epoch = self._run.kept_epoch  # Keras would begin there in each later fit too
        self._run.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Bring the model what later callbacks look at."""
        self._run.end_epoch()

    def on_test_begin(self, logs: Any = None) -> None:
        """Take over the validation's steps."""
        self._run.begin_test()

    def on_test_end(self, logs: Any = None) -> None:
        """Give them back."""
        self._run.end_test()

    def on_train_end(self, logs: Any = None) -> None:
        """Load what was saved where nothing was left to train."""
        self._run.finish()


class Last(keras.callbacks.Callback):
    """Comes after the user's callbacks: saves what they have left."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self.epoch = self.done = self._unsaved = 0
        self.history: dict[str, list[Any]] = {}
        self.epochs: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch's batches anew."""
        self.epoch, self.done = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save where it is time."""
        checkpoint, done = self._run.checkpoint, batch + 1
        if checkpoint is None or self._run.driver is None or done <= self._run.skipped:
            return
        self._unsaved += done - max(self.done, self._run.skipped)
        self.done = done
        if self._unsaved >= checkpoint.every and done != self._steps():  # the epoch's end is saved anyway
            self.save(self.epoch, done, logs or {})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keep the history, and save."""
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)
        self.epochs.append(epoch)
        source = self._run.source
        if source is not None:
            source.end_epoch(self.done, self._steps())
        if self._run.checkpoint is not None and self._run.driver is not None:
            self.save(epoch + 1, 0, {})

    def _steps(self) -> int | None:
        return (self.params or {}).get("steps")

    def save(self, epoch: int, done: int, logs: Mapping[str, Any]) -> None:
        """Write where training stands."""
        run = self._run
        assert run.checkpoint is not None and run.driver is not None
        self._unsaved = 0
        size = run.driver.size
        before = run.checkpoint.more
        more = {
            "history": {
                name: [*before.get("history", {}).get(name, []), *map(plain, self.history.get(name, []))]
                for name in {**before.get("history", {}), **self.history}
            },
            "epochs": [*before.get("epochs", []), *self.epochs],
            "size": size,
            "done": False,
        }
        run.checkpoint.write(run.driver.keep(), epoch=epoch, done=done, steps=self._steps(), logs=logs, more=more)


def plain(value: Any) -> Any:
    """Return a number, or lists of them, as JSON has it."""
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array.tolist()
