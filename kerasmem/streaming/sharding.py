"""Share rows among workers: disjoint shards with equal numbers of batches. Pure arithmetic.

Shards are made of whole blocks and are the same in every epoch, so a worker's part of the file stays in the
page cache of its machine, and in its windows where it fits. With shuffling the blocks are dealt out at random
by the seed; in file order each shard is one run of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kerasmem import checks
from kerasmem.cluster import find_shard
from kerasmem.errors import UsageError
from kerasmem.hdf5.format.layout import Grid, as_grid
from kerasmem.streaming.order import Blocks, ShardBlocks
from kerasmem.units import format_count

_DEAL = 2  # which of a seed's random streams; with no epoch in it
_GRID = 4096  # rows


def read_shard(shard: Any) -> tuple[int, int]:
    """Return the checked `shard` as (index, count); (0, 1) means all rows.

    Raises:
        UsageError: If it is neither None, "auto" nor two whole numbers with the smaller one first.
    """
    if shard is None:
        return 0, 1
    if isinstance(shard, str) and shard == "auto":
        rank, size = find_shard()
        return rank, size
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise UsageError(f"shard: {shard!r} is neither (index, count), such as (0, 4), nor 'auto'")
    index, count = checks.whole("shard index", shard[0], 0), checks.whole("shard count", shard[1], 1)
    if index >= count:
        raise UsageError(f"shard: index {index} does not exist among {count}; they are 0 to {count - 1}")
    return index, count


@dataclass(frozen=True)
class Share:
    """The division of the selected rows, and this worker's part.

    Args:
        index: this worker.
        count: all workers; 1 if nothing is shared out.
        rows: the rows of all workers.
        batch_size: rows a batch.
        drop_remainder: whether only full batches are delivered.
        chunks: rows of a chunk, or the grid of chunks. The border between two shards lies between two chunks where
            that leaves both with the same number of batches, and else within a chunk, which both then read.

    Raises:
        UsageError: If there are not enough rows.
    """

    index: int
    count: int
    rows: int
    batch_size: int
    drop_remainder: bool
    chunks: Grid | int = 1

    def __post_init__(self) -> None:
        if self.rows < self.count:
            raise UsageError(
                f"shard: {format_count(self.rows, 'row')} cannot be shared out among {self.count:,} workers; use fewer"
            )
        if not self.steps:
            each = f" for each of {self.count:,} workers" if self.count > 1 else ""
            raise UsageError(
                f"remainder: no full batch of {self.batch_size:,} in {format_count(self.rows, 'row')}{each}"
            )
        if self.batch_size == 1 and self.rows % self.count and not self.drop_remainder:
            raise UsageError(
                f"shard: {self.rows:,} rows in batches of 1 give {self.count:,} workers unequal numbers of steps; "
                "use remainder='drop' or a larger batch_size"
            )

    @property
    def steps(self) -> int:
        """Batches of an epoch, the same for every worker."""
        if self.drop_remainder:
            return self.rows // self.count // self.batch_size
        largest = -(-self.rows // self.count)
        return -(-largest // self.batch_size)

    def select(self, selection: range | np.ndarray, *, shuffle: bool) -> range | np.ndarray:
        """Return the rows that blocks are to be made of: with `shuffle` all of them, else this worker's run."""
        if self.count == 1 or shuffle:
            return selection
        blocks = Blocks(selection, as_grid(self.chunks).coarser(_GRID))
        order = np.arange(blocks.count)
        cuts = self._cut(blocks, order, np.cumsum(blocks.sizes(order)))
        return selection[cuts[self.index] : cuts[self.index + 1]]

    def plan_for(self, selection: range | np.ndarray) -> range | np.ndarray:
        """Return the rows that memory is to be planned for: in every worker the same, since blocks depend on it."""
        if self.count == 1 or not isinstance(selection, range):
            return selection
        return range(min(self.rows, self._most))

    def deal(self, blocks: Blocks, seed: int) -> Blocks | ShardBlocks:
        """Return the blocks of this worker, dealt out at random. `seed` is the same in every worker."""
        if self.count == 1:
            return blocks
        order = np.arange(blocks.count)
        np.random.default_rng([seed, _DEAL]).shuffle(order)
        ends = np.cumsum(blocks.sizes(np.arange(blocks.count))[order])
        cuts = self._cut(blocks, order, ends)
        return ShardBlocks.between(blocks, order, ends, cuts[self.index], cuts[self.index + 1])

    def bounds(self, place: int, rows: int) -> tuple[int, int]:
        """Return the start and stop of batch `place` among this worker's `rows` rows.

        A shard that is one row short of its last batch takes that row from the batch before.
        """
        start, stop = place * self.batch_size, min((place + 1) * self.batch_size, rows)
        if rows <= (self.steps - 1) * self.batch_size and place >= self.steps - 2:
            return (start, rows - 1) if place == self.steps - 2 else (rows - 1, rows)
        return start, stop

    @property
    def _most(self) -> int:
        """Rows that a shard may have for all to have equally many batches, or, of full ones, about as many rows."""
        return -(-self.rows // self.count) + self.batch_size if self.drop_remainder else self.steps * self.batch_size

    @property
    def _least(self) -> int:
        """Rows that a shard must have for the same."""
        if self.drop_remainder:
            return self.steps * self.batch_size
        return min((self.steps - 1) * self.batch_size + 1, self.rows // self.count)

    def _cut(self, blocks: Blocks, order: np.ndarray, ends: np.ndarray) -> list[int]:
        """Return the `count` + 1 borders of the shards, in rows along `order`."""
        ends = np.r_[0, ends]
        least, most = self._least, self._most
        cuts = [0]
        for done in range(1, self.count):
            left = self.count - done
            low = max(cuts[-1] + least, self.rows - left * most)
            high = min(cuts[-1] + most, self.rows - left * least)
            target = min(max(self.rows * done // self.count, low), high)
            at = int(np.searchsorted(ends, target, side="right")) - 1
            chunks = as_grid(self.chunks).cell(blocks.rows(order[at : at + 1]))
            borders = ends[at] + np.r_[0, np.flatnonzero(chunks[1:] != chunks[:-1]) + 1, len(chunks)]
            borders = borders[(borders >= low) & (borders <= high)]
            cuts.append(int(borders[np.abs(borders - target).argmin()]) if borders.size else target)
        return [*cuts, self.rows]
