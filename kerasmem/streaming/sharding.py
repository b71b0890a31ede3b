"""Which rows belong to which worker: disjoint shards with equal numbers of batches.

All is pure arithmetic, but for `find_shard`, which looks around for the distribution in force.

Shards are made of whole blocks and are the same in every epoch, so a worker's part of the file stays in the
page cache of its machine, and in its windows where it fits. With shuffling the blocks are dealt out at random
by the seed; in file order each shard is one run of rows.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.grid import Grid, as_grid
from kerasmem.hdf5.settings import read_whole
from kerasmem.streaming.order import Blocks

_DEAL = 2  # which of a seed's random streams; with no epoch in it
_GRID = 4096  # rows
_TRAINING_TASKS = ("chief", "master", "worker")  # in the order in which TensorFlow counts them


def read_shard(shard: Any) -> tuple[int, int]:
    """Return (index, count) for what the user gave as `shard`; (0, 1) means everything.

    Raises:
        UsageError: it is neither None, "auto" nor two whole numbers of which the first is the smaller.
    """
    if shard is None:
        return 0, 1
    if isinstance(shard, str) and shard == "auto":
        return find_shard()
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise UsageError(f"shard: {shard!r} is neither (index, count), such as (0, 4), nor 'auto'")
    index, count = read_whole("shard index", shard[0], 0), read_whole("shard count", shard[1], 1)
    if index >= count:
        raise UsageError(f"shard: index {index} does not exist among {count}; they are 0 to {count - 1}")
    return index, count


def find_shard() -> tuple[int, int]:
    """Return this process's (index, count) in the distribution in force; (0, 1) where there is none.

    Looked at are, in this order, the `tf.distribute` strategy whose scope is open, the distribution set with
    `keras.distribution.set_distribution`, and the environment's `TF_CONFIG`.

    Raises:
        UsageError: `TF_CONFIG` cannot be understood, or Keras would share out the rows once more.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.distribute.has_strategy():
        resolver = getattr(tensorflow.distribute.get_strategy(), "cluster_resolver", None)
        if resolver is None or resolver.task_type is None:
            return 0, 1
        return place_in_cluster(resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id)
    keras = sys.modules.get("keras")
    distribution = None if keras is None else keras.distribution.distribution()
    if distribution is not None:
        processes = getattr(distribution, "num_processes", 1)
        if processes > 1 and getattr(distribution, "auto_shard_dataset", False):
            raise UsageError(
                "shard: with auto_shard_dataset, Keras shares out the rows itself, and takes a tf.data.Dataset only; "
                "make the distribution with auto_shard_dataset=False, or set keras.distribution.distribution()"
                ".auto_shard_dataset = False, and let shard='auto' share them out"
            )
        if processes > 1:
            return distribution.data_shard_id, min(processes, distribution.num_model_replicas)
        return 0, 1
    text = os.environ.get("TF_CONFIG", "").strip()
    if not text:
        return 0, 1
    try:
        config = json.loads(text)
        task = config.get("task", {})
        return place_in_cluster(config.get("cluster", {}), task.get("type", "worker"), int(task.get("index", 0)))
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"shard: 'auto' reads the environment's TF_CONFIG, which cannot be understood ({error}); "
            "mend it or give shard=(index, count)"
        ) from error


def place_in_cluster(cluster: Mapping[str, Any], task_type: str, task_index: int) -> tuple[int, int]:
    """Return (index, count) of a task among the tasks that train; evaluators and the like see everything.

    Args:
        cluster: the tasks of each type, such as {"chief": ["a:1"], "worker": ["b:1", "c:1"]}.
        task_type: this task's type.
        task_index: its number within the type.

    Example:
        >>> place_in_cluster({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker", 1)
        (2, 3)
    """
    before = count = 0
    for kind in _TRAINING_TASKS:
        if kind == task_type:
            before = count
        count += len(cluster.get(kind, ()))
    if task_type not in _TRAINING_TASKS or not count:
        return 0, 1
    return before + task_index, count


@dataclass(frozen=True)
class Share:
    """How the selected rows are shared out, and which part is this worker's.

    Args:
        index: this worker.
        count: all workers; 1 where nothing is shared out.
        rows: the rows of all workers.
        batch_size: rows a batch.
        drop_remainder: whether only full batches are delivered.
        chunks: rows of a chunk, or the grid of chunks. The border between two shards lies between two chunks where
            that leaves both with the same number of batches, and else within a chunk, which both then read.

    Raises:
        UsageError: there are not enough rows.
    """

    index: int
    count: int
    rows: int
    batch_size: int
    drop_remainder: bool
    chunks: Grid | int = 1

    def __post_init__(self) -> None:
        if self.rows < self.count:
            raise UsageError(f"shard: {self.rows:,} rows cannot be shared out among {self.count:,} workers; use fewer")
        if not self.steps:
            each = f" for each of {self.count:,} workers" if self.count > 1 else ""
            raise UsageError(f"drop_remainder: {self.rows:,} rows make no full batch of {self.batch_size:,}{each}")
        if self.batch_size == 1 and self.rows % self.count and not self.drop_remainder:
            raise UsageError(
                f"shard: {self.rows:,} rows in batches of 1 give {self.count:,} workers unequal numbers of steps; "
                "use drop_remainder=True or a larger batch_size"
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
        cuts = self._cut(blocks, np.arange(blocks.count))
        return selection[cuts[self.index] : cuts[self.index + 1]]

    def plan_for(self, selection: range | np.ndarray) -> range | np.ndarray:
        """Return the rows that memory is to be planned for: in every worker the same, since blocks depend on it."""
        if self.count == 1 or not isinstance(selection, range):
            return selection
        return range(min(self.rows, self._most))

    def deal(self, blocks: Blocks, seed: int) -> Blocks | ShardBlocks:
        """Return the blocks of this worker, dealt out at random; `seed` is the same in every worker."""
        if self.count == 1:
            return blocks
        order = np.arange(blocks.count)
        np.random.default_rng([seed, _DEAL]).shuffle(order)
        cuts = self._cut(blocks, order)
        return ShardBlocks(blocks, order, cuts[self.index], cuts[self.index + 1])

    def bounds(self, place: int, rows: int) -> tuple[int, int]:
        """Return which of this worker's `rows` rows, start and stop, make up batch `place`.

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

    def _cut(self, blocks: Blocks, order: np.ndarray) -> list[int]:
        """Return the `count` + 1 rows, counted along `order`, between which the shards lie."""
        ends = np.r_[0, np.cumsum(blocks.sizes(order))]
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
