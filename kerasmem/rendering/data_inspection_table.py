"""An Inspection as text: the datasets, the classes, how it streams, the line to paste."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasmem.datatools.inspecting.results import DatasetReport, Inspection
from kerasmem.rendering.escape import middle, printable
from kerasmem.units import format_size

_MOST_DATASETS = 60
_MOST_CLASSES = 20


def data_table(columns: Sequence[str], rich_look: bool) -> Table:
    """Return an empty table whose first column is text and whose others are figures."""
    table = Table(
        box=box.SIMPLE_HEAD if rich_look else None,
        header_style="bold",
        padding=(0, 1) if rich_look else (0, 2, 0, 0),
        pad_edge=rich_look,
    )
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place and not name.islower() else "left", overflow="fold")
    return table


def inspection_table(found: Inspection, *, rich_look: bool) -> RenderableType:
    """Return what is known of a file.

    Args:
        found: the inspection.
        rich_look: rules and colours, for a terminal.
    """
    writer = f", written as {found.writer}" if found.writer else ""
    parts: list[RenderableType] = [
        Text(f"{printable(found.path, 200)}: {format_size(found.size)}{printable(writer, 80)}", style="bold"),
        "",
        _datasets(found, rich_look),
    ]
    parts += [Text(line) for line in _classes(found)]
    unfit = [dataset for dataset in found.datasets if dataset.problem][:_MOST_DATASETS]
    if unfit:
        parts += ["", Text("Not to be trained from:")]
        parts += [Text(f"  {printable(each.name, 80)}: {printable(each.problem, 240)}") for each in unfit]
    parts += [Text(f"Note: {printable(note, 400)}.") for note in found.notes]
    if not found.line:
        return Group(*parts, "", Text("Nothing in this file can be trained from as it is."))
    parts += ["", Text(printable_lines(found.stream))]
    if found.advice:
        parts += ["", Text(f"To do: {printable(found.advice, 600)}.")]
    return Group(*parts, "", Text("from kerasmem import H5ChunkSequence"), Text(f"train = {printable(found.line)}"))


def printable_lines(text: str) -> str:
    """Return text of several lines with nothing in it that steers a terminal."""
    return "\n".join(printable(line) for line in text.splitlines())


def _datasets(found: Inspection, rich_look: bool) -> Table:
    columns = [
        "Dataset",
        "Shape",
        "Type",
        "Chunks",
        "Filters",
        "Stored",
        "As float32",
        f"Batch of {found.batch_size:,}",
    ]
    looked = any(dataset.nan_count is not None for dataset in found.datasets)
    summed = any(dataset.checksum for dataset in found.datasets)
    table = data_table(
        [*columns, *(["NaN", "Infinite"] if looked else []), *(["Checksum"] if summed else [])], rich_look
    )
    for dataset in found.datasets[:_MOST_DATASETS]:
        more: list[Any] = [_count(dataset.nan_count), _count(dataset.infinite_count)] if looked else []
        more += [dataset.checksum or "–"] if summed else []
        role = " (x)" if dataset.name == found.x else " (y)" if dataset.name == found.y else ""
        table.add_row(
            Text(middle(printable(dataset.name), 60) + role),
            _shape(dataset.shape),
            Text(printable(dataset.dtype, 30)),
            _chunks(dataset),
            Text(printable("+".join(dataset.filters), 40) or "–"),
            format_size(dataset.stored_bytes),
            "–" if dataset.float32_bytes is None else format_size(dataset.float32_bytes),
            "–" if dataset.batch_bytes is None else format_size(dataset.batch_bytes),
            *more,
        )
    if len(found.datasets) > _MOST_DATASETS:
        table.add_row(f"and {len(found.datasets) - _MOST_DATASETS:,} more")
    return table


def _classes(found: Inspection) -> Iterable[str]:
    shown = [dataset for dataset in found.datasets if dataset.class_counts and len(dataset.class_counts) > 1]
    shown.sort(key=lambda dataset: dataset.name != found.y)
    for dataset in shown[:8]:
        assert dataset.class_counts is not None
        counts = dataset.class_counts
        total = sum(counts.values())
        rows = [
            f"{printable(name, 30)} {100 * count / total:.1f} %" for name, count in list(counts.items())[:_MOST_CLASSES]
        ]
        more = f", … ({len(counts):,} in all)" if len(counts) > _MOST_CLASSES else ""
        ratio = max(counts.values()) / min(counts.values())
        balance = "balanced" if ratio < 1.05 else f"the most common {ratio:,.1f} times the rarest"
        yield f"Classes in {printable(dataset.name, 60)}: {', '.join(rows)}{more}; {balance}"


def _shape(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "–"
    return "×".join(f"{extent:,}" for extent in shape) or "one value"


def _chunks(dataset: DatasetReport) -> str:
    if dataset.chunks is None:
        return dataset.storage or "–"
    return "×".join(f"{extent:,}" for extent in dataset.chunks)


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
