"""Derive block and window sizes from a memory budget. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kerasmem.devices.host import usable_cores
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.columns import Column
from kerasmem.hdf5.format.layout import DatasetLayout, Grid, quote
from kerasmem.hdf5.rows.delivery import PIECE_BYTES, PIECE_VALUES, SCATTER_BYTES
from kerasmem.streaming.order import Blocks
from kerasmem.units import GIB, KIB, MIB, format_size

DEFAULT_BUDGET = 256 * MIB
KERAS_BATCHES = 4  # one being built, two in TensorFlow's prefetch queue, one being trained on
_BLOCK_BYTES = MIB  # target for one read
_MIX = 128  # desired blocks per window, if chunks allow it, to shuffle a file sorted by class well
_LEAST_BLOCK_BYTES = 4 * KIB  # a page; reading less costs as much
_SLOT_BYTES = 8  # per row: its shuffled index in the window, and the inverse
_QUEUE_SHARE = 8  # batches get 1/8 of the budget, or more if they are large
_LEAST_AHEAD = 2  # batches that the budget always includes, even without workers
_ORDER_BYTES = 24  # per block: its number, its size and the sum of the sizes before it
_MOST_ORDER = 4 * GIB
_MOST_THREADS = 16  # that read and decode
_WAITING_THREADS = 8  # that only read
_USUAL_THREADS = 4
_IN_ORDER_BYTES = 32 * MIB  # of a window in file order with nothing to decode; larger ones gain nothing
_WINDOWS = 2  # the current one, and the one being loaded


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of blocks, windows and buffers.

    Args:
        block_rows: rows read together.
        window_blocks: blocks shuffled together.
        window_rows: rows of a full window.
        windows: number of windows in memory: the current one and the one being loaded.
        window_bytes: bytes of one window.
        batch_bytes: bytes of one batch.
        ahead: number of batches that workers may prepare ahead.
        queued_batches: number of batches in queues and in Keras.
        scratch_bytes: bytes of the buffers of all threads that read, decode and convert.
        thread_bytes: bytes of the buffers of one thread.
        cache_bytes: bytes by dataset, for those that are small enough to stay in memory, such as labels.
        total_bytes: sum of all bytes.
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
        """Number of threads that read: one per usable core, as far as the budget includes their buffers.

        If rows are read as stored, threads need no buffers and mostly wait for the disk. There are more then,
        because disks are faster with more parallel requests.
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
    """Plan the largest windows that the budget allows.

    The sizes of windows, and so the order of the rows, do not depend on `ahead` and `workers`: batches have their own
    part of the budget, and fewer are prepared ahead if it is too small.

    Args:
        layouts: layouts of the datasets to read, without duplicates.
        columns: arrays to deliver, without duplicates.
        selection: the rows to use, a range or a sorted array of row numbers.
        batch_size: rows per batch.
        ahead: largest number of batches to prepare ahead; 0 without workers.
        workers: number of threads or processes that prepare batches, one at a time each.
        budget: bytes. None means 256 MiB for windows, with batches on top.
        ordered: whether rows are in file order, so that large windows gain nothing.
        grid: returns the grid of blocks with at most this many rows.

    Raises:
        UsageError: If the budget is too small. The message names the smallest that works.
    """
    batches = _plan_batches(columns, min(batch_size, len(selection)), ahead, workers, budget)
    space = DEFAULT_BUDGET if budget is None else budget - batches.reserve
    row_bytes = sum(column.row_bytes for column in columns) + _SLOT_BYTES
    rows = _Rows(layouts, selection, ordered, row_bytes)
    smallest = []
    for block, cache in _candidates(rows, space):
        fullest = min(_fullest(selection, grid(block)), len(selection))
        thread = max(_thread_bytes(layout, columns, block, isinstance(selection, range)) for layout in layouts)
        fixed = sum(cache.values())
        # Buffers of 16 threads if 1/8 of the budget is enough for them, or of 4 threads if 1/4 of it is.
        ample = max(thread, min(_MOST_THREADS * thread, space // 8), min(_USUAL_THREADS * thread, space // 4))
        for scratch in (ample, thread):
            windows = rows.windows(space - fixed - scratch, fullest, batches.batch_bytes)
            if windows is not None:
                count, blocks, window_rows = windows
                return MemoryPlan(
                    block_rows=block,
                    window_blocks=blocks,
                    window_rows=window_rows,
                    windows=count,
                    window_bytes=window_rows * row_bytes,
                    batch_bytes=batches.batch_bytes,
                    ahead=batches.ahead,
                    queued_batches=batches.queued,
                    scratch_bytes=scratch,
                    thread_bytes=thread,
                    cache_bytes=cache,
                    total_bytes=count * window_rows * row_bytes
                    + scratch
                    + fixed
                    + batches.queued * batches.batch_bytes,
                )
        needed = min(_WINDOWS * fullest, len(selection)) * row_bytes + thread + fixed
        with_batches = needed + (KERAS_BATCHES + _LEAST_AHEAD) * batches.batch_bytes
        smallest.append(max(needed * _QUEUE_SHARE // (_QUEUE_SHARE - 1) + _QUEUE_SHARE, with_batches))
    raise UsageError(_refusal(layouts, budget or DEFAULT_BUDGET, min(smallest), batches.batch_bytes))


@dataclass(frozen=True)
class _Batches:
    """Bytes of a batch, number of batches ahead and in memory, and the part of the budget for batches."""

    batch_bytes: int
    ahead: int
    queued: int
    reserve: int

    @property
    def total_bytes(self) -> int:
        return self.queued * self.batch_bytes


def _plan_batches(columns: Sequence[Column], batch_size: int, ahead: int, workers: int, budget: int | None) -> _Batches:
    batch_bytes = batch_size * sum(column.row_bytes for column in columns)
    reserve = max((budget or 0) // _QUEUE_SHARE, (KERAS_BATCHES + _LEAST_AHEAD) * batch_bytes)
    while budget is not None and ahead and (KERAS_BATCHES + ahead + min(workers, ahead)) * batch_bytes > reserve:
        ahead -= 1
    return _Batches(batch_bytes, ahead, KERAS_BATCHES + ahead + min(workers, ahead), reserve)


@dataclass(frozen=True)
class _Rows:
    """The rows to plan windows for: arguments of `plan_memory`, and the bytes of a row in a window."""

    layouts: Sequence[DatasetLayout]
    selection: range | np.ndarray
    ordered: bool
    row_bytes: int

    @property
    def plain(self) -> bool:
        return all(is_plain(layout) for layout in self.layouts)

    def windows(self, space: int, fullest: int, batch_bytes: int) -> tuple[int, int, int] | None:
        """Return the number of windows that fit, and the blocks and rows of each, or None."""
        count = len(self.selection)
        if count * self.row_bytes <= space:
            return 1, count, count  # there are never more blocks than rows
        if self.ordered and isinstance(self.selection, range) and self.plain:
            space = min(space, _WINDOWS * max(_IN_ORDER_BYTES, 2 * batch_bytes))
        blocks = max(space, 0) // (_WINDOWS * fullest * self.row_bytes)
        return (_WINDOWS, blocks, min(blocks * fullest, count)) if blocks else None


def is_plain(layout: DatasetLayout) -> bool:
    """Return whether a part of the data can be read without reading or decoding more."""
    whole_rows = layout.chunks is None or layout.chunks[1:] == layout.row_shape
    return layout.storage in ("contiguous", "chunked") and not layout.filters and whole_rows


def _chunk_bytes(layout: DatasetLayout) -> int:
    """Return the bytes of a whole chunk, or 0 without chunks."""
    if not layout.chunks:
        return 0
    return prod(layout.chunks) * prod(layout.row_shape[len(layout.chunks) - 1 :]) * np.dtype(layout.dtype).itemsize


def _thread_bytes(layout: DatasetLayout, columns: Sequence[Column], block: int, dense: bool) -> int:
    """Return the bytes of the buffers of a thread that reads this dataset."""
    used = [column for column in columns if column.name == layout.name]
    row = max(layout.row_bytes, 1)
    piece = min(max(PIECE_BYTES, row), block * row)
    chunk = _chunk_bytes(layout)
    if layout.filters:
        needed = 3 * chunk + chunk // 8  # stored, decoded and unshuffled bytes
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
    """Check that the order of the blocks fits in memory.

    Raises:
        DataError: If it would take more than 4 GiB.
    """
    needed = blocks * _ORDER_BYTES + batches * _SLOT_BYTES
    if needed > _MOST_ORDER:
        raise DataError(
            f"the order of {blocks:,} blocks and {batches:,} batches would take {format_size(needed)} of memory; "
            f"{format_size(_MOST_ORDER)} are allowed. Use fewer rows (rows=), a larger batch_size, or larger chunks"
        )


def _fullest(selection: range | np.ndarray, grid: Grid) -> int:
    """Return the largest number of selected rows in a block."""
    if isinstance(selection, range):
        return grid.largest
    blocks = Blocks(selection, grid)
    return int(blocks.sizes(np.arange(blocks.count)).max())


def _candidates(rows: _Rows, space: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield pairs of a block size and the datasets that stay in memory, best first.

    The best blocks hold whole chunks of every heavy dataset, with light datasets in memory. Then come blocks for the
    heaviest dataset only, and the same with no dataset in memory.
    """
    layouts = rows.layouts
    heaviest = max(layouts, key=lambda d: d.row_bytes).chunk_rows
    light = _caches(layouts, max(space, 0) // 8)
    aligned = heaviest
    for layout in layouts:
        if layout.name not in light and layout.chunk_rows > aligned:
            aligned = -(-layout.chunk_rows // heaviest) * heaviest
    stored_row = max(sum(layout.row_bytes for layout in layouts), 1)
    target = max(min(_BLOCK_BYTES // stored_row, space // (_MIX * _WINDOWS * rows.row_bytes)), 1)  # rows of a block
    for unit, cache in ((aligned, light), (heaviest, light), (heaviest, {})):
        if rows.plain and not rows.ordered:
            # Small blocks cost nothing here, because chunks can be read in parts, and they mix better.
            unit = min(unit, max(target, _LEAST_BLOCK_BYTES // stored_row))
        yield unit * max(1, target // unit), cache
        yield unit, cache


def _caches(layouts: Sequence[DatasetLayout], limit: int) -> dict[str, int]:
    """Return the bytes of the datasets that are small enough to stay in memory, such as labels."""
    heaviest = max(layouts, key=lambda d: d.row_bytes)
    sizes = {d.name: d.rows * d.row_bytes for d in layouts if d is not heaviest}
    chosen: dict[str, int] = {}
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        size += size // 64 + KIB  # for a map of the loaded parts
        if sum(chosen.values()) + size <= limit:
            chosen[name] = size
    return chosen


def _refusal(layouts: Sequence[DatasetLayout], budget: int, smallest: int, batch_bytes: int) -> str:
    heaviest = max(layouts, key=lambda layout: (_chunk_bytes(layout), layout.row_bytes))
    contents = f"windows of rows and {KERAS_BATCHES + _LEAST_AHEAD} batches of {format_size(batch_bytes)}"
    if heaviest.chunks is not None:
        chunk = format_size(_chunk_bytes(heaviest))
        contents += f", with chunks of {heaviest.chunks[0]:,} rows ({chunk}) in {quote(heaviest.name)}"
    size = f"{-(-smallest // MIB)}MiB" if smallest >= 8 * MIB else f"{-(-smallest // KIB)}KiB"
    return (
        f"memory_budget: {format_size(budget)} is too small for {contents}; the smallest that works is {size!r}. "
        "A larger one shuffles better, and a smaller batch_size needs less"
    )
