"""One look at a machine, and the course of its sizes, as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.monitoring.snapshot import RunStatus, Snapshot
from kerasmem.rendering.devices_table import machine_remarks
from kerasmem.rendering.escape import printable
from kerasmem.rendering.layout import BLOCKS, figures, highest
from kerasmem.units import format_size


def sparkline(values: Sequence[int], width: int) -> str:
    """Return a line of bars from 0 to the largest value; of more values than `width`, the largest of each stretch.

    Examples:
        >>> sparkline([0, 2, 4, 8], 4), sparkline([1, 9, 1, 1], 2)
        ('▁▂▄█', '█▁')
    """
    if not values or width < 1:
        return ""
    heights = highest(values, width)
    top = max(heights)
    return "".join(BLOCKS[0 if top <= 0 else min(7, max(0, height) * 8 // top)] for height in heights)


def watch_view(
    snapshot: Snapshot,
    terminal: int | None = None,
    *,
    history: Mapping[str, Sequence[int]] | None = None,
    width: int = 48,
) -> RenderableType:
    """Return devices, processes and runs; beside each size its course where one is given.

    Args:
        snapshot: the look.
        terminal: columns of one, None for plain text.
        history: values of `Snapshot.sizes` by name, the oldest first.
        width: characters for a course.
    """
    course = {name: sparkline(values, width) for name, values in (history or {}).items()}
    styled = terminal is not None
    columns = (Column(no_wrap=True), figures("In use"), figures("Of"), Column(no_wrap=True))
    table = Table(*columns, box=None, header_style="bold" if styled else "", padding=(0, 2, 0, 0), pad_edge=False)

    def add(label: str, used: int | None, total: str = "", last: str = "") -> None:
        table.add_row(Text(label), format_size(used), total, Text(last))

    machine = snapshot.machine
    for device in machine.devices:
        label = f"GPU {device.index} {printable(device.name or '?', 40)}"
        add(label, device.used_bytes, format_size(device.total_bytes), course.get(f"card {device.index}", ""))
    for other in snapshot.on_cards:
        share = "" if other.share is None else f"{other.share:.0%} of it".replace("%", " %")
        label = f"  {other.pid} {printable(other.name or '?', 30)}{' (this)' if other.own else ''}"
        add(label, other.used_bytes, last=share)
    host = machine.host
    add("Host", host.total_bytes - host.available_bytes, format_size(host.total_bytes), course.get("host", ""))
    if host.swap_total_bytes:
        add("  swap", host.swap_used_bytes, format_size(host.swap_total_bytes))
    for process in snapshot.processes:
        under = f" and {process.processes - 1} under it" if process.processes > 1 else ""
        label = f"Process {process.pid} {printable(process.name, 30)}{under}"
        add(label, process.tree_bytes, last=course.get(f"process {process.pid}", ""))
        if process.swap_bytes:
            add("  in swap", process.swap_bytes)
    remarks = [*machine_remarks(machine), *snapshot.limits.notes]
    return Group(
        table,
        *(Text(_run(run)) for run in snapshot.runs),
        *(Text(printable(remark), style="dim" if styled else "") for remark in remarks),
    )


def _run(run: RunStatus) -> str:
    counts = (("epoch", run.epoch), ("batch", run.batch))
    where = [run.phase, *(f"{name} {count + 1}" for name, count in counts if count is not None)]
    known = (("in use", run.in_use_bytes), ("peak", run.peak_bytes))
    sizes = [f"{name} {format_size(size)}" for name, size in known if size is not None]
    stale = f", {run.age_seconds:.0f} s ago" if run.age_seconds >= 5 else ""
    holder = "" if run.pid is None else f" (process {run.pid})"
    text = f"Run {run.run} in {printable(run.path, 80)}{holder}: {printable(', '.join(where), 60)}{stale}"
    return text + ("; " + ", ".join(sizes) if sizes else "")
