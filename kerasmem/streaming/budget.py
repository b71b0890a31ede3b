"""How much memory goes where: block and window sizes from a memory budget. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kerasmem.errors import DataError, UsageError
from kerasmem.streaming.columns import Column
from kerasmem.streaming.layout import DatasetLayout, shown
from kerasmem.streaming.order import Blocks
from kerasmem.units import GIB, KIB, MIB, format_size, parse_size

DEFAULT_BUDGET = 256 * MIB
KERAS_BATCHES = 4  # being built, two in TensorFlow's prefetch, being trained on
_BLOCK_BYTES = MIB  # what is worth reading in one go
_MIX = 64  # blocks a window should have at least, to shuffle well, where chunks allow it
_PLACE_BYTES = 4  # a row's shuffled place in its window
_QUEUE_SHARE = 8  # one part in so many of a budget is for batches, more where batches are large
_LEAST_AHEAD = 2  # batches, room for which is kept whether or not workers prepare any
_ORDER_BYTES = 24  # a block's number, its size and the sum of the sizes before it
_MOST_ORDER = 4 * GIB
_STRAIGHT_BYTES = 256 * KIB  # of a batch
_WINDOWS = 2  # the one being delivered, and the one being filled


@dataclass(frozen=True)
class MemoryPlan:
    """Block and window sizes, and the bytes they come to.

    Args:
        block_rows: rows read together.
        window_blocks: blocks shuffled together.
        window_rows: rows of a full window.
        windows: windows in memory at one time; 0 where batches are read straight from the file.
        window_bytes: bytes of one window.
        batch_bytes: bytes of one batch.
        ahead: batches that workers may prepare ahead.
        queued_batches: batches that exist at one time, in queues and in Keras.
        scratch_bytes: buffer for rows on their way through a conversion.
        cache_bytes: HDF5 chunk cache by dataset, for chunks that no block can hold whole.
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
    cache_bytes: dict[str, int]
    total_bytes: int


