"""The arguments of `kerasmem.fit` beyond those of `model.fit`."""

from __future__ import annotations

from dataclasses import dataclass

from kerasmem.training.run_state import RunState
from kerasmem.training.saving import SAVE_FREQ


@dataclass(frozen=True)
class FitOptions:
    """Checked arguments of `kerasmem.fit` beyond those of `model.fit`.

    Attributes:
        micro_batches: pieces of a batch from the start; None for whole batches; or "inexact".
        checkpoint: absolute path; None for no checkpoint.
        save_freq: batches between two checkpoints.
        keep: whether the file stays at the end.
        isolated: whether steps run in a process of their own.
        loss_reduction: "mean" or "sum" for a model with its own `compute_loss`.
        falls_back: whether steps run in this process if the model cannot be made in another one.
        halvings: times that the pieces of a batch are halved if a checkpoint is resumed, since the process was killed
            there before.
    """

    micro_batches: int | str | None = None
    checkpoint: str | None = None
    save_freq: int = SAVE_FREQ
    keep: bool = False
    isolated: bool = False
    loss_reduction: str | None = None
    falls_back: bool = False
    halvings: int = 0

    def pieces(self, run: RunState) -> tuple[int | str | None, int | None]:
        """Return the pieces of a batch, and the rows of a piece if an earlier process knows them, for a run."""
        if self.halvings and run.micro_batch_rows is None:
            return 2**self.halvings, None
        rows = run.micro_batch_rows
        return self.micro_batches, None if rows is None else max(1, rows >> self.halvings)
