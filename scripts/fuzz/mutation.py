"""Random changes of bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence

WORDS = (0, 1, 2, 3, 4, 7, 8, 16, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
           2**63 - 1,
         2**63, 2**64 - 1)  # fmt: skip
Zone = tuple[int, int]
"""First byte, and the one after the last."""


def mutate(data: bytes, draw: random.Random, zones: Sequence[Zone] = (), *, resize: bool = True) -> bytes:
    """Return bytes with some changes.

    Args:
        data: Original bytes.
        draw: Random numbers of the case.
        zones: Ranges with most of the changes. Defaults to all bytes.
        resize: Whether bytes may be inserted and deleted.
    """
    out = bytearray(data)
    for _ in range(min(12, 1 + int(draw.expovariate(0.8)))):  # mostly one or two
        if not out:
            break
        low, high = draw.choice(zones) if zones and draw.random() < 0.9 else (0, len(out))
        low, high = min(low, len(out) - 1), max(min(high, len(out)), min(low, len(out) - 1) + 1)
        at = draw.randrange(low, high)
        kinds = (_flip, _byte, _word, _near, _copy, _swap, _zero)
        if resize and draw.random() < 0.12:
            _resize(out, at, draw)
        else:
            draw.choice(kinds)(out, at, (low, high), draw)
    return bytes(out)


def _flip(out: bytearray, at: int, zone: Zone, draw: random.Random) -> None:
    out[at] ^= 1 << draw.randrange(8)


def _byte(out: bytearray, at: int, zone: Zone, draw: random.Random) -> None:
    out[at] = draw.choice((0, 1, 2, 3, 0x7F, 0x80, 0xFE, 0xFF, draw.randrange(256)))


def _word(out: bytearray, at: int, zone: Zone, draw: random.Random) -> None:
    size = draw.choice((2, 4, 8))
    value = draw.choice((*WORDS, len(out), len(out) - at, at, draw.randrange(len(out))))
    put(out, at, (value % (1 << 8 * size)).to_bytes(size, draw.choice(("little", "little", "big"))))


def _near(out: bytearray, at: int, zone: Zone, draw: random.Random) -> None:
    """Change a number slightly or by powers of two."""
    size = draw.choice((1, 2, 4, 8))
    value = int.from_bytes(out[at : at + size], "little")
    value = draw.choice((value + 1, value - 1, value * 2, value // 2, value + 8, value - 8, value * 256, value + 4096))
    put(out, at, (value % (1 << 8 * size)).to_bytes(size, "little"))


def _copy(out: bytearray, at: int, zone: Zone, draw: random.Random) -> None:
    size, other = draw.choice((1, 4, 8, 8, 16, 24, 64)), draw.randrange(*zone)
    put(out, at, bytes(out[other : other + size]))


def _swap(out: bytearray, at: int, zone: Zone, draw: random.Random) -> None:
    size, other = draw.choice((4, 8, 8, 16)), draw.randrange(*zone)
    one, two = bytes(out[at : at + size]), bytes(out[other : other + size])
    put(out, at, two)
    put(out, other, one)


def _zero(out: bytearray, at: int, zone: Zone, draw: random.Random) -> None:
    put(out, at, bytes([draw.choice((0, 0xFF))]) * draw.choice((2, 4, 8, 16, 64)))


def _resize(out: bytearray, at: int, draw: random.Random) -> None:
    size = draw.choice((1, 4, 8, 100))
    kind = draw.randrange(4)
    if kind == 0:
        del out[at:]
    elif kind == 1:
        del out[at : at + size]
    elif kind == 2:
        out[at:at] = draw.randbytes(size)
    else:
        out += draw.randbytes(size)


def put(out: bytearray, at: int, value: bytes) -> None:
    """Overwrite bytes without growing."""
    room = len(out) - at
    out[at : at + len(value)] = value[:room]
