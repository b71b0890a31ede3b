"""Blocks: the runs of rows that are read together, all of them or those of a shard. Pure arithmetic on row numbers."""

from __future__ import annotations

import numpy as np

from kerasmem.hdf5.grid import Grid, as_grid, ranges


class Blocks:
    """The selected rows, cut along a grid.

    Args:
        selection: the rows: a `range` of step 1, or a sorted int64 array.
        grid: the grid, or the rows of its cells; every block lies within one cell, and so within one file.

    Example:
        >>> blocks = Blocks(range(3, 10), 4)
        >>> [blocks.span(k) for k in range(blocks.count)]
        [(3, 4), (4, 8), (8, 10)]
    """

    def __init__(self, selection: range | np.ndarray, grid: Grid | int) -> None:
        self.grid = as_grid(grid)
        self.total = len(selection)
        self._first = self._last = self._cell = 0
        self._rows: np.ndarray | None = None
        if isinstance(selection, range):
            self._first, self._last = selection.start, selection.stop
            self._cell = int(self.grid.cell(self._first))
            self.count = int(self.grid.cell(self._last - 1)) - self._cell + 1
        else:
            self._rows = selection
            cells = self.grid.cell(selection)
            starts = np.flatnonzero(np.r_[True, cells[1:] != cells[:-1]])
            self._bounds = np.r_[starts, len(selection)]
            self.count = len(starts)

    def sizes(self, blocks: np.ndarray) -> np.ndarray:
        """Return how many selected rows each block has."""
        if self._rows is not None:
            return self._bounds[blocks + 1] - self._bounds[blocks]
        cells = self._cell + blocks
        return np.minimum(self.grid.high(cells), self._last) - np.maximum(self.grid.low(cells), self._first)

    def span(self, block: int) -> tuple[int, int]:
        """Return the run of file rows, (start, stop), that covers a block."""
        if self._rows is not None:
            inside = self._rows[self._bounds[block] : self._bounds[block + 1]]
            return int(inside[0]), int(inside[-1]) + 1
        cell = self._cell + block
        return max(self.grid.low(cell), self._first), min(self.grid.high(cell), self._last)

    def picked(self, block: int) -> np.ndarray | None:
        """Return which rows of the span are selected, counted from its start; None when all are."""
        if self._rows is None:
            return None
        inside = self._rows[self._bounds[block] : self._bounds[block + 1]]
        start = inside[0]
        return None if inside[-1] + 1 - start == len(inside) else inside - start

    def rows(self, blocks: np.ndarray, low: np.ndarray | int = 0, high: np.ndarray | None = None) -> np.ndarray:
        """Return the file rows of blocks, rising in each, int64.

        Args:
            blocks: the blocks, one after another.
            low: the first row of each that is wanted.
            high: the row after the last of each that is wanted; None for all.
        """
        counts = (self.sizes(blocks) if high is None else high) - low
        if self._rows is not None:
            return self._rows[ranges(self._bounds[blocks] + low, counts)]
        return ranges(np.maximum(self.grid.low(self._cell + blocks), self._first) + low, counts)


class ShardBlocks:
    """Some of the blocks, in file order, the first and last of those dealt perhaps cut; has the face of `Blocks`.

    Args:
        blocks: all blocks.
        order: their numbers in the order in which they were dealt.
        start: first row of the shard, counted along that order.
        stop: the row after its last.
    """

    def __init__(self, blocks: Blocks, order: np.ndarray, start: int, stop: int) -> None:
        self.grid = blocks.grid
        self.total = stop - start
        ends = np.r_[0, np.cumsum(blocks.sizes(order))]
        first = int(np.searchsorted(ends, start, side="right")) - 1
        last = int(np.searchsorted(ends, stop, side="left"))
        self.count = last - first
        dealt = order[first:last]
        low, high = np.zeros_like(dealt), blocks.sizes(dealt)
        low[0], high[-1] = start - ends[first], stop - ends[last - 1]
        rising = np.argsort(dealt)
        self._whole = blocks
        self._numbers, self._low, self._high = dealt[rising], low[rising], high[rising]

    def sizes(self, blocks: np.ndarray) -> np.ndarray:
        """Return how many rows of the shard each block has."""
        return self._high[blocks] - self._low[blocks]

    def span(self, block: int) -> tuple[int, int]:
        """Return the run of file rows, (start, stop), that covers a block."""
        if self._is_whole(block):
            return self._whole.span(int(self._numbers[block]))
        inside = self.rows(np.array([block]))
        return int(inside[0]), int(inside[-1]) + 1

    def picked(self, block: int) -> np.ndarray | None:
        """Return which rows of the span are in the shard, counted from its start; None when all are."""
        if self._is_whole(block):
            return self._whole.picked(int(self._numbers[block]))
        inside = self.rows(np.array([block]))
        return None if inside[-1] + 1 - inside[0] == len(inside) else inside - inside[0]

    def rows(self, blocks: np.ndarray) -> np.ndarray:
        """Return the file rows of blocks, rising in each, int64."""
        return self._whole.rows(self._numbers[blocks], self._low[blocks], self._high[blocks])

    def _is_whole(self, block: int) -> bool:
        number = self._numbers[block : block + 1]
        return bool(self._low[block] == 0 and self._high[block] == self._whole.sizes(number)[0])
