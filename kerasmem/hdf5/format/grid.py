"""Rows cut into cells of equal size, file by file. Pure arithmetic on row numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Grid:
    """Cells of rows, numbered through all files. No cell spans two files.

    Args:
        sizes: rows of a cell: one number, or one for each file.
        starts: the first row of each file, and last the number of all rows; by default one file without an end.

    Examples:
        >>> grid = Grid([4, 2], [0, 6, 9])
        >>> grid.cell(np.array([0, 3, 4, 6, 8])).tolist()
        [0, 0, 1, 2, 3]
        >>> grid.bounds(3), grid.bounds(1)
        ((8, 9), (4, 6))
    """

    def __init__(self, sizes: int | Sequence[int], starts: Sequence[int] | None = None) -> None:
        self._one = 0 if starts is not None and len(starts) > 2 else _only(sizes)
        if not self._one:
            assert starts is not None
            self._starts = np.asarray(starts, np.int64)
            rows = np.diff(self._starts)
            self._sizes = np.broadcast_to(np.asarray(sizes, np.int64), rows.shape)
            self._firsts = np.r_[0, np.cumsum(-(-rows // self._sizes))]

    @property
    def largest(self) -> int:
        """Rows of the largest cell."""
        return self._one or int(np.minimum(self._sizes, np.diff(self._starts)).max())

    @property
    def sizes(self) -> list[int]:
        """Rows of a cell in each file; one number if all are the same."""
        found = [self._one] if self._one else self._sizes.tolist()
        return found[:1] if len(set(found)) == 1 else found

    def cell(self, rows: Any) -> Any:
        """Return the number of the cell that each row lies in."""
        if self._one:
            return rows // self._one
        file = np.searchsorted(self._starts, rows, side="right") - 1
        return self._firsts[file] + (rows - self._starts[file]) // self._sizes[file]

    def bounds(self, cells: Any) -> tuple[Any, Any]:
        """Return the first row of each cell, and the row after its last."""
        if self._one:
            return cells * self._one, (cells + 1) * self._one
        file = np.searchsorted(self._firsts, cells, side="right") - 1
        low = self._starts[file] + (cells - self._firsts[file]) * self._sizes[file]
        high = np.minimum(low + self._sizes[file], self._starts[file + 1])
        return (low, high) if isinstance(cells, np.ndarray) else (int(low), int(high))

    def coarser(self, least: int) -> Grid:
        """Return the grid of whole numbers of these cells that have `least` rows or more."""
        if self._one:
            return Grid(self._one * -(-least // self._one))
        return Grid((self._sizes * -(-least // self._sizes)).tolist(), self._starts.tolist())


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return runs of numbers one after another: `counts[k]` of them from `starts[k]` on.

    Examples:
        >>> ranges(np.array([7, 3]), np.array([2, 3])).tolist()
        [7, 8, 3, 4, 5]
    """
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def as_grid(grid: Grid | int) -> Grid:
    """Return a grid. A number means the rows of a cell in a single file."""
    return grid if isinstance(grid, Grid) else Grid(grid)


def _only(sizes: int | Sequence[int]) -> int:
    return int(sizes) if isinstance(sizes, (int, np.integer)) else int(sizes[0])
