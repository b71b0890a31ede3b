"""Device code in CUDA libraries: which parts a card can run, and which can be zeroed.

A library keeps its device code in containers, each with an entry per architecture. An entry holds machine code, which
runs on its own compute capability and on later ones of the same major version, or PTX, which a driver compiles for any
later one. Zeroed entries keep their place and size, so every offset in the library stays right, and a compressor makes
nothing of them.
Sources: the CUDA C++ programming guide ("Binary compatibility", "PTX compatibility"); the layout was checked against
what `nvcc` of CUDA 13.0 writes and against all libraries of CUDA 12.9. Most keep their containers in the section
`.nv_fatbin`, cuFFT and cuBLASLt elsewhere as well, so they are found by their first bytes.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CONTAINER = struct.Struct("<8sQ")  # magic, version 1 and the 16 bytes of this header; bytes of what follows
_BEGIN = b"\x50\xed\x55\xba\x01\x00\x10\x00"
_ENTRY = struct.Struct("<HHIQIIHHI")  # kind, -, bytes of this header, bytes of the payload, -, -, -, -, architecture
_PTX = 1


@dataclass(frozen=True)
class Entry:
    """Device code for one architecture.

    Attributes:
        is_ptx: PTX rather than machine code.
        capability: 10 × major + minor compute capability, such as 90.
        start: where the payload begins, in bytes.
        size: of the payload, in bytes.
    """

    is_ptx: bool
    capability: int
    start: int
    size: int


def containers(data: bytes | mmap.mmap) -> Iterator[list[Entry]]:
    """Yield the entries of each container in a library. What only begins as one does is passed over."""
    place = 0
    while (place := data.find(_BEGIN, place)) >= 0 and place + _CONTAINER.size <= len(data):
        body = place + _CONTAINER.size
        end = body + _CONTAINER.unpack_from(data, place)[1]
        entries = _entries(data, body, end) if end <= len(data) else None
        if entries is None:
            place += len(_BEGIN)
        else:
            yield entries
            place = end


def _entries(data: bytes | mmap.mmap, place: int, end: int) -> list[Entry] | None:
    """Entries that fill the bytes up to an end; None if they do not."""
    entries = []
    while place + _ENTRY.size <= end:
        kind, _, header, size, *_, capability = _ENTRY.unpack_from(data, place)
        if header < _ENTRY.size:
            return None
        entries.append(Entry(kind == _PTX, capability, place + header, size))
        place += header + size
    return entries if place == end else None


def needless(entries: list[Entry], capabilities: list[int]) -> list[Entry]:
    """Return the entries of a container that none of the cards needs.

    A card takes the newest machine code that it can run, or else the newest PTX that its driver can compile.

    Args:
        entries: of one container.
        capabilities: compute capabilities of the cards, such as 75 and 90; none: no entry is needed.
    """
    needed: set[Entry] = set()
    for card in capabilities:
        code = [
            entry
            for entry in entries
            if not entry.is_ptx and entry.capability // 10 == card // 10 and entry.capability <= card
        ]
        runs = code or [entry for entry in entries if entry.is_ptx and entry.capability <= card]
        newest = max((entry.capability for entry in runs), default=None)
        needed.update(entry for entry in runs if entry.capability == newest)
    return [entry for entry in entries if entry not in needed]


def trim(path: Path, capabilities: list[int]) -> int:
    """Zero the device code in a library that the cards do not need, in place; return how many bytes.

    Args:
        path: of a shared library. Files without device code stay as they are.
        capabilities: compute capabilities of the cards, such as 75 and 90; none: all device code goes.
    """
    zeroed = 0
    if not path.stat().st_size:
        return zeroed
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for entries in containers(data):
            for entry in needless(entries, capabilities):
                data[entry.start : entry.start + entry.size] = bytes(entry.size)
                zeroed += entry.size
    return zeroed
