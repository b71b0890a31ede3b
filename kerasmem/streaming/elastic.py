"""One order for any number of workers: the batches of all of them together depend on seed, epoch and position alone.

The rows of an epoch are dealt to *lanes*, block by block, in another way each epoch. A lane delivers its rows window
by window, shuffled within each. A batch of all workers together is made of equally many rows of every lane, one lane
after the other, and a worker takes its part of it: the rows of some lanes. Where the number of workers divides that
of lanes, no lane is read by two.

A window of a lane ends where a block does, so that no block is read twice for it. What it holds beyond its last batch
comes with the first batches of the next window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.grid import ranges
from kerasmem.streaming.budget import MemoryPlan
from kerasmem.streaming.order import BLOCKS, ROWS, Blocks, EpochOrder, Segment, ShardBlocks, cut_run, deal

LANES = 24  # by default: 1, 2, 3, 4, 6, 8, 12 and 24 workers read nothing twice
_NOT_MINE = np.iinfo(np.int64).max
_KEPT = 3  # windows whose order is remembered: one is delivered, one filled, one asked for beside


_DeliveredRuns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Runs of delivered rows that lie one after another: the first of each, the one after its last, where it begins."""


@dataclass(frozen=True)
class GlobalBatches:
    """Which rows of every batch are this worker's.

    Args:
        index: this worker.
        count: all workers.
        rows: rows of an epoch, of all workers.
        batch_size: rows of a batch, of all workers.
        drop_remainder: whether only full batches are delivered.
        lanes: how many there are.
        window_batches: batches of a window.
        may_be_empty: whether a worker may have no row of the last batch, as where it is filled up.
    """

    index: int
    count: int
    rows: int
    batch_size: int
    drop_remainder: bool
    lanes: int = 1
    window_batches: int = 1
    may_be_empty: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < self.count:
            raise UsageError(
                f"batch_size: with elastic=True it is that of all workers together, and {self.batch_size:,} rows give "
                f"{self.count:,} workers none each; take {self.count:,} or more"
            )
        if not self.steps:
            raise UsageError(f"drop_remainder: {self.rows:,} rows make no full batch of {self.batch_size:,}")
        if 0 < self.remainder < self.count and not self.may_be_empty:
            raise UsageError(
                f"elastic: the last batch of {self.rows:,} rows has {self.remainder:,}, too few for {self.count:,} "
                "workers; leave it out with drop_remainder=True, or fill it with pad_remainder=True"
            )

    @property
    def full(self) -> int:
        """Full batches of an epoch."""
        return self.rows // self.batch_size

    @property
    def remainder(self) -> int:
        """Rows of the last batch, where it is not full and not left out."""
        return 0 if self.drop_remainder else self.rows % self.batch_size

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return self.full + (self.remainder > 0)

    @property
    def windows(self) -> int:
        """Windows of an epoch."""
        return -(-self.steps // self.window_batches)

    @property
    def batch_rows(self) -> int:
        """Rows of a full batch that are this worker's."""
        return self._mine(self.batch_size)

    @property
    def own_rows(self) -> int:
        """Rows of an epoch that are this worker's."""
        return self.full * self.batch_rows + self._mine(self.remainder)

    @cached_property
    def own_lanes(self) -> range:
        """The lanes in which rows of this worker lie."""
        return range(self.index * self.lanes // self.count, -(-(self.index + 1) * self.lanes // self.count))

    @cached_property
    def cuts(self) -> np.ndarray:
        """The rows, counted through all lanes, between which the lanes lie."""
        return np.array([self.full * full + last for full, last in zip(*self._edges, strict=True)])

    def bounds(self, place: int, rows: int) -> tuple[int, int]:
        """Return which of this worker's `rows` rows, start and stop, are its part of batch `place`."""
        return place * self.batch_rows, min((place + 1) * self.batch_rows, rows)

    def lane_rows(self, lane: int) -> int:
        """Return how many rows a full batch has of a lane."""
        full, _ = self._edges
        return full[lane + 1] - full[lane]

    def numbers(self, lane: int, places: np.ndarray) -> np.ndarray:
        """Return as which of this worker's rows those at some places of a lane are delivered; a huge number if not."""
        each = self.lane_rows(lane)
        batch = np.minimum(places // max(each, 1), self.full)
        offset = places - batch * each
        found = np.full(len(places), _NOT_MINE)
        for some, size, edges in ((batch < self.full, self.batch_size, 0), (batch == self.full, self.remainder, 1)):
            first, start, stop = self._edges[edges][lane], size * self.index // self.count, self._stop(size)
            mine = some & (offset >= start - first) & (offset < stop - first)
            found[mine] = batch[mine] * self.batch_rows + first + offset[mine] - start
        return found

    @cached_property
    def _edges(self) -> tuple[list[int], list[int]]:
        """Where in a full batch, and in the last one, each lane begins."""
        lanes = range(self.lanes + 1)
        return (
            [self.batch_size * lane // self.lanes for lane in lanes],
            [self.remainder * lane // self.lanes for lane in lanes],
        )

    def _mine(self, rows: int) -> int:
        return self._stop(rows) - rows * self.index // self.count

    def _stop(self, rows: int) -> int:
        return rows * (self.index + 1) // self.count


def plan_lanes(whole: GlobalBatches, memory: MemoryPlan, most: int) -> GlobalBatches:
    """Return the batches with as many lanes as there is room for, a divisor of `most`; in every worker the same.

    Args:
        whole: the batches.
        memory: planned for all rows.
        most: lanes asked for.

    Raises:
        UsageError: there is no room even for one.
    """
    fullest = memory.window_rows // memory.window_blocks if memory.windows > 1 else 0
    for lanes in (lanes for lanes in range(min(most, whole.batch_size), 0, -1) if most % lanes == 0):
        batches = (memory.window_rows - lanes * fullest) // whole.batch_size if fullest else whole.steps
        if batches >= 1 and batches * (whole.batch_size // lanes) >= fullest:
            return replace(whole, lanes=lanes, window_batches=batches)
    raise UsageError(
        f"memory_budget: windows of {memory.window_rows:,} rows are too small for elastic=True with batches of "
        f"{whole.batch_size:,} and blocks of {fullest:,} rows; give two or three times as much"
    )


def own_memory(memory: MemoryPlan, share: GlobalBatches) -> MemoryPlan:
    """Return what of a plan for all lanes a worker needs for its own."""
    lanes, mine = share.own_lanes, share.batch_rows
    if len(lanes) == share.lanes and mine == share.batch_size:
        return memory
    fullest = memory.window_rows // memory.window_blocks if memory.windows > 1 else 0
    held = [
        min(share.window_batches * share.lane_rows(lane) + fullest, int(share.cuts[lane + 1] - share.cuts[lane]))
        for lane in lanes
    ]
    rows = min(sum(held), memory.window_rows)
    window, batch = rows * memory.window_bytes // memory.window_rows, -(-memory.batch_bytes * mine // share.batch_size)
    saved = memory.windows * (memory.window_bytes - window) + memory.queued_batches * (memory.batch_bytes - batch)
    return replace(
        memory, window_rows=rows, window_bytes=window, batch_bytes=batch, total_bytes=memory.total_bytes - saved
    )


class ElasticOrder(EpochOrder):
    """The order of one epoch for one worker.

    Args:
        share: which rows are its own.
        whole: the blocks of all workers.
        seed: seed of the shuffle, or None for file order.
        epoch: number of the epoch.
    """

    blocks: ShardBlocks

    def __init__(self, share: GlobalBatches, whole: Blocks, seed: int | None, epoch: int) -> None:
        self.seed, self.epoch = seed, epoch
        self.windows = share.windows
        self._share = share
        self._lanes = share.own_lanes
        order = self._deal(whole.count)
        ends = np.cumsum(whole.sizes(np.arange(whole.count))[order])
        cuts = share.cuts.tolist()
        pieces = [cut_run(order, ends, cuts[lane], cuts[lane + 1]) for lane in self._lanes]
        self.blocks = ShardBlocks(whole, *(np.concatenate(arrays) for arrays in zip(*pieces, strict=True)))
        self._firsts, self._rows = self._borders([high - low for _, low, high in pieces])
        self._known: tuple[tuple[int, np.ndarray, _DeliveredRuns], ...] = ()

    @property
    def total(self) -> int:
        """Rows delivered in the epoch."""
        return self._share.own_rows

    def key(self, window: int) -> tuple[int, int]:
        """Return what identifies a window's contents: equal keys hold equal rows, whatever the epoch."""
        share = self._share
        everything = self.windows == 1 and len(self._lanes) == share.lanes and share.cuts[-1] == share.rows
        return (-1 if everything or self.seed is None else self.epoch, window)

    def window_rows(self, window: int) -> int:
        """Return how many rows a window holds, those of a lane that are another worker's too."""
        return int((self._rows[:, window + 1] - self._rows[:, window]).sum())

    def window_order(self, window: int) -> np.ndarray:
        """Return the blocks of a window in the order they are read into it, that of the file."""
        blocks = np.concatenate([np.arange(*run) for run in self._runs(window)])
        return blocks[np.argsort(self.blocks.numbers[blocks], kind="stable")]

    def places(self, segment: Segment) -> np.ndarray:
        """Return where in the window's buffer the rows of a segment lie."""
        return self._order_of(segment.window)[0][segment.start : segment.stop]

    def straight_to(self, segment: Segment) -> int:
        """Return up to which delivered row those of a segment's window follow one another."""
        _, after, at = self._order_of(segment.window)[1]
        return int(after[np.searchsorted(at, segment.start, side="right") - 1])

    def due_next(self, segments: list[Segment]) -> int:
        """Return the window to be read when these rows were delivered: the oldest may be needed for further batches."""
        return min(segment.window for segment in segments) + 1

    def segments(self, start: int, stop: int) -> list[Segment]:
        """Return the windows that delivered rows `start` to `stop` of the epoch come from."""
        share, found = self._share, {}
        last = share.steps - 1
        earliest, until = (min(row // share.batch_rows, last) // share.window_batches for row in (start, stop - 1))
        for window in range(max(earliest - 1, 0), until + 1):
            first, after, at = self._order_of(window)[1]
            some = slice(int(np.searchsorted(after, start, side="right")), int(np.searchsorted(first, stop)))
            for number, beyond, place in zip(
                first[some].tolist(), after[some].tolist(), at[some].tolist(), strict=True
            ):
                low, high = max(number, start), min(beyond, stop)
                found[low] = Segment(window, place + low - number, place + high - number)
        return [found[low] for low in sorted(found)]

    def _deal(self, count: int) -> np.ndarray:
        groups = self._share.lanes * self.windows
        if self.seed is None or groups == 1:
            return np.arange(count)
        return deal(count, groups, self._random(BLOCKS))[0]

    def _borders(self, sizes: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return for each lane with which block each window begins, and how many rows of the lane come before it."""
        share = self._share
        firsts, rows, before = [], [], 0
        for lane, some in zip(self._lanes, sizes, strict=True):
            ends = np.r_[0, np.cumsum(some)]
            wanted = np.arange(self.windows + 1) * share.window_batches * share.lane_rows(lane)
            wanted[-1] = ends[-1]
            at = np.searchsorted(ends, np.minimum(wanted, ends[-1]))
            firsts.append(before + at)
            rows.append(ends[at])
            before += len(some)
        return np.array(firsts), np.array(rows)

    def _runs(self, window: int) -> list[tuple[int, int]]:
        return [(int(firsts[window]), int(firsts[window + 1])) for firsts in self._firsts]

    def _order_of(self, window: int) -> tuple[np.ndarray, _DeliveredRuns]:
        """Return where the rows of a window lie in its buffer, in the order delivered, and as which rows they are.

        Those that another worker delivers come last.
        """
        for known, order, order_runs in self._known:
            if known == window:
                return order, order_runs
        runs = self._runs(window)
        blocks = np.concatenate([np.arange(*run) for run in runs])
        read = np.argsort(self.blocks.numbers[blocks], kind="stable")
        sizes = self.blocks.sizes(blocks)
        begins = np.empty_like(sizes)
        begins[read] = np.cumsum(sizes[read]) - sizes[read]
        held, pieces, done, count = [], [], 0, 0
        for lane, (start, stop), rows in zip(self._lanes, runs, self._rows, strict=True):
            some = slice(done, done + stop - start)
            places = ranges(begins[some], sizes[some]).astype(np.int32)
            if self.seed is not None:
                self._random(ROWS, window, lane).shuffle(places)
            held.append(places)
            numbers = self._share.numbers(lane, rows[window] + np.arange(len(places)))
            steps = np.diff(numbers, prepend=_NOT_MINE - 2)  # 0 between rows that are not this worker's
            breaks = np.flatnonzero((steps != 1) & (steps != 0))
            pieces.append((numbers[breaks], breaks + count, np.diff(breaks, append=len(places))))
            done, count = some.stop, count + len(places)
        first, begin, length = (np.concatenate(each) for each in zip(*pieces, strict=True))
        rising = np.argsort(first, kind="stable")
        first, length = first[rising], length[rising]
        delivered = np.concatenate(held)[ranges(begin[rising], length)]
        mine = first < _NOT_MINE
        first, after, at = first[mine], first[mine] + length[mine], (np.cumsum(length) - length)[mine]
        begins, ends = first != np.r_[-1, after[:-1]], after != np.r_[first[1:], -1]
        delivered_runs = first[begins], after[ends], at[begins]
        self._known = (
            *self._known[1 - _KEPT :],
            (window, delivered, delivered_runs),
        )  # replaced whole: threads read it
        return delivered, delivered_runs
