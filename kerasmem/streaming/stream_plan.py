"""The plan of a sequence: rows, blocks, shards, windows and columns.

It is computed once from the settings and the layouts of the files, without Keras and without an open file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.columns import Column, Part, make_columns, read_rows
from kerasmem.hdf5.format.layout import DataLayout, DatasetLayout, quote, type_name
from kerasmem.streaming.budget import MemoryPlan, check_order, plan_memory
from kerasmem.streaming.order import Blocks, EpochOrder, ShardBlocks
from kerasmem.streaming.sharding import Share
from kerasmem.units import format_count, format_size

_MOST_AHEAD = 10  # prepared batches, if the memory budget allows
_WELL_MIXED = 32  # blocks shuffled together, so that batches of a file sorted by class contain most classes


@dataclass(frozen=True)
class StreamSettings:
    """Checked settings of a sequence. See `H5ChunkSequence`.

    Args:
        batch_size: rows per batch.
        shuffle: whether rows are shuffled.
        seed: seed of the order.
        seed_drawn: whether the seed was drawn because none was passed.
        remainder: handling of a last batch that is not full: "keep", "drop" or "pad".
        shard: (index, count).
        dtype: types by dataset name; "" is the key of the other features.
        scale: (factor, offset) by dataset name; "" is the key of the other features.
        rows: the argument of the same name, unchecked.
        memory_budget: bytes, or None for the default.
        transform: function that is applied to each batch, or None.
        workers: number of threads or processes that prepare batches.
        in_processes: whether `transform` runs in processes.
    """

    batch_size: int = 32
    shuffle: bool = True
    seed: int = 0
    seed_drawn: bool = False
    remainder: str = "keep"
    shard: tuple[int, int] = (0, 1)
    dtype: Mapping[str, str] = field(default_factory=lambda: {"": "float32"})
    scale: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    rows: Any = None
    memory_budget: int | None = None
    transform: Callable[..., Any] | None = None
    workers: int = 1
    in_processes: bool = False

    def __post_init__(self) -> None:
        if self.shard[1] > 1 and self.seed_drawn and self.shuffle:
            raise UsageError("seed must be a number if shard is set: None would draw another seed in every worker")

    @property
    def works_ahead(self) -> bool:
        """Whether batches are prepared before they are requested."""
        return self.workers > 1 or self.in_processes


@dataclass(frozen=True, eq=False)
class StreamPlan:
    """The rows, batches and order that a sequence delivers.

    Args:
        settings: settings of the sequence.
        layout: layout of the files.
        parts: x, y and sample_weight, if present.
        columns: the arrays to read, without duplicates.
        uses: for each part, the numbers of its columns.
        share: this worker's part of the rows.
        selection: the rows that are cut into blocks.
    """

    settings: StreamSettings
    layout: DataLayout
    parts: tuple[Part, ...]
    columns: tuple[Column, ...]
    uses: Uses
    share: Share
    selection: range | np.ndarray

    @cached_property
    def memory(self) -> MemoryPlan:
        """Sizes of this worker's blocks, windows and buffers.

        Raises:
            UsageError: If the memory budget is too small.
        """
        return plan_memory(
            self.layout.datasets,
            self.columns,
            selection=self.share.plan_for(self.selection),
            batch_size=self.settings.batch_size,
            ahead=_MOST_AHEAD if self.settings.works_ahead else 0,
            workers=self.settings.workers,
            budget=self.settings.memory_budget,
            ordered=not self.settings.shuffle,
            grid=self.layout.block_grid,
        )

    @cached_property
    def blocks(self) -> Blocks | ShardBlocks:
        """The blocks of this worker."""
        blocks = Blocks(self.selection, self.layout.block_grid(self.memory.block_rows))
        return self.share.deal(blocks, self.settings.seed) if self.settings.shuffle else blocks

    @property
    def num_batches(self) -> int:
        """Batches per epoch."""
        return self.share.steps

    @property
    def num_rows(self) -> int:
        """Rows of this worker per epoch."""
        return self.blocks.total

    @property
    def seed(self) -> int | None:
        """Seed of the order, or None for file order."""
        return self.settings.seed if self.settings.shuffle else None

    @property
    def all_full(self) -> bool:
        """Whether every batch has `batch_size` rows."""
        return self.settings.remainder != "keep" or self.num_rows == self.num_batches * self.settings.batch_size

    @property
    def adds_weights(self) -> bool:
        """Whether batches get weights that are not in the data: 0 for the rows that pad a batch."""
        return self.settings.remainder == "pad" and all(part.role != "sample_weight" for part in self.parts)

    def padded(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays of a batch, one per column, padded to `batch_size` rows.

        The added rows repeat the last row, so that a model sees valid values, with the weight 0.
        """
        missing = self.settings.batch_size - len(arrays[0])
        if not missing:
            return list(arrays)
        pairs = zip(self.parts, self.uses, strict=True)
        weights = {number for part, numbers in pairs if part.role == "sample_weight" for number in numbers}
        padded = []
        for number, array in enumerate(arrays):
            last = array[-1:] if number not in weights else np.zeros((1, *array.shape[1:]), array.dtype)
            padded.append(np.concatenate([array, np.repeat(last, missing, axis=0)]))
        return padded

    def bounds(self, batch: int) -> tuple[int, int]:
        """Return start and stop of a batch among the rows of an epoch."""
        return self.share.bounds(batch, self.num_rows)

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""
        return EpochOrder(self.blocks, self.memory.window_blocks, self.seed, epoch)


Uses = tuple[tuple[int, ...], ...]
"""For each part, the numbers of its columns."""


