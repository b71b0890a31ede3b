"""A Bench as text: what comes out, what it is made of, what limits it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kerasmem.datatools.inspecting.results import Bench
from kerasmem.rendering.data_inspection_table import data_table
from kerasmem.rendering.escape import printable
from kerasmem.units import format_size

_STAGES = {
    "disk": "read from the disk",
    "memory": "read from the system's cache",
    "unpacking": "unpack chunks",
    "conversion": "convert to float32",
    "copying": "copy rows into batches, and all else",
}


def bench_table(found: Bench, *, rich_look: bool) -> RenderableType:
    """Return what a file delivers.

    Args:
        found: the measurement.
        rich_look: rules and colours, for a terminal.
    """
    title = Text(f"{printable(found.path, 200)}: ", style="bold")
    title.append(
        f"{found.rows:,} rows, {format_size(found.stored_bytes)} stored, {format_size(found.delivered_bytes)} delivered"
    )
    epochs = data_table(["An epoch of these rows", "Seconds", "Rows/s", "Delivered/s"], rich_look)
    for name, seconds in (("file not in the cache", found.cold_seconds), ("file in the cache", found.warm_seconds)):
        if seconds is not None:
            rate = found.delivered_bytes / seconds if seconds else 0
            epochs.add_row(
                name, f"{seconds:.3f}", f"{found.rows / max(seconds, 1e-9):,.0f}", f"{format_size(round(rate))}"
            )
    steps = data_table(["Step by itself", "Seconds", "Rate", "of bytes", "Threads"], rich_look)
    for stage in found.stages:
        if stage.seconds is not None:
            rate_text = "–" if stage.rate is None else f"{format_size(round(stage.rate))}/s"
            steps.add_row(_STAGES[stage.name], f"{stage.seconds:.3f}", rate_text, stage.of, str(stage.threads))
    limits = f"Limit: {found.limit}"
    if found.warm_limit != found.limit:
        limits += f"; with the file in the cache: {found.warm_limit}"
    return Group(
        title,
        Text(printable(found.line)),
        "",
        epochs,
        "",
        steps,
        "",
        Text(f"{limits}."),
        Text(f"To do: {printable(found.advice)}."),
    )
