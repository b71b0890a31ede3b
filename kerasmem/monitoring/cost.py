"""What the logger itself costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Overhead:
    """Time spent inside the logger's hooks, in seconds.

    Attributes:
        total_seconds: in all hooks.
        batch_seconds: in the hooks of batches alone.
        batches: batches (steps, with `steps_per_execution`) that passed, sampled or not.
    """

    total_seconds: float
    batch_seconds: float
    batches: int

    @property
    def per_batch_seconds(self) -> float | None:
        """Mean time a batch; None before the first."""
        return self.batch_seconds / self.batches if self.batches else None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data, in seconds."""
        return {
            "total_seconds": self.total_seconds,
            "batch_seconds": self.batch_seconds,
            "batches": self.batches,
            "per_batch_seconds": self.per_batch_seconds,
        }
