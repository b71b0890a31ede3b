"""The catalogue of cards and the devices of this machine, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasmem.devices.cards import Card
from kerasmem.devices.live import LiveMachine
from kerasmem.rendering.escape import printable
from kerasmem.units import format_size


def devices_table(
    cards: Sequence[tuple[Card, int]], machine: LiveMachine, *, rich_look: bool, sources: bool
) -> RenderableType:
    """Return both tables, for a terminal or (plain) for a pipe.

    Args:
        cards: rows of the catalogue, each with the bytes that TensorFlow can get of it.
        machine: what is here.
        rich_look: rules and colours, for a terminal.
        sources: the address that each card's memory figure comes from.
    """
    parts: list[RenderableType] = [Text("In this machine", style="bold"), _machine(machine, rich_look)]
    parts += [Text(printable(line)) for line in _remarks(machine)]
    parts += [
        "",
        Text("Catalogue (the names that --device takes)", style="bold"),
        _catalogue(cards, rich_look, sources),
    ]
    parts.append(
        Text(
            "Memory is the total that the driver reports, nominal (~) where no report was found. "
            "For TensorFlow: less what TensorFlow leaves to the system; the CUDA context still goes off that.",
            style="dim",
        )
    )
    return Group(*parts)


def _table(rich_look: bool) -> Table:
    return Table(
        box=box.SIMPLE_HEAD if rich_look else None,
        header_style="bold",
        padding=(0, 1) if rich_look else (0, 2, 0, 0),
        pad_edge=rich_look,
    )


def _machine(machine: LiveMachine, rich_look: bool) -> Table:
    table = _table(rich_look)
    for name, justify in (("Device", "left"), ("Memory", "right"), ("In use", "right"), ("Free", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for device in machine.devices:
        number = "hidden" if device.cuda_index is None else f"GPU:{device.cuda_index}"
        table.add_row(
            Text(f"{number}  {printable(device.name or '?', 60)}"),
            *(format_size(size) for size in (device.total_bytes, device.used_bytes, device.free_bytes)),
        )
    host = machine.host
    used = host.total_bytes - host.available_bytes
    table.add_row("Host", format_size(host.total_bytes), format_size(used), format_size(host.available_bytes))
    return table


def _remarks(machine: LiveMachine) -> Iterable[str]:
    if machine.reason:
        yield f"No GPU: {machine.reason}"
    yield from machine.notes
    for device in machine.devices:
        yield from device.notes


def _catalogue(cards: Sequence[tuple[Card, int]], rich_look: bool, sources: bool) -> Table:
    table = _table(rich_look)
    table.add_column("Name", no_wrap=True)
    table.add_column("Card", no_wrap=True)
    table.add_column("Memory", justify="right", no_wrap=True)
    table.add_column("For TensorFlow", justify="right", no_wrap=True)
    table.add_column("Compute", justify="right", no_wrap=True)
    if sources:
        table.add_column("Source", overflow="fold")
    for card, available in cards:
        nominal = "" if card.memory_basis == "driver" else "~"
        cells: list[Any] = [
            card.key,
            card.name,
            nominal + format_size(card.memory_bytes),
            format_size(available),
            "{}.{}".format(*card.compute_capability),
        ]
        table.add_row(*cells, *([card.memory_source] if sources else []))
    return table
