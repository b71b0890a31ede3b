"""The checksums of HDF5's newer structures, so that a changed structure is read and not refused at once.

Each is Bob Jenkins's lookup3 (`hashlittle`, http://burtleburtle.net/bob/c/lookup3.c) of all bytes before it, as the
HDF5 File Format Specification requires. In the sound file a structure ends at the first correct checksum.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

_SIGNATURES = re.compile(
    rb"\x89HDF\r\n\x1a\n[\x02\x03]|OHDR|OCHK|FRHP|FHDB|FHIB|FSHD|FSSE|FAHD|FADB|EAHD|EAIB|EASB|EADB|BTHD|BTIN|BTLF|SMTB|SMLI"
)
_LONGEST = 4096
_MASK = 0xFFFFFFFF


def find_sums(data: bytes) -> list[tuple[int, int]]:
    """Return the offsets of each structure with a checksum in a sound file, and of its checksum."""
    places = []
    for match in _SIGNATURES.finditer(data):
        start = match.start()
        block = data[start : start + _LONGEST]
        lengths = np.arange(8, max(8, len(block) - 4))
        if not len(lengths):
            continue
        stored = np.lib.stride_tricks.sliding_window_view(np.frombuffer(block, np.uint8), 4)[lengths]
        words = stored.astype(np.int64) @ np.array([1, 1 << 8, 1 << 16, 1 << 24])
        right = np.flatnonzero(_sums(block, lengths) == words)
        if len(right):
            places.append((start, start + int(lengths[right[0]])))
    return places


def put_sums(data: bytes, sound: bytes, places: Sequence[tuple[int, int]]) -> bytes:
    """Return a changed file with correct checksums of the changed structures."""
    out = bytearray(data)
    for start, end in places:
        if end + 4 <= len(out) and data[start : end + 4] != sound[start : end + 4]:
            block = bytes(out[start:end])
            out[end : end + 4] = int(_sums(block, np.array([len(block)]))[0]).to_bytes(4, "little")
    return bytes(out)


def _sums(data: bytes, lengths: np.ndarray) -> np.ndarray:
    """Return the checksum of the first bytes for each length."""
    longest = int(lengths.max())
    padded = data[:longest].ljust((longest + 11) // 12 * 12 + 12, b"\0")
    words = np.frombuffer(padded, "<u4").astype(np.int64)
    a = (0xDEADBEEF + lengths) & _MASK
    b, c = a.copy(), a.copy()
    blocks = (lengths - 1) // 12  # mixed before the last one, which is mixed in another way
    for number in range(int(blocks.max())):
        on = blocks > number
        a[on], b[on], c[on] = _mix(*(value[on] + words[3 * number + index] for index, value in enumerate((a, b, c))))
    for index, value in enumerate((a, b, c)):
        rest = np.clip(lengths - 12 * blocks - 4 * index, 0, 4)
        value += words[3 * blocks + index] & ((1 << 8 * rest) - 1)
        value &= _MASK
    return np.asarray(_final(a, b, c))


def _rotate(value: Any, bits: int) -> Any:
    return (value << bits | value >> 32 - bits) & _MASK


def _mix(a: Any, b: Any, c: Any) -> tuple[Any, Any, Any]:
    """Mix three words, as Python integers or NumPy's of 64 bits."""
    for first, second, third in ((4, 6, 8), (16, 19, 4)):
        a = ((a - c) & _MASK) ^ _rotate(c & _MASK, first)
        c = (c + b) & _MASK
        b = ((b - a) & _MASK) ^ _rotate(a, second)
        a = (a + c) & _MASK
        c = ((c - b) & _MASK) ^ _rotate(b, third)
        b = (b + a) & _MASK
    return a, b, c


def _final(a: Any, b: Any, c: Any) -> Any:
    c = ((c ^ b) - _rotate(b, 14)) & _MASK
    a = ((a ^ c) - _rotate(c, 11)) & _MASK
    b = ((b ^ a) - _rotate(a, 25)) & _MASK
    c = ((c ^ b) - _rotate(b, 16)) & _MASK
    a = ((a ^ c) - _rotate(c, 4)) & _MASK
    b = ((b ^ a) - _rotate(a, 14)) & _MASK
    return ((c ^ b) - _rotate(b, 24)) & _MASK
