"""DataStats as text: a line for each dataset, and the lines that put them to use."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kerasmem.datatools.inspecting.results import DataStats
from kerasmem.rendering.data_inspection_table import data_table, printable_lines
from kerasmem.rendering.escape import middle, printable

_SHOWN = 4  # entries of a mean


def stats_table(found: DataStats, *, rich_look: bool) -> RenderableType:
    """Return the statistics of a file's datasets.

    Args:
        found: the statistics.
        rich_look: rules and colours, for a terminal.
    """
    scaled = f", features × {found.scale:.6g}" if found.scale != 1 else ""
    table = data_table(["Dataset", "Mean", "Variance", "Minimum", "Maximum", "NaN", "Infinite"], rich_look)
    for column in found.columns:
        table.add_row(
            Text(middle(printable(column.name), 60)),
            _some(column.mean),
            _some(column.variance),
            "–" if column.minimum is None else f"{column.minimum:.6g}",
            "–" if column.maximum is None else f"{column.maximum:.6g}",
            f"{column.nan_count:,}",
            f"{column.infinite_count:,}",
        )
    parts: list[RenderableType] = [
        Text(f"{printable(found.path, 200)}: {found.rows:,} rows{scaled}", style="bold"),
        "",
        table,
    ]
    if any(column.nan_count + column.infinite_count for column in found.columns):
        parts.append(Text("NaN and infinity are left out of the other figures."))
    if found.code:
        parts += ["", Text(printable_lines(found.code))]
    return Group(*parts)


def _some(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:.4g}" for value in values[:_SHOWN])
    return shown + (f", … ({len(values):,})" if len(values) > _SHOWN else "")
