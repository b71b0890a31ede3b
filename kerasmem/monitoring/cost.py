"""Cost of the logger itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kerasmem.records import Record


@dataclass(frozen=True)
class Overhead(Record, what="overhead", also=("per_batch_seconds", "step_share")):
    """Time spent inside the logger, in seconds.

    Attributes:
        total_seconds: in all hooks.
        batch_seconds: in the hooks of batches alone.
        batches: batches (steps, with `steps_per_execution`) that passed, sampled or not.
        step_seconds: from the beginning to the end of those batches, the logger's hooks included.
    """

    total_seconds: float
    batch_seconds: float
    batches: int
    step_seconds: float = 0.0

    @property
    def per_batch_seconds(self) -> float | None:
        """Mean time per batch, or None before the first."""
        return self.batch_seconds / self.batches if self.batches else None

    @property
    def step_share(self) -> float | None:
        """Time of the hooks as a share of the batches' own time, or None before the first."""
        bare = self.step_seconds - self.batch_seconds
        return self.batch_seconds / bare if bare > 0 else None


class Timer:
    """Adds up the time of the `with` blocks that it is used for.

    Attributes:
        seconds: of all blocks that have ended.
        start, end: of the latest one, by the clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds = self.start = self.end = 0.0

    def __enter__(self) -> None:
        self.start = self._clock()

    def __exit__(self, *_: object) -> None:
        self.end = self._clock()
        self.seconds += self.end - self.start
