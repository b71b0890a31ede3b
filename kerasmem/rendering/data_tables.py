"""Tables of `kerasmem data`: inspections, conversions, statistics and indexes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.datatools.reports import Conversion, DataStats, IndexSummary, Inspection
from kerasmem.rendering.formatting import note_lines, printable_lines, short_name, table
from kerasmem.units import format_size, printable

_MOST_DATASETS = 60


def inspection_table(inspection: Inspection, terminal: int | None = None) -> RenderableType:
    """Show the datasets of a file, how they would be streamed, and the line to paste."""
    title = Text(f"{printable(inspection.path, 200)}: {format_size(inspection.size)}", style="bold")
    parts: list[RenderableType] = [title, "", _datasets(inspection, terminal)]
    unfit = [dataset for dataset in inspection.datasets if dataset.problem][:_MOST_DATASETS]
    if unfit:
        parts += ["", Text("Cannot be trained from:")]
        parts += [Text(f"  {printable(dataset.name, 80)}: {printable(dataset.problem, 240)}") for dataset in unfit]
    parts += note_lines(inspection.notes, 400)
    if not inspection.line:
        return Group(*parts, "", Text("This file has no dataset that can be trained from."))
    parts += ["", Text(printable_lines(inspection.stream))]
    return Group(*parts, *_line_to_paste(inspection.line))


def conversion_table(conversion: Conversion, terminal: int | None = None) -> RenderableType:
    """Show the datasets that were written, and the line to paste."""
    names = ", ".join(printable(os.path.basename(path), 80) for path in conversion.outputs)
    first = Text(f"{names}: {conversion.rows:,} rows, {format_size(conversion.bytes_written)}", style="bold")
    rows = [
        (
            short_name(dataset.name), _extents(dataset.shape) or "one number", dataset.dtype,
            printable(dataset.source_dtype, 30), dataset.bytes,
        )
        for dataset in conversion.datasets
    ]  # fmt: skip
    columns = ("Dataset", "Row", "Type", "from", "Size")
    notes = (*map(Text, _remarks(conversion)), *note_lines(conversion.notes, 400))
    return Group(first, "", _data_table(terminal, columns, rows), *notes, *_line_to_paste(conversion.line))


def stats_table(stats: DataStats, terminal: int | None = None) -> RenderableType:
    """Show the statistics of each dataset, and code that uses them."""
    rows = []
    for column in stats.columns:
        moments = [_join_first([f"{value:.4g}" for value in values], 4) for values in (column.mean, column.variance)]
        limits = ["–" if value is None else f"{value:.6g}" for value in (column.minimum, column.maximum)]
        counts = [f"{count:,}" for count in (column.nan_count, column.infinite_count, column.missing_count)]
        rows.append((short_name(column.name), *moments, *limits, *counts))
    missing = "Missing" if any(column.missing_count for column in stats.columns) else None
    columns = ("Dataset", "Mean", "Variance", "Minimum", "Maximum", "NaN", "Infinite", missing)
    title = Text(f"{printable(stats.path, 200)}: {stats.rows:,} rows", style="bold")
    parts: list[RenderableType] = [title, "", _data_table(terminal, columns, rows)]
    if any(column.nan_count + column.infinite_count + column.missing_count for column in stats.columns):
        parts.append(Text("The other columns leave out NaN, infinite and missing values."))
    if stats.code:
        parts += ["", Text(printable_lines(stats.code))]
    return Group(*parts)


def index_table(result: IndexSummary, terminal: int | None = None) -> RenderableType:
    """Show the content of an index."""
    names = Text(f"Datasets: {', '.join(map(short_name, result.datasets[:_MOST_DATASETS]))}")
    return Group(Text(printable(result.answer), style="bold"), names)


def _data_table(
    terminal: int | None, columns: Sequence[str | None], rows: Sequence[Sequence[str | int | None]]
) -> Table:
    """Return a table of the first rows. Names are aligned to the left, figures to the right."""
    left_aligned = ("Dataset", "from")
    result = table(
        terminal,
        *(
            name and Column(name, justify="left" if name in left_aligned else "right", overflow="fold")
            for name in columns
        ),
    )
    for cells in rows[:_MOST_DATASETS]:
        result.add(*cells)
    if len(rows) > _MOST_DATASETS:
        result.add(f"and {len(rows) - _MOST_DATASETS:,} more")
    return result


def _line_to_paste(line: str) -> Iterator[RenderableType]:
    yield from ("", Text("from kerasmem import H5ChunkSequence"), Text(f"train = {printable(line)}"))


def _datasets(inspection: Inspection, terminal: int | None) -> Table:
    sizes = ("Stored", "As float32")
    columns = ("Dataset", "Shape", "Type", "Chunks", "Filters", *sizes)
    rows = []
    for dataset in inspection.datasets:
        role = {inspection.x: " (x)", inspection.y: " (y)"}.get(dataset.name, "")
        shape = "–" if dataset.shape is None else _extents(dataset.shape) or "one value"
        chunks = dataset.storage or "–" if dataset.chunks is None else _extents(dataset.chunks)
        filters = printable("+".join(dataset.filters), 40) or "–"
        facts = (short_name(dataset.name) + role, shape, printable(dataset.dtype, 30), chunks, filters)
        bytes_taken = (dataset.stored_bytes, dataset.float32_bytes)
        rows.append((*facts, *bytes_taken))
    return _data_table(terminal, columns, rows)


def _remarks(conversion: Conversion) -> Iterator[str]:
    for dataset in conversion.datasets:
        if dataset.class_names is not None:
            names = [f"{number} {printable(name, 30)}" for number, name in enumerate(dataset.class_names)]
            yield f"Classes in {printable(dataset.name, 60)}: {_join_first(names, 10)}"


def _join_first(texts: Sequence[str], most: int) -> str:
    return ", ".join(texts[:most]) + (f", … ({len(texts):,} in all)" if len(texts) > most else "")


def _extents(shape: Sequence[int]) -> str:
    return "×".join(f"{extent:,}" for extent in shape)
