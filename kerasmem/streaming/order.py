"""The order of rows: pure arithmetic on row numbers.

Shuffling has two levels. The selected rows are cut into *blocks* (runs that are read together), the blocks are
assigned to *windows* at random, and the rows of each window are shuffled. This needs memory for one number per block,
not per row.

Blocks are assigned by stratified sampling: with N windows, each run of N neighboring blocks is distributed over all
windows, in random order. So every window samples the whole file, even if the file is sorted by class and a window has
few blocks, and the sizes of windows differ by at most one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kerasmem.hdf5.format.layout import Grid, as_grid, ranges

BLOCKS, ROWS = 0, 1  # random streams of an epoch


class Blocks:
    """The selected rows, cut into blocks along a grid.

    Args:
        selection: row numbers, a `range` of step 1 or a sorted int64 array.
        grid: the grid, or the rows of its cells. Every block lies within one cell, and so within one file.

    Examples:
        >>> blocks = Blocks(range(3, 10), 4)
        >>> [blocks.run(k) for k in range(blocks.count)]
        [(3, 4, None), (4, 8, None), (8, 10, None)]
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
        """Return the number of selected rows in each block."""
        if self._rows is not None:
            return self._bounds[blocks + 1] - self._bounds[blocks]
        low, high = self.grid.bounds(self._cell + blocks)
        return np.minimum(high, self._last) - np.maximum(low, self._first)

    def run(self, block: int) -> tuple[int, int, np.ndarray | None]:
        """Return start and stop of the file rows that cover a block, and the selected ones among them.

        The selected rows are relative to the start, or None if all are selected.
        """
        if self._rows is not None:
            return _run_of(self._rows[self._bounds[block] : self._bounds[block + 1]])
        low, high = self.grid.bounds(self._cell + block)
        return max(low, self._first), min(high, self._last), None

    def rows(self, blocks: np.ndarray, low: np.ndarray | int = 0, high: np.ndarray | None = None) -> np.ndarray:
        """Return the file rows of some blocks, int64, in ascending order within each block.

        Args:
            blocks: numbers of the blocks.
            low: the first row to return of each block.
            high: the row after the last to return of each block, or None for all.
        """
        counts = (self.sizes(blocks) if high is None else high) - low
        if self._rows is not None:
            return self._rows[ranges(self._bounds[blocks] + low, counts)]
        return ranges(np.maximum(self.grid.bounds(self._cell + blocks)[0], self._first) + low, counts)


