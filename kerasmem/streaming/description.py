"""A stream of batches in a few lines of text."""

from __future__ import annotations

import numpy as np

from kerasmem.hdf5.format.columns import Column
from kerasmem.hdf5.format.layout import DatasetLayout, shown, type_name
from kerasmem.streaming.plan import StreamPlan
from kerasmem.streaming.quality import ShuffleQuality
from kerasmem.units import KIB, MIB, format_count, format_size


def describe_plan(plan: StreamPlan, prepared_by: str = "") -> str:
    """Return rows, types, order and memory of a stream, one fact a line.

    Args:
        plan: what is delivered.
        prepared_by: who prepares batches ahead; "" for nobody.
    """
    memory, batches = plan.memory, format_count(plan.num_batches, "batch")
    layouts = {layout.name: layout for layout in plan.layout.datasets}
    rows = format_count(plan.num_rows, "row")
    lines = [f"{plan.layout.title}: {rows} in {batches} of {format_count(plan.batch_rows)}"]
    for part, used in zip(plan.parts, plan.part_columns, strict=True):
        for column in used:
            layout = layouts[column.name]
            lines.append(f"  {part.role:<13} {shown(column.name)} {_conversion(column)}, {_storage(layout)}")
    lines.append(f"  order         {_order(plan)}; blocks of {format_count(memory.block_rows, 'row')}")
    if prepared_by:
        lines.append(f"  prepared by   {prepared_by}")
    uses = [f"{format_count(memory.queued_batches, 'batch')} of {format_size(memory.batch_bytes)}"]
    if memory.windows:
        uses.insert(0, f"{format_count(memory.windows, 'window')} of {format_size(memory.window_bytes)}")
    if memory.scratch_bytes:
        uses.append(f"{format_size(memory.scratch_bytes)} to read in")
    if memory.cache_bytes:
        uses.append(f"{format_size(sum(memory.cache_bytes.values()))} kept whole")
    lines.append(f"  memory        {format_size(memory.total_bytes)}: {', '.join(uses)}")
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


def describe_quality(quality: ShuffleQuality, *, shuffle: bool) -> str:
    """Return how well labels are mixed and how much is read, one fact a line."""
    lines = []
    if quality.ratio is None:
        lines.append(f"  mixing        all rows have one label in {shown(quality.labels)}")
    else:
        lines.append(
            f"  mixing        {quality.entropy_bits:.3f} bits of label entropy a batch "
            f"({format_count(quality.classes, 'different label')} in {shown(quality.labels)}), "
            f"{_percent(quality.ratio)} of a uniform shuffle's; a block is {_percent(quality.block_purity)} one label"
        )
    lines.append(
        f"  reading       {quality.read_amplification:.2f} bytes an epoch for each byte stored "
        f"({format_size(quality.bytes_needed)})"
    )
    if not quality.good:
        lines.append(f"  advice        {advise(quality, shuffle=shuffle)}")
    return "\n".join(lines)


def advise(quality: ShuffleQuality, *, shuffle: bool) -> str:
    """Return why labels are mixed badly, and the remedy."""
    assert quality.ratio is not None
    wrong = f"batches have {_percent(quality.ratio)} of the label entropy of a uniform shuffle"
    if not shuffle:
        return f"{wrong}, because rows come in file order; pass shuffle=True to train"
    why = (
        f"{wrong}: a block of rows is {_percent(quality.block_purity)} one label, and "
        f"{format_count(quality.window_blocks, 'block')} are shuffled together"
    )
    rewrite = "write the file again with its rows shuffled, or in smaller chunks"
    if quality.enough_memory is None:
        return f"{why}; {rewrite}"
    size = quality.enough_memory
    budget = f"{-(-size // MIB)}MiB" if size >= 8 * MIB else f"{-(-size // KIB)}KiB"
    return f"{why}; memory_budget={budget!r} is enough for 99 %, or {rewrite}"


def name_batch(batch: int, epoch: int, rows: np.ndarray) -> str:
    """Name a batch for a message: its number, epoch and some of its rows."""
    low, high = int(rows.min()), int(rows.max())
    if high - low + 1 == len(rows):
        which = f"rows {low:,} to {high:,}" if high > low else f"row {low:,}"
    else:
        some = ", ".join(f"{row:,}" for row in rows[:6])
        which = f"rows {some}{', …' if len(rows) > 6 else ''} (within {low:,} to {high:,})"
    return f"batch {batch:,} of epoch {epoch:,}, {which}"


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


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
