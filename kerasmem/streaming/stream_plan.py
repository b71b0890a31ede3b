"""The plan of a sequence, decided once: rows, blocks, shards, windows and columns.

Made from settings and from what the files look like, by functions that need neither Keras nor an open file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.columns import Column, Part, make_columns, read_rows
from kerasmem.hdf5.format.layout import DataLayout, DatasetLayout, shown, type_name
from kerasmem.streaming.budget import MemoryPlan, check_order, plan_memory
from kerasmem.streaming.order import Blocks, EpochOrder, ShardBlocks
from kerasmem.streaming.sharding import Share
from kerasmem.units import format_count, format_size

_MOST_AHEAD = 10  # batches; fewer if the memory budget does not hold more
_WELL_MIXED = 32  # blocks shuffled together, so that batches of a file sorted by class hold most classes


@dataclass(frozen=True)
class StreamSettings:
    """The settings of a sequence that determine its order of rows. See `H5ChunkSequence`.

    Args:
        batch_size: rows a batch.
        shuffle: whether rows are shuffled.
        seed: of the order.
        seed_drawn: whether the seed was drawn and not given.
        remainder: treatment of a last batch that is not full: "keep", "drop" or "pad".
        shard: (index, count).
        dtype: types by dataset name; "" has that of other features.
        scale: (factor, offset) by dataset name; "" has that of other features.
        rows: as given.
        memory_budget: bytes; None for the default.
        transform: function that is applied to each batch; None for none.
        workers: threads or processes that prepare batches.
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
            raise UsageError("seed: None draws another seed in every worker; give a number along with shard")

    @property
    def works_ahead(self) -> bool:
        """Whether batches are prepared before they are asked for."""
        return self.workers > 1 or self.in_processes


@dataclass(frozen=True, eq=False)
class StreamPlan:
    """The rows, batches and order that a sequence delivers.

    Args:
        settings: what was asked for.
        layout: what the files look like.
        parts: x, y and sample_weight as far as there are.
        columns: the arrays read, each once.
        uses: for each part the columns that it is made of, by number.
        share: this worker's part of the rows.
        selection: the rows that blocks are made of.
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
        """Sizes of blocks, windows and buffers, of this worker.

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
        """Batches an epoch."""
        return self.share.steps

    @property
    def num_rows(self) -> int:
        """Rows of this worker."""
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
        """Whether batches get weights that the data has not, 0 for the rows that fill a batch up."""
        return self.settings.remainder == "pad" and all(part.role != "sample_weight" for part in self.parts)

    def padded(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays of a batch, one a column, with as many rows as every batch has.

        The rows that are added repeat the batch's last one, for values that a model knows, and have the weight 0.
        """
        rows, wanted = len(arrays[0]), self.settings.batch_size
        if rows == wanted:
            return list(arrays)
        used = zip(self.parts, self.uses, strict=True)
        weights = {use for part, uses in used if part.role == "sample_weight" for use in uses}
        filled = []
        for number, array in enumerate(arrays):
            last = array[-1:] if number not in weights else np.zeros((1, *array.shape[1:]), array.dtype)
            filled.append(np.concatenate([array, np.repeat(last, wanted - rows, axis=0)]))
        return filled

    def bounds(self, batch: int) -> tuple[int, int]:
        """Return the rows of an epoch, start and stop, that make up a batch."""
        return self.share.bounds(batch, self.num_rows)

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""
        return EpochOrder(self.blocks, self.memory.window_blocks, self.seed, epoch)


Uses = tuple[tuple[int, ...], ...]
"""For each part the columns that it is made of, by number."""


def build_batch(
    parts: Sequence[Part], uses: Uses, arrays: Sequence[Any], again: Callable[[Any], Any] = lambda array: array
) -> tuple[Any, ...]:
    """Return a batch in the structure of its parts.

    Args:
        parts: x, y and sample_weight.
        uses: their columns, by number.
        arrays: an array a column.
        again: applied to a column that comes in the batch for a second time, as an autoencoder's does.
    """
    taken: set[int] = set()
    built = []
    for part, some in zip(parts, uses, strict=True):
        values = []
        for use in some:
            values.append(again(arrays[use]) if use in taken else arrays[use])
            taken.add(use)
        built.append(part.build(values))
    return tuple(built)


def choose_columns(
    layout: DataLayout, parts: Sequence[Part], dtype: Mapping[str, str], scale: Mapping[str, tuple[float, float]]
) -> tuple[tuple[Column, ...], Uses]:
    """Return the arrays that are read, each once, and for each part those that it is made of."""
    by_name = {dataset.name: dataset for dataset in layout.datasets}
    wanted = [make_columns(part, by_name, dtype, scale) for part in parts]
    columns = tuple(dict.fromkeys(column for some in wanted for column in some))
    return columns, tuple(tuple(columns.index(column) for column in some) for some in wanted)


def dataset_names(parts: Sequence[Part]) -> list[str]:
    """Return the datasets that parts are made of, each once."""
    return list(dict.fromkeys(name for part in parts for name in part.names))


def make_plan(layout: DataLayout, parts: tuple[Part, ...], settings: StreamSettings) -> StreamPlan:
    """Return the plan of a sequence.

    Raises:
        DataError: If rows are asked for that do not exist, or there are too many blocks.
        UsageError: If a setting is wrong, or the memory budget is too small.
    """
    columns, uses = choose_columns(layout, parts, settings.dtype, settings.scale)
    rows = read_rows(settings.rows, layout.datasets[0].rows, ordered=not settings.shuffle)
    heaviest = max(layout.datasets, key=lambda dataset: dataset.row_bytes)
    if settings.remainder == "pad" and all(part.role != "y" for part in parts):
        raise UsageError("remainder: 'pad' adds rows of weight 0, and Keras takes weights only together with y")
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
    """Return rows, types, order and memory of a stream, one fact a line."""
    memory, batches = plan.memory, format_count(plan.num_batches, "batch")
    layouts = {layout.name: layout for layout in plan.layout.datasets}
    rows = format_count(plan.num_rows, "row")
    lines = [f"{plan.layout.title}: {rows} in {batches} of {format_count(plan.settings.batch_size)}"]
    for part, numbers in zip(plan.parts, plan.uses, strict=True):
        for number in numbers:
            column = plan.columns[number]
            layout = layouts[column.name]
            lines.append(f"  {part.role:<13} {shown(column.name)} {_conversion(column)}, {_storage(layout)}")
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
            "class poorly: use a larger memory_budget, or write the file again with its rows shuffled"
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
    filters = f", {'+'.join(shown(name)[1:-1] for name in layout.filters)}" if layout.filters else ""
    return f"chunks of {format_count(layout.chunk_rows, 'row')}{filters}"
