"""The catalogue of cards and the devices of this machine, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.devices.cards import Card
from kerasmem.devices.live import LiveMachine
from kerasmem.rendering.escape import printable
from kerasmem.rendering.layout import figures, table, words
from kerasmem.units import format_size

_REMARK = (
    "Memory is the total that the driver reports, nominal (~) where no report was found. "
    "For TensorFlow: less the CUDA context, predicted where nobody read it, and what TensorFlow leaves to the system."
)


def devices_table(
    cards: Sequence[tuple[Card, int]], machine: LiveMachine, terminal: int | None = None, *, sources: bool = False
) -> RenderableType:
    """Return both tables.

    Args:
        cards: rows of the catalogue, each with the bytes that TensorFlow can get of it.
        machine: what is here.
        terminal: columns of one, None for plain text.
        sources: whether to show the address that each card's memory figure comes from.
    """
    return Group(
        Text("In this machine", style="bold"),
        _machine(machine, terminal),
        *(Text(printable(line)) for line in _remarks(machine)),
        "",
        Text("Catalogue (the names that --device takes)", style="bold"),
        _catalogue(cards, terminal, sources),
        Text(_REMARK, style="dim"),
    )


def _remarks(machine: LiveMachine) -> Iterable[str]:
    """Yield why there is no GPU, and what is worth knowing of the devices."""
    if machine.reason:
        yield f"No GPU: {machine.reason}"
    yield from machine.notes
    for device in machine.devices:
        yield from device.notes


def _machine(machine: LiveMachine, terminal: int | None) -> Table:
    rows = table(terminal, "Device", *map(figures, ("Memory", "In use", "Free")))
    for device in machine.devices:
        number = "hidden" if device.cuda_index is None else f"GPU:{device.cuda_index}"
        name = f"{number}  {printable(device.name or '?', 60)}"
        rows.add(name, device.total_bytes, device.used_bytes, device.free_bytes)
    host = machine.host
    rows.add("Host", host.total_bytes, host.total_bytes - host.available_bytes, host.available_bytes)
    return rows


def _catalogue(cards: Sequence[tuple[Card, int]], terminal: int | None, sources: bool) -> Table:
    names = (Column(name, no_wrap=True) for name in ("Name", "Card"))
    source = words("Source") if sources else None
    rows = table(terminal, *names, *map(figures, ("Memory", "For TensorFlow", "Compute")), source)
    for card, available in cards:
        memory = ("" if card.memory_basis == "driver" else "~") + format_size(card.memory_bytes)
        capability = "{}.{}".format(*card.compute_capability)
        rows.add(card.key, card.name, memory, available, capability, card.memory_source)
    return rows
