"""The position of a run in Keras's epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kerasmem.records import Record


@dataclass
class RunState(Record, what="run"):
    """The position of a run.

    Attributes:
        epoch: Keras's epoch, from 0.
        batch: batches of it that were trained on.
        steps: batches that it has; None if Keras does not know.
        logs: the numbers that Keras told its callbacks after the last batch.
        history: logs of the epochs that are over, by name.
        epochs: the numbers of those epochs.
        micro_batch_rows: rows of a micro-batch; None for whole batches.
        skipped: batches of the epoch that an earlier process trained on, and that Keras counts once more.
        unsaved: batches trained on since the last saving.
    """

    epoch: int = 0
    batch: int = 0
    steps: int | None = None
    logs: dict[str, float] = field(default_factory=dict)
    history: dict[str, list[Any]] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    micro_batch_rows: int | None = None
    skipped: int = field(default=0, init=False)
    unsaved: int = field(default=0, init=False)

    @property
    def order(self) -> int:
        """A number above 0, the larger the later in training."""
        return (self.epoch << 32) + self.batch + 1

    @property
    def trained(self) -> int:
        """Batches of the epoch that this process has trained on."""
        return max(self.batch - self.skipped, 0)

    def resume(self) -> None:
        """Note that another process resumes here."""
        self.skipped = self.batch

    def begin_epoch(self, epoch: int) -> None:
        """Note that Keras begins an epoch."""
        self.epoch, self.batch = epoch, 0

    def count(self, batch: int) -> bool:
        """Count the batches of the epoch, and return whether this process trained on the last."""
        before, self.batch = max(self.batch, self.skipped), batch
        self.unsaved += max(batch - before, 0)
        return batch > self.skipped

    def keep_logs(self, logs: Mapping[str, Any] | None) -> None:
        """Keep Keras's logs of the last batch. This waits for the values."""
        self.logs = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}

    def end_epoch(self, logs: Mapping[str, Any] | None) -> None:
        """Note the end of the epoch, with Keras's logs."""
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(plain(value))
        self.epochs.append(self.epoch)
        self.epoch, self.batch, self.skipped, self.logs = self.epoch + 1, 0, 0, {}


def plain(value: Any) -> Any:
    """Return a number, or lists of them, as JSON has it."""
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array.tolist()
