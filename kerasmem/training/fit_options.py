"""The arguments of `kerasmem.fit` beyond those of `model.fit`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from kerasmem import checks
from kerasmem.training.run_state import RunState
from kerasmem.training.saving import SAVE_FREQ, read_save_freq
from kerasmem.training.steps.division import INEXACT, MEAN, SUM


@dataclass(frozen=True)
class FitOptions:
    """Checked arguments.

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

    @classmethod
    def read(
        cls, micro_batches: Any, checkpoint: Any, save_freq: Any, keep: Any, isolated: Any, loss_reduction: Any
    ) -> FitOptions:
        """Return the checked options.

        Raises:
            UsageError: If one is wrong.
        """
        if micro_batches is not None and micro_batches != INEXACT:
            micro_batches = checks.whole("micro_batches", micro_batches)
        if checkpoint is not None:
            checkpoint = os.path.abspath(checks.path("checkpoint", checkpoint))
        if loss_reduction is not None:
            checks.choice("loss_reduction", loss_reduction, (MEAN, SUM))
        return cls(micro_batches, checkpoint, read_save_freq(save_freq), bool(keep), bool(isolated), loss_reduction)

    def pieces(self, run: RunState) -> tuple[int | str | None, int | None]:
        """Return the pieces of a batch, and the rows of a piece if an earlier process knows them, for a run."""
        if self.halvings and run.micro_batch_rows is None:
            return 2**self.halvings, None
        rows = run.micro_batch_rows
        return self.micro_batches, None if rows is None else max(1, rows >> self.halvings)
