"""A Conversion or a Repacking as text: what was written, what it saved, how it streams, the line to paste."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from kerasmem.datatools.converting.results import Conversion, Reading, Repacking
from kerasmem.rendering.data_inspection_table import data_table
from kerasmem.rendering.escape import middle, printable
from kerasmem.units import format_size

_MOST_DATASETS = 60


def conversion_table(done: Conversion, *, rich_look: bool) -> RenderableType:
    """Return what was read and written.

    Args:
        done: the conversion.
        rich_look: rules and colours, for a terminal.
    """
    return Group(*_parts(done, rich_look), *_line(done))


def repacking_table(done: Repacking, *, rich_look: bool) -> RenderableType:
    """Return what was read and written, and how it streams before and after."""
    parts = _parts(done.conversion, rich_look)
    if done.before is not None and done.after is not None:
        table = data_table(
            ["An epoch", "Reads", "for each byte needed", "Rows together", "unpacks", "Mixing"], rich_look
        )
        for name, reading in (("before", done.before), ("after", done.after)):
            table.add_row(name, *_reading(reading))
        parts += ["", table]
    return Group(*parts, *_line(done.conversion))


def _parts(done: Conversion, rich_look: bool) -> list[RenderableType]:
    many = len(done.outputs) > 1
    names = ", ".join(printable(os.path.basename(path), 80) for path in done.outputs)
    first = Text(f"{names}: {done.rows:,} rows, {format_size(done.bytes_written)}", style="bold")
    first.append(f" in {done.seconds:.1f} s", style="dim")
    table = data_table(["Dataset", "Rows", "Row", "Type", "from", "Chunks of", "Size", "Stored", "CRC-32"], rich_look)
    for dataset in done.datasets[:_MOST_DATASETS]:
        name = f"{os.path.basename(dataset.path)}: {dataset.name}" if many else dataset.name
        table.add_row(
            Text(middle(printable(name), 60)),
            f"{dataset.rows:,}",
            "×".join(f"{extent:,}" for extent in dataset.shape) or "one number",
            dataset.dtype,
            printable(dataset.source_dtype, 30),
            f"{dataset.chunk_rows:,} rows",
            format_size(dataset.bytes),
            format_size(dataset.stored_bytes),
            f"{dataset.crc32:08x}",
        )
    if len(done.datasets) > _MOST_DATASETS:
        table.add_row(f"and {len(done.datasets) - _MOST_DATASETS:,} more")
    return [first, "", table, *(Text(line) for line in _remarks(done))]


def _remarks(done: Conversion) -> Iterable[str]:
    if done.float64_saved:
        yield f"float64 written as float32 saves {format_size(done.float64_saved)}."
    order = f"in random order (seed {done.seed})" if done.shuffled else "in the order of the sources"
    yield f"Rows are {order}; compression {done.compression}" + (
        "; read back and found right." if done.verified else "."
    )
    if done.resumed_rows:
        yield f"An interrupted run had done {done.resumed_rows:,} rows; this one went on from there."
    for dataset in done.datasets:
        if dataset.class_names is not None and dataset.path == done.outputs[0]:
            names = ", ".join(f"{number} {printable(name, 30)}" for number, name in enumerate(dataset.class_names[:10]))
            more = f", … ({len(dataset.class_names):,} in all)" if len(dataset.class_names) > 10 else ""
            yield f"Classes in {printable(dataset.name, 60)}: {names}{more}"
    for note in done.notes:
        yield f"Note: {printable(note, 400)}."


def _line(done: Conversion) -> list[RenderableType]:
    return ["", Text("from kerasmem import H5ChunkSequence"), Text(f"train = {printable(done.line)}")]


def _reading(reading: Reading) -> tuple[str, ...]:
    mixing = "–" if reading.entropy_ratio is None else f"{100 * reading.entropy_ratio:.1f} % of a uniform shuffle"
    return (
        format_size(reading.read_bytes),
        f"{reading.amplification:.2f}",
        f"{reading.block_rows:,}",
        printable("+".join(reading.filters), 40) or "nothing",
        mixing,
    )
