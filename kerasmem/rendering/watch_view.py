"""One look at a machine, and the course of its sizes, as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasmem.monitoring.scene import RunStatus, Scene
from kerasmem.rendering.escape import printable
from kerasmem.units import format_size

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[int], width: int) -> str:
    """Return a line of bars from 0 to the largest value; of more values than `width`, the largest of each stretch.

    Example:
        >>> sparkline([0, 2, 4, 8], 4), sparkline([1, 9, 1, 1], 2)
        ('▁▂▄█', '█▁')
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [place * len(values) // count for place in range(count + 1)]
    highest = [max(values[start:end]) for start, end in zip(edges, edges[1:])]  # noqa: B905, RUF007
    top = max(highest)
    return "".join(_BARS[0 if top <= 0 else min(7, max(0, value) * 8 // top)] for value in highest)


def watch_view(
    scene: Scene, history: Mapping[str, Sequence[int]] | None = None, *, rich_look: bool, width: int = 48
) -> RenderableType:
    """Return devices, processes and runs; beside each size its course where one is given.

    Args:
        scene: the look.
        history: values of `Scene.sizes` by name, the oldest first.
        rich_look: colours, for a terminal.
        width: characters for a course.
    """
    course = {name: sparkline(values, width) for name, values in (history or {}).items()}
    table = Table(box=None, header_style="bold" if rich_look else "", padding=(0, 2, 0, 0), pad_edge=False)
    for name, justify in (("", "left"), ("In use", "right"), ("Of", "right"), ("", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    machine = scene.machine
    for device in machine.devices:
        label = f"GPU {device.index} {printable(device.name or '?', 40)}"
        spark = Text(course.get(f"card {device.index}", ""))
        table.add_row(Text(label), format_size(device.used_bytes), format_size(device.total_bytes), spark)
    for other in scene.on_cards:
        who = f"  {other.pid} {printable(other.name or '?', 30)}" + (" (this)" if other.own else "")
        share = "" if other.share is None else f"{other.share:.0%} of it".replace("%", " %")
        table.add_row(Text(who), format_size(other.used_bytes), "", Text(share))
    host = machine.host
    used = host.total_bytes - host.available_bytes
    table.add_row("Host", format_size(used), format_size(host.total_bytes), Text(course.get("host", "")))
    if host.swap_total_bytes:
        table.add_row("  swap", format_size(host.swap_used_bytes), format_size(host.swap_total_bytes), "")
    for process in scene.processes:
        label = f"Process {process.pid} {printable(process.name, 30)}"
        if process.processes > 1:
            label += f" and {process.processes - 1} under it"
        spark = Text(course.get(f"process {process.pid}", ""))
        table.add_row(Text(label), format_size(process.tree_bytes), "", spark)
        if process.swap_bytes:
            table.add_row("  in swap", format_size(process.swap_bytes), "", "")
    lines = [Text(_run(run)) for run in scene.runs]
    remarks = [f"No GPU: {machine.reason}"] if machine.reason else []
    remarks += [*machine.notes, *(note for device in machine.devices for note in device.notes), *scene.limits.notes]
    return Group(table, *lines, *(Text(printable(remark), style="dim" if rich_look else "") for remark in remarks))


def _run(run: RunStatus) -> str:
    where = [run.phase]
    if run.epoch is not None:
        where.append(f"epoch {run.epoch + 1}")
    if run.batch is not None:
        where.append(f"batch {run.batch + 1}")
    sizes = []
    if run.in_use_bytes is not None:
        sizes.append(f"in use {format_size(run.in_use_bytes)}")
    if run.peak_bytes is not None:
        sizes.append(f"peak {format_size(run.peak_bytes)}")
    stale = f", {run.age_seconds:.0f} s ago" if run.age_seconds >= 5 else ""
    holder = "" if run.pid is None else f" (process {run.pid})"
    text = f"Run {run.run} in {printable(run.path, 80)}{holder}: {printable(', '.join(where), 60)}{stale}"
    return text + ("; " + ", ".join(sizes) if sizes else "")
