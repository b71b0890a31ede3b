"""Derive block and window sizes from a memory budget. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kerasmem.devices.host import usable_cores
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.columns import Column
from kerasmem.hdf5.format.layout import DatasetLayout, Grid, shown
from kerasmem.hdf5.rows.delivery import PIECE_BYTES, PIECE_VALUES, SCATTER_BYTES
from kerasmem.streaming.order import Blocks
from kerasmem.units import GIB, KIB, MIB, format_size

DEFAULT_BUDGET = 256 * MIB
KERAS_BATCHES = 4  # being built, two in TensorFlow's prefetch, being trained on
_BLOCK_BYTES = MIB  # what is worth reading in one go
_MIX = 128  # blocks a window should have at least, to shuffle well a file sorted by class, where chunks allow it
_LEAST_BLOCK_BYTES = 4 * KIB  # a page: reading less costs as much
_PLACE_BYTES = 8  # a row's shuffled place in its window, and which row comes to a place
_QUEUE_SHARE = 8  # one part in so many of a budget is for batches, more where batches are large
_LEAST_AHEAD = 2  # batches, room for which is kept whether or not workers prepare any
_ORDER_BYTES = 24  # a block's number, its size and the sum of the sizes before it
_MOST_ORDER = 4 * GIB
_MOST_THREADS = 16  # that read and unpack
_WAITING_THREADS = 8  # that only read
_USUAL_THREADS = 4
_IN_ORDER_BYTES = 32 * MIB  # of a window in file order with nothing to unpack; larger ones gain nothing
_WINDOWS = 2  # the one being delivered, and the one being filled


@dataclass(frozen=True)
class MemoryPlan:
    """Block and window sizes, and the bytes they come to.

    Args:
        block_rows: rows read together.
        window_blocks: blocks shuffled together.
        window_rows: rows of a full window.
        windows: windows in memory at one time: the one being delivered, and the one being read.
        window_bytes: bytes of one window.
        batch_bytes: bytes of one batch.
        ahead: batches that workers may prepare ahead.
        queued_batches: batches that exist at one time, in queues and in Keras.
        scratch_bytes: buffers of all threads that read, unpack and convert.
        thread_bytes: what one of these threads needs.
        cache_bytes: by dataset, the bytes of those that are small enough to stay in memory, such as labels.
        total_bytes: all of it.
    """

    block_rows: int
    window_blocks: int
    window_rows: int
    windows: int
    window_bytes: int
    batch_bytes: int
    ahead: int
    queued_batches: int
    scratch_bytes: int
    thread_bytes: int
    cache_bytes: dict[str, int]
    total_bytes: int

    @property
    def threads(self) -> int:
        """Threads that read: one a core that this process may use, as far as their buffers are paid for.

        Where rows are read as they lie in the file, threads need no buffers and do little but wait for the disk, which
        is faster the more it is asked for at a time: then there are more.
        """
        if not self.thread_bytes:
            return min(max(usable_cores(), _WAITING_THREADS), _MOST_THREADS)
        return max(1, min(usable_cores(), self.scratch_bytes // self.thread_bytes, _MOST_THREADS))


def plan_memory(
    layouts: Sequence[DatasetLayout],
    columns: Sequence[Column],
    *,
    selection: range | np.ndarray,
    batch_size: int,
    ahead: int,
    workers: int,
    budget: int | None,
    ordered: bool = False,
    grid: Callable[[int], Grid] = Grid,
) -> MemoryPlan:
    """Return the largest windows that the budget holds.

    The windows, and with them the order of the rows, do not depend on `ahead` and `workers`: batches get a
    share of the budget of their own, and fewer are prepared ahead where it is not enough for more.

    Args:
        layouts: the datasets read, each once.
        columns: the arrays delivered, each once.
        selection: the rows used: a run, or a sorted array of row numbers.
        batch_size: rows a batch.
        ahead: the most batches to prepare ahead; 0 without workers.
        workers: threads or processes that prepare them, each busy with one.
        budget: bytes. None means 256 MiB for windows, with batches on top.
        ordered: the rows come in file order, so that large windows gain nothing.
        grid: returns the grid of blocks of so many rows at most.

    Raises:
        UsageError: If the budget is too small; the message names the smallest that works.
    """
    batches = _plan_batches(columns, min(batch_size, len(selection)), ahead, workers, budget)
    room = DEFAULT_BUDGET if budget is None else budget - batches.reserve
    row_bytes = sum(column.row_bytes for column in columns) + _PLACE_BYTES
    rows = _Rows(layouts, selection, ordered, row_bytes)
    smallest = []
    for block, cache in _candidates(rows, room):
        fullest = min(_fullest(selection, grid(block)), len(selection))
        thread = max(_thread_bytes(layout, columns, block, isinstance(selection, range)) for layout in layouts)
        fixed = sum(cache.values())
        # For many threads there is a small part of the budget, and for as many as most machines have a larger one.
        ample = max(thread, min(_MOST_THREADS * thread, room // 8), min(_USUAL_THREADS * thread, room // 4))
        for scratch in (ample, thread):
            windows = rows.windows(room - fixed - scratch, fullest, batches.each)
            if windows is not None:
                count, blocks, window_rows = windows
                return MemoryPlan(
                    block_rows=block,
                    window_blocks=blocks,
                    window_rows=window_rows,
                    windows=count,
                    window_bytes=window_rows * row_bytes,
                    batch_bytes=batches.each,
                    ahead=batches.ahead,
                    queued_batches=batches.queued,
                    scratch_bytes=scratch,
                    thread_bytes=thread,
                    cache_bytes=cache,
                    total_bytes=count * window_rows * row_bytes + scratch + fixed + batches.queued * batches.each,
                )
        needed = min(_WINDOWS * fullest, len(selection)) * row_bytes + thread + fixed
        with_batches = needed + (KERAS_BATCHES + _LEAST_AHEAD) * batches.each
        smallest.append(max(needed * _QUEUE_SHARE // (_QUEUE_SHARE - 1) + _QUEUE_SHARE, with_batches))
    raise UsageError(_refusal(layouts, budget or DEFAULT_BUDGET, min(smallest), batches.each))


@dataclass(frozen=True)
class _Batches:
    """The part of a budget that is for batches: bytes of each, how many ahead and in all, and the bytes kept free."""

    each: int
    ahead: int
    queued: int
    reserve: int


def _plan_batches(columns: Sequence[Column], batch_size: int, ahead: int, workers: int, budget: int | None) -> _Batches:
    each = batch_size * sum(column.row_bytes for column in columns)
    reserve = max((budget or 0) // _QUEUE_SHARE, (KERAS_BATCHES + _LEAST_AHEAD) * each)
    while budget is not None and ahead and (KERAS_BATCHES + ahead + min(workers, ahead)) * each > reserve:
        ahead -= 1
    return _Batches(each, ahead, KERAS_BATCHES + ahead + min(workers, ahead), reserve)


@dataclass(frozen=True)
class _Rows:
    """The rows that windows are planned for: of the arguments of `plan_memory`, and the bytes of a delivered row."""

    layouts: Sequence[DatasetLayout]
    selection: range | np.ndarray
    ordered: bool
    row_bytes: int

    @property
    def plain(self) -> bool:
        return all(is_plain(layout) for layout in self.layouts)

    def windows(self, space: int, fullest: int, batch_bytes: int) -> tuple[int, int, int] | None:
        """Return the number of windows that fit, and the blocks and rows of each; None if none fits."""
        count = len(self.selection)
        if count * self.row_bytes <= space:
            return 1, count, count  # there are never more blocks than rows
        if self.ordered and isinstance(self.selection, range) and self.plain:
            space = min(space, _WINDOWS * max(_IN_ORDER_BYTES, 2 * batch_bytes))
        blocks = max(space, 0) // (_WINDOWS * fullest * self.row_bytes)
        return (_WINDOWS, blocks, min(blocks * fullest, count)) if blocks else None


def is_plain(layout: DatasetLayout) -> bool:
    """Return whether reading a part of the data costs no more than that part: there is nothing to unpack."""
    whole_rows = layout.chunks is None or layout.chunks[1:] == layout.row_shape
    return layout.storage in ("contiguous", "chunked") and not layout.filters and whole_rows


def _chunk_bytes(layout: DatasetLayout) -> int:
    """Return the bytes of a whole chunk, or 0 without chunks."""
    if not layout.chunks:
        return 0
    return prod(layout.chunks) * prod(layout.row_shape[len(layout.chunks) - 1 :]) * np.dtype(layout.dtype).itemsize


def _thread_bytes(layout: DatasetLayout, columns: Sequence[Column], block: int, dense: bool) -> int:
    """Return the buffer bytes of a thread that reads this dataset."""
    used = [column for column in columns if column.name == layout.name]
    row = max(layout.row_bytes, 1)
    piece = min(max(PIECE_BYTES, row), block * row)
    chunk = _chunk_bytes(layout)
    if layout.filters:
        needed = 3 * chunk + chunk // 8  # as stored, decoded, and its bytes put together
    elif not is_plain(layout):
        needed = max(chunk, piece)
    elif dense and row >= SCATTER_BYTES and len(used) == 1 and not used[0].converts:
        return 0
    else:
        needed = piece
    values = min(max(PIECE_VALUES, 1), block * row // np.dtype(layout.dtype).itemsize)
    for column in used:
        if column.converts:
            needed += values * (np.dtype(column.dtype).itemsize + (8 if column.offset else 0))
    return needed


def check_order(blocks: int, batches: int) -> None:
    """Refuse data of so many blocks that their mere order is too much to remember.

    Raises:
        DataError: If the order would take more than 4 GiB.
    """
    needed = blocks * _ORDER_BYTES + batches * _PLACE_BYTES
    if needed > _MOST_ORDER:
        raise DataError(
            f"remembering the order of {blocks:,} blocks and {batches:,} batches would take {format_size(needed)} "
            f"of memory, and {format_size(_MOST_ORDER)} is the most allowed; use fewer rows with `rows`, a "
            "larger batch_size, or larger chunks"
        )


def _fullest(selection: range | np.ndarray, grid: Grid) -> int:
    """Return the most selected rows that any block has."""
    if isinstance(selection, range):
        return grid.largest
    blocks = Blocks(selection, grid)
    return int(blocks.sizes(np.arange(blocks.count)).max())


def _candidates(rows: _Rows, room: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield pairs of a block size and of the datasets that stay in memory whole, best first.

    Best are blocks that hold the chunks of every heavy dataset, with the light ones kept in memory; then
    blocks for the heaviest dataset alone; then the same with nothing kept.
    """
    layouts = rows.layouts
    heaviest = max(layouts, key=lambda d: d.row_bytes).chunk_rows
    light = _caches(layouts, max(room, 0) // 8)
    aligned = heaviest
    for layout in layouts:
        if layout.name not in light and layout.chunk_rows > aligned:
            aligned = -(-layout.chunk_rows // heaviest) * heaviest
    stored_row = max(sum(layout.row_bytes for layout in layouts), 1)
    target = max(min(_BLOCK_BYTES // stored_row, room // (_MIX * _WINDOWS * rows.row_bytes)), 1)  # rows of a block
    for unit, cache in ((aligned, light), (heaviest, light), (heaviest, {})):
        if rows.plain and not rows.ordered:
            # A part of a chunk costs no more than that part, so small blocks are free, and mix better.
            unit = min(unit, max(target, _LEAST_BLOCK_BYTES // stored_row))
        yield unit * max(1, target // unit), cache
        yield unit, cache


def _caches(layouts: Sequence[DatasetLayout], limit: int) -> dict[str, int]:
    """Return the datasets small enough to stay in memory whole, such as labels."""
    heaviest = max(layouts, key=lambda d: d.row_bytes)
    sizes = {d.name: d.rows * d.row_bytes for d in layouts if d is not heaviest}
    chosen: dict[str, int] = {}
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        size += size // 64 + KIB  # which parts are there
        if sum(chosen.values()) + size <= limit:
            chosen[name] = size
    return chosen


def _refusal(layouts: Sequence[DatasetLayout], given: int, smallest: int, batch_bytes: int) -> str:
    heaviest = max(layouts, key=lambda layout: (_chunk_bytes(layout), layout.row_bytes))
    why = f"windows of rows and {KERAS_BATCHES + _LEAST_AHEAD} batches of {format_size(batch_bytes)}"
    if heaviest.chunks is not None:
        chunk = format_size(_chunk_bytes(heaviest))
        why += f", with chunks of {heaviest.chunks[0]:,} rows ({chunk}) in {shown(heaviest.name)}"
    size = f"{-(-smallest // MIB)}MiB" if smallest >= 8 * MIB else f"{-(-smallest // KIB)}KiB"
    return (
        f"memory_budget: {format_size(given)} is too small for {why}; the smallest that works is {size!r} "
        "(larger shuffles better); a smaller batch_size needs less"
    )
