"""Rows that lie near each other in a file, and where they go in a window."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kerasmem.hdf5.direct.delivery import Places


@dataclass(frozen=True)
class RowRun:
    """Rows to be read: `start` to `stop` of the file, all or those picked, and where they go in a window."""

    start: int
    stop: int
    picked: np.ndarray | None
    places: Places

    def cells(self, size: int) -> Iterator[RowRun]:
        """Return the parts that lie in one cell each of a grid of `size` rows, without what is not picked."""
        if self.picked is None and self.start // size == (self.stop - 1) // size:
            yield self
            return
        for cell in range(self.start // size, (self.stop - 1) // size + 1):
            low, high = max(cell * size, self.start), min((cell + 1) * size, self.stop)
            first, last = low - self.start, high - self.start
            picked = None
            if self.picked is not None:
                first, last = np.searchsorted(self.picked, [first, last]).tolist()
                if first == last:
                    continue
                inside = self.picked[first:last]
                low, high = self.start + int(inside[0]), self.start + int(inside[-1]) + 1
                picked = None if high - low == last - first else inside - inside[0]
            yield RowRun(low, high, picked, part_of(self.places, first, last))

    def runs(self) -> Iterator[RowRun]:
        """Return the parts without gaps."""
        if self.picked is None:
            yield self
            return
        breaks = np.flatnonzero(np.diff(self.picked) > 1) + 1
        bounds = [0, *breaks.tolist(), len(self.picked)]
        for first, last in itertools.pairwise(bounds):
            low = self.start + int(self.picked[first])
            yield RowRun(low, low + last - first, None, part_of(self.places, first, last))


def part_of(places: Places, first: int, last: int) -> Places:
    """Return the places of rows `first` to `last` of those that `places` are for."""
    if isinstance(places, slice):
        return slice(places.start + first, places.start + last)
    return places[first:last]