def plan_memory(
    layouts: Sequence[DatasetLayout],
    columns: Sequence[Column],
    *,
    selection: range | np.ndarray,
    batch_size: int,
    ahead: int,
    workers: int,
    budget: int | str | None,
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
        budget: bytes or a size text. None means 256 MiB for windows, with batches on top.

    Raises:
        UsageError: the budget is too small; the message names the smallest that works.
    """
    rows = len(selection)
    batch_bytes = min(batch_size, rows) * sum(column.row_bytes for column in columns)
    if budget is None:
        given, room = None, DEFAULT_BUDGET
    else:
        given = parse_size(budget, field="memory_budget")
        reserve = max(given // _QUEUE_SHARE, (KERAS_BATCHES + _LEAST_AHEAD) * batch_bytes)
        room = given - reserve
        while ahead and (KERAS_BATCHES + ahead + min(workers, ahead)) * batch_bytes > reserve:
            ahead -= 1
    queued = KERAS_BATCHES + ahead + min(workers, ahead)
    row_bytes = sum(column.row_bytes for column in columns) + _PLACE_BYTES
    stored_row = max(sum(layout.row_bytes for layout in layouts), 1)
    converted = {column.name for column in columns if column.converts}
    dense = isinstance(selection, range)
    scratch_row = max((d.row_bytes for d in layouts if not dense or d.name in converted), default=0)

    smallest = []
    for unit, cache in _candidates(layouts, max(room, 0) // 8):
        fixed = sum(cache.values())
        for block in (
            unit * max(1, min(_BLOCK_BYTES, room // (_MIX * _WINDOWS)) // (unit * stored_row)),
            unit,
        ):
            fullest = min(_fullest(selection, block), rows)
            space = room - fixed - block * scratch_row
            if rows * row_bytes <= space:
                windows, window_blocks, window_rows = 1, rows, rows  # there are never more blocks than rows
            else:
                windows, window_blocks = _WINDOWS, max(space, 0) // (_WINDOWS * fullest * row_bytes)
                window_rows = min(window_blocks * fullest, rows)
            if window_blocks:
                window_bytes = window_rows * row_bytes
                scratch = block * scratch_row
                used = windows * window_bytes + scratch + fixed + queued * batch_bytes
                return MemoryPlan(
                    block_rows=block,
                    window_blocks=window_blocks,
                    window_rows=window_rows,
                    windows=windows,
                    window_bytes=window_bytes,
                    batch_bytes=batch_bytes,
                    ahead=ahead,
                    queued_batches=queued,
                    scratch_bytes=scratch,
                    cache_bytes=cache,
                    total_bytes=used,
                )
        needed = min(_WINDOWS * fullest, rows) * row_bytes + block * scratch_row + fixed
        with_batches = needed + (KERAS_BATCHES + _LEAST_AHEAD) * batch_bytes
        smallest.append(max(needed * _QUEUE_SHARE // (_QUEUE_SHARE - 1) + _QUEUE_SHARE, with_batches))
    raise UsageError(_refusal(layouts, given or DEFAULT_BUDGET, min(smallest), batch_bytes))


def reads_straight(layouts: Sequence[DatasetLayout], selection: range | np.ndarray, plan: MemoryPlan) -> bool:
    """Return whether file order is best read batch by batch, with no window in between.

    It is where reading a part of the data costs no more than that part: nothing to unpack, nothing to leave
    out, and batches large enough to make up for a call each. Rows that fit into one window are kept there
    from epoch to epoch instead.
    """
    plain = all(layout.storage in ("contiguous", "chunked") and not layout.filters for layout in layouts)
    return plain and isinstance(selection, range) and plan.windows > 1 and plan.batch_bytes >= _STRAIGHT_BYTES


def without_windows(plan: MemoryPlan) -> MemoryPlan:
    """Return the plan of a sequence that reads straight into its batches."""
    total = plan.total_bytes - plan.windows * plan.window_bytes
    return replace(plan, windows=0, window_bytes=0, total_bytes=total)


def check_order(blocks: int, batches: int) -> None:
    """Refuse data of so many blocks that their mere order is too much to remember.

    Raises:
        DataError: the order would take more than 4 GiB.
    """
    needed = blocks * _ORDER_BYTES + batches * _PLACE_BYTES
    if needed > _MOST_ORDER:
        raise DataError(
            f"remembering the order of {blocks:,} blocks and {batches:,} batches would take {format_size(needed)} "
            f"of memory, and {format_size(_MOST_ORDER)} is the most allowed; use fewer rows with `rows`, a "
            "larger batch_size, or larger chunks"
        )


def _fullest(selection: range | np.ndarray, block: int) -> int:
    """Return the most selected rows that any block has."""
    if isinstance(selection, range):
        return block
    blocks = Blocks(selection, block)
    return int(blocks.sizes(np.arange(blocks.count)).max())


def _candidates(layouts: Sequence[DatasetLayout], limit: int) -> list[tuple[int, dict[str, int]]]:
    """Return pairs of a block size and chunk caches, best first.

    Best are blocks that hold the chunks of every heavy dataset, with the light ones cached; then blocks
    for the heaviest dataset alone; then the same with nothing cached.
    """
    heaviest = max(layouts, key=lambda d: d.row_bytes).chunk_rows
    light = _caches(layouts, limit)
    aligned = heaviest
    for layout in layouts:
        if layout.name not in light and layout.chunk_rows > aligned:
            aligned = -(-layout.chunk_rows // heaviest) * heaviest
    chunk_rows = {layout.name: layout.chunk_rows for layout in layouts}
    candidates = []
    for unit in (aligned, heaviest):
        # A light dataset whose chunks fit into the blocks needs no cache.
        candidates.append((unit, {name: size for name, size in light.items() if unit % chunk_rows[name]}))
    return [*candidates, (heaviest, {})]


def _caches(layouts: Sequence[DatasetLayout], limit: int) -> dict[str, int]:
    """Return the datasets small enough to stay in HDF5's chunk cache whole, such as labels."""
    heaviest = max(layouts, key=lambda d: d.row_bytes)
    sizes = {d.name: d.rows * d.row_bytes for d in layouts if d is not heaviest and d.chunks is not None}
    chosen: dict[str, int] = {}
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        size += size // 8 + 64 * KIB  # edge chunks are stored whole
        if sum(chosen.values()) + size <= limit:
            chosen[name] = size
    return chosen


def _refusal(layouts: Sequence[DatasetLayout], given: int, smallest: int, batch_bytes: int) -> str:
    heaviest = max(layouts, key=lambda d: d.row_bytes)
    chunk = heaviest.chunk_rows * heaviest.row_bytes
    why = f"windows of rows and {KERAS_BATCHES + _LEAST_AHEAD} batches of {format_size(batch_bytes)}"
    if heaviest.chunks is not None:
        why += f", with chunks of {heaviest.chunk_rows:,} rows ({format_size(chunk)}) in {shown(heaviest.name)}"
    size = f"{-(-smallest // MIB)}MiB" if smallest >= 8 * MIB else f"{-(-smallest // KIB)}KiB"
    return (
        f"memory_budget: {format_size(given)} is too small for {why}; the smallest that works is {size!r} "
        "(larger shuffles better); a smaller batch_size needs less"
    )
