"""The choice of smaller pieces after a step ran out of memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WITHOUT_ESTIMATE, _AGAINST_ESTIMATE = 2, 4  # a failure costs ten seconds and more


@dataclass(frozen=True)
class Failure:
    """A step that ran out.

    Attributes:
        rows: rows of its pieces.
        is_update: whether the update after the last piece ran out.
        is_certain: whether memory is known to be the reason; a killed process may have had another one.
    """

    rows: int
    is_update: bool = False
    is_certain: bool = True


@dataclass(frozen=True)
class GiveUp:
    """No smaller piece helps.

    Attributes:
        is_update: whether the update is what does not fit.
    """

    is_update: bool = False


@dataclass(frozen=True)
class SplitPolicy:
    """Rows of the pieces of a batch, from the failures so far.

    Attributes:
        rows: rows of the batch.
        fitting_rows: rows of a piece that fit by the estimate; 0 if not even one does, None without an estimate.
        is_sure: whether they fit at the upper end of the estimate.
        is_impossible: whether one row cannot fit.
    """

    rows: int
    fitting_rows: int | None = None
    is_sure: bool = False
    is_impossible: bool = False

    def next(self, failures: Sequence[Failure]) -> int | GiveUp:
        """Return the rows of the next pieces.

        Examples:
            >>> policy = SplitPolicy(2048, fitting_rows=600)
            >>> policy.next([Failure(2048)]), policy.next([Failure(2048), Failure(512)])
            (512, 128)
            >>> policy.next([Failure(1)])
            GiveUp(is_update=False)
        """
        last = failures[-1]
        if not last.is_certain and len(failures) == 1:
            return last.rows
        if last.is_update or last.rows == 1 or self.is_impossible:
            return GiveUp(last.is_update)
        if self._follows_estimate(last):
            return even_rows(self.rows, self.fitting_rows or 1)
        return -(-last.rows // (_WITHOUT_ESTIMATE if self.fitting_rows is None else _AGAINST_ESTIMATE))

    def is_in_doubt(self, failures: Sequence[Failure]) -> bool:
        """Return whether one row should be tried first: if it runs out, too, no smaller piece helps."""
        return failures[-1].is_certain and not (self.is_sure and self._follows_estimate(failures[-1]))

    def _follows_estimate(self, last: Failure) -> bool:
        return 0 < (self.fitting_rows or 0) < last.rows


def even_rows(rows: int, most: int) -> int:
    """Return the rows of a piece if a batch is divided into pieces of `most` at most, about even.

    Pieces of one size are worth up to twice as many: each size is traced, and compiled, by itself.

    Examples:
        >>> even_rows(2048, 845), even_rows(23, 10)
        (512, 8)
    """
    whole = next((size for size in range(most, most // 2, -1) if rows % size == 0), None)
    return whole or -(-rows // math.ceil(rows / most))