def build_batch(
    parts: Sequence[Part], uses: Uses, arrays: Sequence[Any], again: Callable[[Any], Any] = lambda array: array
) -> tuple[Any, ...]:
    """Return a batch in the structure of its parts.

    Args:
        parts: x, y and sample_weight.
        uses: the numbers of their columns.
        arrays: one array per column.
        again: applied to a column that occurs a second time in the batch, as in an autoencoder.
    """
    used: set[int] = set()
    batch = []
    for part, numbers in zip(parts, uses, strict=True):
        values = []
        for number in numbers:
            values.append(again(arrays[number]) if number in used else arrays[number])
            used.add(number)
        batch.append(part.build(values))
    return tuple(batch)


def choose_columns(
    layout: DataLayout, parts: Sequence[Part], dtype: Mapping[str, str], scale: Mapping[str, tuple[float, float]]
) -> tuple[tuple[Column, ...], Uses]:
    """Return the arrays to read without duplicates, and for each part the numbers of its arrays."""
    by_name = {dataset.name: dataset for dataset in layout.datasets}
    by_part = [make_columns(part, by_name, dtype, scale) for part in parts]
    columns = tuple(dict.fromkeys(column for group in by_part for column in group))
    return columns, tuple(tuple(map(columns.index, group)) for group in by_part)


def dataset_names(parts: Sequence[Part]) -> list[str]:
    """Return the names of the datasets of some parts, without duplicates."""
    return list(dict.fromkeys(name for part in parts for name in part.names))


def make_plan(layout: DataLayout, parts: tuple[Part, ...], settings: StreamSettings) -> StreamPlan:
    """Return the plan of a sequence.

    Raises:
        DataError: If `rows` includes rows that do not exist, or there are too many blocks.
        UsageError: If a setting is wrong, or the memory budget is too small.
    """
    columns, uses = choose_columns(layout, parts, settings.dtype, settings.scale)
    rows = read_rows(settings.rows, layout.datasets[0].rows, ordered=not settings.shuffle)
    heaviest = max(layout.datasets, key=lambda dataset: dataset.row_bytes)
    if settings.remainder == "pad" and all(part.role != "y" for part in parts):
        raise UsageError("remainder: 'pad' needs y, because Keras accepts the weights of padded rows only with targets")
    share = Share(
        *settings.shard,
        rows=len(rows),
        batch_size=settings.batch_size,
        drop_remainder=settings.remainder == "drop",
        chunks=layout.chunk_grid(heaviest.name),
    )
    plan = StreamPlan(
        settings=settings,
        layout=layout,
        parts=parts,
        columns=columns,
        uses=uses,
        share=share,
        selection=share.select(rows, shuffle=settings.shuffle),
    )
    check_order(plan.blocks.count, plan.num_batches)
    return plan


def describe_plan(plan: StreamPlan) -> str:
    """Describe rows, types, order and memory of a stream, one fact per line."""
    memory, batches = plan.memory, format_count(plan.num_batches, "batch")
    layouts = {layout.name: layout for layout in plan.layout.datasets}
    rows = format_count(plan.num_rows, "row")
    lines = [f"{plan.layout.title}: {rows} in {batches} of {format_count(plan.settings.batch_size)}"]
    for part, numbers in zip(plan.parts, plan.uses, strict=True):
        for number in numbers:
            column = plan.columns[number]
            layout = layouts[column.name]
            lines.append(f"  {part.role:<13} {quote(column.name)} {_conversion(column)}, {_storage(layout)}")
    lines.append(f"  order         {_order(plan)}; blocks of {format_count(memory.block_rows, 'row')}")
    uses = [
        f"{format_count(memory.windows, 'window')} of {format_size(memory.window_bytes)}",
        f"{format_count(memory.queued_batches, 'batch')} of {format_size(memory.batch_bytes)}",
    ]
    if memory.scratch_bytes:
        uses.append(f"{format_size(memory.scratch_bytes)} to read in")
    if memory.cache_bytes:
        uses.append(f"{format_size(sum(memory.cache_bytes.values()))} kept whole")
    lines.append(f"  memory        {format_size(memory.total_bytes)}: {', '.join(uses)}")
    if plan.seed is not None and memory.window_blocks < min(_WELL_MIXED, plan.blocks.count):
        lines.append(
            f"  advice        {format_count(memory.window_blocks, 'block')} shuffled together mix a file sorted by "
            "class poorly: use a larger memory_budget, or repack the file with --shuffle"
        )
    return "\n".join(lines)


def _order(plan: StreamPlan) -> str:
    blocks = plan.blocks.count
    together = min(plan.memory.window_blocks, blocks)
    if plan.seed is None:
        return "file order"
    if together == blocks:
        return f"all rows shuffled together, seed {plan.seed}"
    return (
        f"blocks in random order, {together:,} of {blocks:,} ({format_count(plan.memory.window_rows, 'row')}) shuffled "
        f"together, seed {plan.seed}"
    )


def _conversion(column: Column) -> str:
    shape = "×".join(str(extent) for extent in column.row_shape) or "one number"
    text = f"{shape} a row, {type_name(column.stored)}"
    if column.converts:
        text += f" → {column.dtype}"
    if column.scale is not None:
        text += f", × {column.scale:.6g}"
    if column.offset:
        text += f" {'+' if column.offset > 0 else '−'} {abs(column.offset):.6g}"
    return text


def _storage(layout: DatasetLayout) -> str:
    if layout.chunks is None:
        return layout.storage
    filters = f", {'+'.join(quote(name)[1:-1] for name in layout.filters)}" if layout.filters else ""
    return f"chunks of {format_count(layout.chunk_rows, 'row')}{filters}"
