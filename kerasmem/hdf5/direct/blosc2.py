"""Chunks as HDF5's Blosc 2 filter writes them: a contiguous frame that holds one chunk, in blocks of several axes.

The layout is that of c-blosc2's documents "Contiguous frame format", "Chunk format" and "B2ND metalayer". Sizes are
checked before anything is decoded, and only the codecs and filters that Blosc 2 has in itself are decoded: for others
it looks for programs to load.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

_FRAME, _CHUNK = 97, 32  # bytes of a frame's header without metalayers, and of a chunk's
_MARKS = {0: 0x9E, 1: 0xA8, 10: 0xD2, 15: 0xCF, 24: 0xA4, 29: 0xD3, 38: 0xD3, 47: 0xD2, 52: 0xD2, 57: 0xD2,
          62: 0xD1, 65: 0xD1, 69: 0xD8, 70: 6, 91: 0xDE}  # fmt: skip
_CONTIGUOUS = 0  # the kind of frame, byte 26
_VERSION = 2  # of the format, in the lower half of byte 25; what is older is read as well
_PIPELINE = slice(71, 77)  # filters of the frame
_TRAILER = 35  # bytes without metalayers; the last 23: mark and length, and the mark, kind and value of a fingerprint
_CODECS = {0, 1, 3, 4}  # blosclz, lz4, zlib, zstd
_FILTERS = {0, 1, 2, 4}  # none, shuffle, bitshuffle, truncated precision; delta takes what lies in memory for data
_EXTENDED = 0x05  # flags of a chunk with the longer header
_SPECIAL, _UNINITIALISED = 0x70, 4  # a chunk of one value; 4: of whatever lies in memory
_USED_FLAGS = 0x71
_ZEROS = 0x81
_MOST_AXES = 8
_PADDED, _SMALL = 4, 1 << 20  # times, and bytes more, that a chunk may take with its blocks made whole

Fail = Callable[[str], Exception]


def decode_frame(stored: Any, out: np.ndarray, decode: Callable[..., Any], fail: Fail) -> Any:
    """Return the decoded bytes of a chunk.

    Args:
        stored: the frame.
        out: as many bytes as have to come out.
        decode: imagecodecs's decoder of a Blosc 2 chunk.
        fail: makes the error for a frame that is damaged.
    """
    data = bytes(stored)
    if len(data) < _FRAME or data[2:10] != b"b2frame\0" or any(data[at] != mark for at, mark in _MARKS.items()):
        raise fail("it is no Blosc 2 frame")
    if data[25] & 0x0F > _VERSION or data[26] != _CONTIGUOUS or not set(data[_PIPELINE]) <= _FILTERS:
        raise fail("it is of a kind, or has a filter, that is not known here")
    header, whole = _big(data[11:15]), _big(data[16:24])
    size, packed = _big(data[30:38]), _big(data[39:47])
    if whole != len(data) or not _FRAME <= header <= whole or packed > whole - header:
        raise fail(f"its header speaks of another size than the {len(data):,} bytes stored")
    _check_rest(data, header + packed, packed, decode, fail)
    blocks = _read_blocks(data[:header], fail)
    itemsize = _big(data[48:52])
    if not 0 < itemsize < 2**31 or _big(data[92:94]) != (blocks is not None):
        raise fail("it has an element of no size, or metalayers that are not known here")
    if blocks is not None:
        expected = itemsize * prod(-(-extent // block) * block for extent, block in zip(*blocks, strict=True))
        if itemsize * prod(blocks[0]) != out.nbytes or expected > _PADDED * out.nbytes + _SMALL:
            raise fail("its shape is not the chunk's")
    else:
        expected = out.nbytes
    if size != expected or _big(data[58:62]) != size:
        raise fail(f"it says it holds {size:,} bytes, and the chunk has {expected:,}")
    target = out if blocks is None or expected == out.nbytes else np.empty(expected, np.uint8)
    found = np.frombuffer(_decode_chunk(data[header:], target, packed, decode, fail), np.uint8)
    if blocks is None:
        return found
    return _put_together(found, *blocks, itemsize)


def _check_rest(data: bytes, at: int, packed: int, decode: Callable[..., Any], fail: Fail) -> None:
    """Check what follows the chunk, none of which the data is made of: where the chunk lies, and the trailer."""
    index = data[at:]
    place = bytes(_decode_chunk(index, np.empty(8, np.uint8), len(index), decode, fail))
    if index[3] != len(place) or (packed and any(place)):
        raise fail("its chunk lies elsewhere")
    trailer = index[_little(index[12:16]) :]
    end = trailer[-23:]
    whole = len(trailer) == _TRAILER and trailer[6:9] == b"\xde\0\0" and end[0] == 0xCE and end[5] == 0xD8
    if not whole or _big(end[1:5]) != len(trailer):
        raise fail("its trailer is damaged, or holds what is not known here")


def _decode_chunk(data: bytes, target: np.ndarray, packed: int, decode: Callable[..., Any], fail: Fail) -> Any:
    if not packed:  # nothing but a place, whose highest byte says that all are zeros
        if bytes(_decode_chunk(data, np.empty(8, np.uint8), len(data), decode, fail))[7] != _ZEROS:
            raise fail("it holds one value alone, in a way that is not known here")
        target[...] = 0
        return target
    if len(data) < _CHUNK or _little(data[4:8]) != target.nbytes or not _CHUNK <= _little(data[12:16]) <= packed:
        raise fail("the chunk in its frame has another size")
    flags, more = data[2], data[31]
    known = not data[30] and flags & _EXTENDED == _EXTENDED and flags >> 5 in _CODECS and set(data[16:22]) <= _FILTERS
    if not known or more & ~_USED_FLAGS or (more & _SPECIAL) >> 4 >= _UNINITIALISED:
        raise fail("it is packed by a codec or filter that is not known here")
    return decode(data[: _little(data[12:16])], numthreads=1, out=target)


def _read_blocks(header: bytes, fail: Fail) -> tuple[list[int], list[int]] | None:
    """Return the extents of a chunk and of its blocks, in elements; None where it has one dimension."""
    name = header.find(b"\xa4b2nd\xd2", 94)
    if name < 0:
        return None
    at = _big(header[name + 6 : name + 10])
    if len(header) < at + 8 or header[at] != 0xC6:
        raise fail("its dimensions cannot be read")
    content = header[at + 5 :]
    axes = content[2]
    chunk, block = 5 + 9 * axes, 6 + 14 * axes
    if not 0 < axes <= _MOST_AXES or len(content) < block + 5 * axes:
        raise fail("its dimensions cannot be read")
    extents = [
        _big(content[first + 5 * axis + 1 : first + 5 * axis + 5]) for first in (chunk, block) for axis in range(axes)
    ]
    if not all(0 < extent < 2**31 for extent in extents):
        raise fail("its dimensions cannot be read")
    return extents[:axes], extents[axes:]


def _put_together(found: np.ndarray, chunk: list[int], block: list[int], itemsize: int) -> np.ndarray:
    """Return the bytes of a chunk in order, of one that lies there block by block."""
    counts = [-(-extent // size) for extent, size in zip(chunk, block, strict=True)]
    axes = len(chunk)
    pieces = found.view(np.dtype((np.void, itemsize))).reshape(*counts, *block)
    order = [axis for pair in zip(range(axes), range(axes, 2 * axes), strict=True) for axis in pair]
    whole = pieces.transpose(order).reshape([count * size for count, size in zip(counts, block, strict=True)])
    return np.ascontiguousarray(whole[tuple(slice(extent) for extent in chunk)]).reshape(-1).view(np.uint8)


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")