class ShardBlocks:
    """The blocks of one shard, possibly cut. Implements the interface of `Blocks`.

    Args:
        blocks: all blocks.
        numbers: numbers of the shard's blocks.
        low: the first row of each that is in the shard.
        high: the row after the last of each that is in the shard.
    """

    def __init__(self, blocks: Blocks, numbers: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        self.grid = blocks.grid
        self.count = len(numbers)
        self.total = int((high - low).sum())
        self.numbers = numbers
        self._whole, self._low, self._high = blocks, low, high

    @classmethod
    def between(cls, blocks: Blocks, order: np.ndarray, ends: np.ndarray, start: int, stop: int) -> ShardBlocks:
        """Return the blocks of a run of rows, sorted by file order. The blocks at its ends may be cut.

        Args:
            blocks: all blocks.
            order: their numbers in random order.
            ends: cumulative number of rows along that order.
            start: first row of the run along that order.
            stop: row after its last.
        """
        first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left")
        dealt, before = order[first : last + 1], int(ends[first - 1]) if first else 0
        high = np.diff(ends[first : last + 1], prepend=before)
        low = np.zeros_like(high)
        low[0] = start - before
        high[-1] -= int(ends[last]) - stop
        rising = np.argsort(dealt)
        return cls(blocks, dealt[rising], low[rising], high[rising])

    def sizes(self, blocks: np.ndarray) -> np.ndarray:
        """Return the number of the shard's rows in each block."""
        return self._high[blocks] - self._low[blocks]

    def run(self, block: int) -> tuple[int, int, np.ndarray | None]:
        """Return start and stop of the file rows that cover a block, and the shard's rows among them."""
        number = self.numbers[block : block + 1]
        if self._low[block] == 0 and self._high[block] == self._whole.sizes(number)[0]:
            return self._whole.run(int(number[0]))
        return _run_of(self.rows(np.array([block])))

    def rows(self, blocks: np.ndarray) -> np.ndarray:
        """Return the file rows of some blocks, int64, in ascending order within each block."""
        return self._whole.rows(self.numbers[blocks], self._low[blocks], self._high[blocks])


def _run_of(rows: np.ndarray) -> tuple[int, int, np.ndarray | None]:
    start, stop = int(rows[0]), int(rows[-1]) + 1
    return start, stop, None if stop - start == len(rows) else rows - start


class Position(NamedTuple):
    """Position of a batch: its epoch, and its number in the epoch."""

    epoch: int
    batch: int


@dataclass(frozen=True)
class Segment:
    """Rows `start` to `stop` of one window, in the order of delivery."""

    window: int
    start: int
    stop: int


@dataclass(eq=False, repr=False)
class EpochOrder:
    """The order of one epoch.

    Args:
        blocks: blocks of all selected rows, or of a shard.
        window_blocks: largest number of blocks that are shuffled together.
        seed: seed of the shuffle, or None for file order.
        epoch: number of the epoch. Each has its own order.

    Examples:
        >>> order = EpochOrder(Blocks(range(6), 2), window_blocks=2, seed=None, epoch=0)
        >>> order.segments(2, 6)
        [Segment(window=0, start=2, stop=4), Segment(window=1, start=0, stop=2)]
    """

    blocks: Blocks | ShardBlocks
    window_blocks: int
    seed: int | None
    epoch: int
    _shuffled: tuple[tuple[int, np.ndarray], ...] = ()

    def __post_init__(self) -> None:
        count = self.blocks.count
        self.windows = -(-count // self.window_blocks)
        # With a single window the shuffle of its rows is already uniform, so it is read in file order.
        if self.seed is not None and self.windows > 1:
            self._order, sizes = deal(count, self.windows, self._random(BLOCKS))
            self._firsts = np.r_[0, np.cumsum(sizes)]
        else:
            self._order = np.arange(count)
            self._firsts = np.minimum(np.arange(self.windows + 1) * self.window_blocks, count)
        self._starts = np.r_[0, np.cumsum(self.blocks.sizes(self._order))][self._firsts]

    @property
    def total(self) -> int:
        """Rows delivered in the epoch."""
        return self.blocks.total

    def key(self, window: int) -> tuple[int, int]:
        """Return the key of a window. Windows with the same key hold the same rows in any epoch."""
        return (self.epoch if self.windows > 1 and self.seed is not None else -1, window)

    def window_rows(self, window: int) -> int:
        """Return the number of rows in a window."""
        return int(self._starts[window + 1] - self._starts[window])

    def window_order(self, window: int) -> np.ndarray:
        """Return the blocks of a window in the order of reading."""
        return self._order[self._firsts[window] : self._firsts[window + 1]]

    def slots(self, segment: Segment) -> np.ndarray | None:
        """Return the indices of a segment's rows in the order of reading, or None if that is the order of delivery."""
        if self.seed is None:
            return None
        for window, slots in self._shuffled:
            if window == segment.window:
                return slots[segment.start : segment.stop]
        slots = np.arange(self.window_rows(segment.window), dtype=np.int32)
        self._random(ROWS, segment.window).shuffle(slots)
        self._shuffled = (*self._shuffled[-1:], (segment.window, slots))  # replaced as a whole, because threads read it
        return slots[segment.start : segment.stop]

    def window_bounds(self, window: int) -> tuple[int, int]:
        """Return start and stop of a window among the rows of the epoch."""
        return int(self._starts[window]), int(self._starts[window + 1])

    def segments(self, start: int, stop: int) -> list[Segment]:
        """Return the segments of windows that rows `start` to `stop` of the epoch consist of."""
        segments = []
        window = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            base, end = int(self._starts[window]), int(self._starts[window + 1])
            segments.append(Segment(window, start - base, min(stop, end) - base))
            start, window = min(stop, end), window + 1
        return segments

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Return the file rows of rows `start` to `stop` of the epoch, in the order of delivery."""
        return np.concatenate([self._segment_rows(segment) for segment in self.segments(start, stop)])

    def _segment_rows(self, segment: Segment) -> np.ndarray:
        blocks, slots = self.window_order(segment.window), self.slots(segment)
        if slots is None:
            slots = np.arange(segment.start, segment.stop)
        ends = np.cumsum(self.blocks.sizes(blocks))
        used, inverse = np.unique(np.searchsorted(ends, slots, side="right"), return_inverse=True)
        sizes = self.blocks.sizes(blocks[used])
        # Index of each row among the rows of the used blocks
        indices = slots - (ends[used] - sizes)[inverse] + (np.cumsum(sizes) - sizes)[inverse]
        return self.blocks.rows(blocks[used])[indices]

    def _random(self, *stream: int) -> Any:
        assert self.seed is not None
        return np.random.default_rng([self.seed, self.epoch, *stream])


def deal(count: int, windows: int, random: Any) -> tuple[np.ndarray, np.ndarray]:
    """Assign blocks to windows at random.

    Returns:
        The blocks window by window, in file order within each, and the number of blocks in each window.
    """
    runs = -(-count // windows)
    table = np.arange(runs * windows).reshape(runs, windows)
    random.permuted(table, axis=1, out=table)
    exists = count > table.T  # the last run may be incomplete
    return table.T[exists], exists.sum(axis=1)
