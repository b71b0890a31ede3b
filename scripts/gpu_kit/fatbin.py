"""Device code in CUDA libraries: which parts a card can run, and which can be zeroed.

A library keeps its device code in the ELF section `.nv_fatbin`: containers one after the other, each with an entry
per architecture. An entry holds machine code, which runs on its own compute capability and on later ones of the same
major version, or PTX, which a driver compiles for any later one. Zeroed entries keep their place and size, so every
offset in the library stays right, and a compressor makes nothing of them.
Sources: the CUDA C++ programming guide ("Binary compatibility", "PTX compatibility"); the layout was checked against
what `nvcc` and `fatbinary` of CUDA 13.0 write.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of what follows
_ENTRY = struct.Struct("<HHIQIIHHI")  # kind, -, bytes of this header, bytes of the payload, -, -, -, -, architecture
_MAGIC = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2
_ALIGNMENT = 8  # of containers in a section
_ELF_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")


class BadLibraryError(ValueError):
    """A library that cannot be read as ELF, or device code that does not fit in its section."""


@dataclass(frozen=True)
class Entry:
    """Device code for one architecture.

    Attributes:
        is_ptx: PTX rather than machine code.
        capability: 10 × major + minor compute capability, such as 90.
        start: where the payload begins in the file, in bytes.
        size: of the payload, in bytes.
    """

    is_ptx: bool
    capability: int
    start: int
    size: int


def containers(data: bytes, start: int = 0) -> Iterator[list[Entry]]:
    """Yield the entries of each container in a section.

    Args:
        data: the section's bytes.
        start: where they begin in the file.

    Raises:
        BadLibraryError: a container or an entry goes past its end, or there is something else than both.
    """
    place = 0
    while place + _CONTAINER.size <= len(data):
        magic, _, header, size = _CONTAINER.unpack_from(data, place)
        if not magic:  # between the containers of two object files
            place += _ALIGNMENT
            continue
        if magic != _MAGIC or header < _CONTAINER.size or place + header + size > len(data):
            raise BadLibraryError(f"byte {start + place} of the file begins no container of device code")
        yield list(_entries(data, start, place + header, place + header + size))
        place += header + size
        place += -place % _ALIGNMENT


def _entries(data: bytes, start: int, place: int, end: int) -> Iterator[Entry]:
    while place + _ENTRY.size <= end:
        kind, _, header, size, *_, capability = _ENTRY.unpack_from(data, place)
        if header < _ENTRY.size or place + header + size > end:
            raise BadLibraryError(f"byte {start + place} of the file begins no entry of device code")
        yield Entry(kind == _PTX, capability, start + place + header, size)
        place += header + size


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


def section(file: BinaryIO, name: bytes) -> tuple[int, int] | None:
    """Return where a section of a 64-bit little-endian ELF file begins and its size in bytes; None if it has none.

    Raises:
        BadLibraryError: the file is another kind of file, or cut off.
    """
    file.seek(0)
    head = file.read(_ELF_HEADER.size)
    if head[:6] != b"\x7fELF\x02\x01" or len(head) < _ELF_HEADER.size:
        raise BadLibraryError("not a 64-bit little-endian ELF file")
    *_, table, _, _, _, _, each, count, names = _ELF_HEADER.unpack(head)
    if each != _SECTION.size:
        raise BadLibraryError(f"entries of {each} bytes in the table of sections, where {_SECTION.size} are usual")
    file.seek(table)
    raw = file.read(each * count)
    if len(raw) < each * count or names >= count:
        raise BadLibraryError("the table of sections is cut off")
    sections = list(_SECTION.iter_unpack(raw))
    file.seek(sections[names][4])
    texts = file.read(sections[names][5])
    for at, _, _, _, offset, size, *_ in sections:
        if texts[at : texts.find(b"\0", at)] == name:
            return offset, size
    return None


def trim(path: Path, capabilities: list[int]) -> int:
    """Zero the device code in a library that the cards do not need, in place; return how many bytes.

    Args:
        path: of a shared library. Files without device code stay as they are.
        capabilities: compute capabilities of the cards, such as 75 and 90; none: all device code goes.

    Raises:
        BadLibraryError: see `section` and `containers`.
    """
    zeroed = 0
    with path.open("r+b") as file:
        found = section(file, b".nv_fatbin")
        if found is None:
            return 0
        start, size = found
        file.seek(start)
        for entries in list(containers(file.read(size), start)):
            for entry in needless(entries, capabilities):
                file.seek(entry.start)
                file.write(bytes(entry.size))
                zeroed += entry.size
    return zeroed
