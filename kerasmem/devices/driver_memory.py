"""Memory of a card that a training process takes beside its allocator, from `data/driver_memory.json`.

A row is one figure: "read" with the address where somebody printed it, or "predicted" from the rows that were read.
None was read by this project. TensorFlow looks at what is free when its CUDA context exists already, and leaves a part
of it to the system (`kerasmem.devices.catalogue.available_bytes`). What libraries take later (cuBLAS, cuDNN, NCCL)
comes out of that part, so the verdict on a card takes off the context, and not the libraries again.

A context grows with the multiprocessors, of which each keeps memory for the threads that it can hold. So of
several readings of one compute capability that of the next larger card stands for a card, and beyond the largest one
the figure grows in proportion.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kerasmem.devices.cards import Card, hardware_of, parse_capability
from kerasmem.files import package_data

CONTEXT = "CUDA context"


@dataclass(frozen=True)
class DriverShare:
    """One figure of a process's memory on a card.

    Attributes:
        part: "CUDA context", "cuBLAS workspace", "cuDNN" or "NCCL".
        capability: (major, minor) of the card; for libraries the least that it holds for.
        card: the card, by the catalogue's key if it has it; None if no card was read.
        multiprocessors: of that card.
        size_bytes: the figure; None if unknown.
        basis: "read" or "predicted".
        framework: the running framework, with its version.
        source: the address; None for a prediction.
        note: kind of the figure.
    """

    part: str
    capability: tuple[int, int]
    card: str | None
    multiprocessors: int | None
    size_bytes: int | None
    basis: str
    framework: str
    source: str | None
    note: str


@functools.cache
def driver_shares() -> tuple[DriverShare, ...]:
    """Return every row of the table."""
    rows = package_data(__package__, "driver_memory")["rows"]
    return tuple(DriverShare(**{**row, "capability": parse_capability(row["capability"])}) for row in rows)


def context_of(card: Card) -> tuple[int, str]:
    """Return the bytes that a CUDA context takes of a card, and "read" or "predicted".

    Args:
        card: of the catalogue.

    Examples:
        >>> from kerasmem.devices.catalogue import find_card
        >>> context_of(find_card("t4"))
        (230686720, 'read')
    """
    rows = _contexts(card.compute_capability)
    own = [size for _, size, share in rows if share.card == card.key and share.basis == "read"]
    if own:
        return max(own), "read"
    hardware = hardware_of(card)
    most, size, _ = max(rows, key=lambda row: row[:2])
    if hardware is None or not most:
        return size, "predicted"
    larger = [row for row in rows if row[0] >= hardware["sms"]]
    if larger:
        return min(larger, key=lambda row: row[:2])[1], "predicted"
    return size * hardware["sms"] // most, "predicted"


def context_for(capability: tuple[int, int]) -> int:
    """Return the bytes of the largest CUDA context that is known for a compute capability, or for one below it."""
    known = {share.capability for share in driver_shares() if share.part == CONTEXT}
    nearest = max((each for each in known if each <= capability), default=min(known))
    return max(size for _, size, _ in _contexts(nearest))


def _contexts(capability: tuple[int, int]) -> list[tuple[int, int, DriverShare]]:
    """Return multiprocessors, bytes and row of each context of a compute capability."""
    return [
        (share.multiprocessors or 0, share.size_bytes or 0, share)
        for share in driver_shares()
        if share.part == CONTEXT and share.capability == capability
    ]
