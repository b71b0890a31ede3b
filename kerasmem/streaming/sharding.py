"""Divide rows among workers into disjoint shards with equal numbers of batches. Pure arithmetic.

Shards consist of whole blocks and are the same in every epoch, so a worker's part of the file stays in the page cache
of its machine, or in its windows if it fits. If rows are shuffled, the seed assigns blocks to shards at random; in file
order each shard is one run of rows.
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

_DEAL = 2  # random stream of the seed, the same in every epoch
_GRID = 4096  # rows


def read_shard(shard: Any) -> tuple[int, int]:
    """Return `shard` as (index, count), (0, 1) for all rows.

    Raises:
        UsageError: If it is not None, "auto" or an index below a count.
    """
    if shard is None:
        return 0, 1
    if isinstance(shard, str) and shard == "auto":
        rank, size = find_shard()
        return rank, size
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise UsageError(f"shard must be (index, count), such as (0, 4), or 'auto'; got {shard!r}")
    index, count = checks.whole("shard index", shard[0], 0), checks.whole("shard count", shard[1], 1)
    if index >= count:
        raise UsageError(f"shard index must be below the count of {count}; got {index}")
    return index, count


@dataclass(frozen=True)
class Share:
    """The part of the selected rows for one worker.

    Args:
        index: number of the worker.
        count: number of workers.
        rows: number of rows of all workers.
        batch_size: rows per batch.
        drop_remainder: whether only full batches are delivered.
        chunks: rows per chunk, or the grid of chunks. Shards end between two chunks if all shards then have the same
            number of batches, and else within a chunk, which both neighbors read.

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
                f"shard: {format_count(self.rows, 'row')} cannot be divided among {self.count:,} workers; use fewer"
            )
        if not self.steps:
            per_worker = f" for each of {self.count:,} workers" if self.count > 1 else ""
            raise UsageError(
                f"remainder: no full batch of {self.batch_size:,} in {format_count(self.rows, 'row')}{per_worker}"
            )
        if self.batch_size == 1 and self.rows % self.count and not self.drop_remainder:
            raise UsageError(
                f"shard: {self.rows:,} rows in batches of 1 give {self.count:,} workers unequal numbers of steps; "
                "use remainder='drop' or a larger batch_size"
            )

    @property
    def steps(self) -> int:
        """Number of batches in an epoch, the same for every worker."""
        if self.drop_remainder:
            return self.rows // self.count // self.batch_size
        largest = -(-self.rows // self.count)
        return -(-largest // self.batch_size)

    def select(self, selection: range | np.ndarray, *, shuffle: bool) -> range | np.ndarray:
        """Return the rows to cut into blocks: all of them with `shuffle`, else this worker's run."""
        if self.count == 1 or shuffle:
            return selection
        blocks = Blocks(selection, as_grid(self.chunks).coarser(_GRID))
        order = np.arange(blocks.count)
        cuts = self._cut(blocks, order, np.cumsum(blocks.sizes(order)))
        return selection[cuts[self.index] : cuts[self.index + 1]]

    def plan_for(self, selection: range | np.ndarray) -> range | np.ndarray:
        """Return the rows to plan memory for. They are the same in every worker, because block sizes depend on them."""
        if self.count == 1 or not isinstance(selection, range):
            return selection
        return range(min(self.rows, self._most))

    def deal(self, blocks: Blocks, seed: int) -> Blocks | ShardBlocks:
        """Return the blocks that are assigned to this worker at random. `seed` is the same in every worker."""
        if self.count == 1:
            return blocks
        order = np.arange(blocks.count)
        np.random.default_rng([seed, _DEAL]).shuffle(order)
        ends = np.cumsum(blocks.sizes(np.arange(blocks.count))[order])
        cuts = self._cut(blocks, order, ends)
        return ShardBlocks.between(blocks, order, ends, cuts[self.index], cuts[self.index + 1])

    def bounds(self, batch: int, rows: int) -> tuple[int, int]:
        """Return start and stop of a batch among this worker's `rows` rows.

        If the shard has no row for its last batch, that batch takes one from the batch before.
        """
        start, stop = batch * self.batch_size, min((batch + 1) * self.batch_size, rows)
        if rows <= (self.steps - 1) * self.batch_size and batch >= self.steps - 2:
            return (start, rows - 1) if batch == self.steps - 2 else (rows - 1, rows)
        return start, stop

    @property
    def _most(self) -> int:
        """Largest size of a shard. Full batches leave some rows over, so these shards need only be of similar size."""
        return -(-self.rows // self.count) + self.batch_size if self.drop_remainder else self.steps * self.batch_size

    @property
    def _least(self) -> int:
        """Smallest size of a shard with `steps` batches."""
        if self.drop_remainder:
            return self.steps * self.batch_size
        return min((self.steps - 1) * self.batch_size + 1, self.rows // self.count)

    def _cut(self, blocks: Blocks, order: np.ndarray, ends: np.ndarray) -> list[int]:
        """Return the `count` + 1 borders of the shards among the rows along `order`."""
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
