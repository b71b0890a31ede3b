"""The choice of smaller pieces after a step ran out of memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Failure(Protocol):
    """A step that ran out.

    Attributes:
        rows: rows of its pieces.
        is_update: whether the update after the last piece ran out.
        is_certain: whether memory is known to be the reason; a killed process may have had another one.
    """

    rows: int
    is_update: bool
    is_certain: bool


@dataclass(frozen=True)
class GiveUp:
    """No smaller piece helps.

    Attributes:
        is_update: whether the update is what does not fit.
    """

    is_update: bool = False


class SplitPolicy:
    """Rows of the pieces of a batch, from its failures so far.

    A failure costs ten seconds and more, since TensorFlow's allocator waits. So one row is tried before anything else:
    if it runs out, too, no smaller piece helps. After that pieces are halved; larger ones train faster.
    """

    def next(self, failures: Sequence[Failure]) -> int | GiveUp:
        """Return the rows of the next pieces."""
        last = failures[-1]
        if not last.is_certain and len(failures) == 1:
            return last.rows
        if last.is_update or last.rows == 1:
            return GiveUp(last.is_update)
        return -(-last.rows // 2)
