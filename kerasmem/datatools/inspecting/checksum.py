"""The sum that tells whether a dataset still holds what was written: CRC-32 of its values, whatever their chunks."""

from __future__ import annotations

import zlib

import numpy as np

from kerasmem.streaming.file_order import read_windows


def checksum(path: str, name: str) -> int:
    """Return the CRC-32 of a dataset's values in order, little-endian."""
    value = 0
    for _, window in read_windows([path], [name]):
        array = window[name]
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        value = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, value)
    return value
