"""What the logger itself costs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kerasmem.errors import KerasmemError
from kerasmem.records import Record

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Overhead(Record, what="overhead", also=("per_batch_seconds", "step_share")):
    """Time spent inside the logger, in seconds.

    Attributes:
        total_seconds: in all hooks.
        batch_seconds: in the hooks of batches alone.
        batches: batches (steps, with `steps_per_execution`) that passed, sampled or not.
        step_seconds: from the beginning to the end of those batches, the logger's hooks included.
        background_seconds: processor time of the background thread.
    """

    total_seconds: float
    batch_seconds: float
    batches: int
    step_seconds: float = 0.0
    background_seconds: float = 0.0

    @property
    def per_batch_seconds(self) -> float | None:
        """Mean time a batch; None before the first."""
        return self.batch_seconds / self.batches if self.batches else None

    @property
    def step_share(self) -> float | None:
        """The hooks' time as a share of what the batches take without them; None before the first."""
        bare = self.step_seconds - self.batch_seconds
        return self.batch_seconds / bare if bare > 0 else None


def costed(method: F) -> F:
    """Count the time of a method of `Recorder` as its cost, and keep failures out of the training loop."""
    is_batch = method.__name__.endswith("_batch")
    opens = method.__name__ == "begin_batch"
    starts = method.__name__ == "begin_run"  # a new run gets a new chance

    @functools.wraps(method)
    def guarded(self: Any, *args: Any) -> Any:
        if self.broken and not starts:
            return None
        start = self.clock()
        try:
            return method(self, *args)
        except KerasmemError:
            raise
        except Exception as error:
            self.break_off(error)
            return None
        finally:
            end = self.clock()
            spent = end - start
            self.total_seconds += spent
            if is_batch:
                self.batch_seconds += spent
                if opens:
                    self.step_start = start
                elif self.step_start is not None:
                    self.step_seconds += end - self.step_start
                    self.step_start = None

    return guarded  # type: ignore[return-value]
