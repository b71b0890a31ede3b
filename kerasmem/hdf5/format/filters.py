"""Decode the filters of a chunk.

A decoder takes the stored bytes and an output array of the expected size, and returns that array or other bytes. If the
stored bytes are damaged, it raises or returns another size, but never allocates more than the expected size. All
decoders release the GIL.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import numpy as np

Decoder = Callable[[Any, np.ndarray], Any]

GZIP, SHUFFLE, FLETCHER32 = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32
BZIP2, LZF, BLOSC, ZSTD = 307, 32000, 32001, 32015
_BLOSC_HEADER = 16  # bytes; the decoder trusts the sizes in them
EXTRA = frozenset({LZF, BLOSC, ZSTD})  # decoded with `kerasmem[codecs]`
_CHECKSUM = 4  # bytes after the data
_WORDS = {2: "<u2", 4: "<u4"}  # by size in bytes; shuffled chunks begin with the lowest byte
_PIECE = 1 << 16  # elements unshuffled, or words summed, in one NumPy call


class Scratch:
    """Named byte buffers that grow to the largest requested size."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, name: str, size: int) -> np.ndarray:
        """Return the first `size` bytes of a buffer. They are shared with earlier results of the same name."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size]


def view_of(array: np.ndarray) -> memoryview:
    """Return the bytes of an array as a view."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


class DecodeError(Exception):
    """Stored bytes contradict the file. The text follows "cannot be read: "."""


def register_filters() -> bool:
    """Register the filters of `kerasmem[codecs]` with h5py. Return whether they are installed."""
    return _load("hdf5plugin") is not None


def find_decoder(filter_code: int) -> Decoder | None:
    """Return the decoder of an HDF5 filter, or None if kerasmem has none."""
    if filter_code == GZIP:
        return _libdeflate if _load("deflate") is not None else _zlib
    if filter_code == BZIP2:
        return _bzip2
    return _WITH_CODECS.get(filter_code) if _load("imagecodecs") is not None else None


def is_undone_here(filter_code: int) -> bool:
    """Return whether kerasmem decodes a filter itself, so that HDF5 never sees the chunk."""
    return filter_code in (SHUFFLE, FLETCHER32) or find_decoder(filter_code) is not None


@functools.cache
def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _libdeflate(stored: Any, out: np.ndarray) -> Any:
    return _load("deflate").zlib_decompress(stored, out.nbytes)


def _zlib(stored: Any, out: np.ndarray) -> Any:
    return _all_of(zlib.decompressobj(), stored, out.nbytes)


def _bzip2(stored: Any, out: np.ndarray) -> Any:
    import bz2

    return _all_of(bz2.BZ2Decompressor(), bytes(stored), out.nbytes)


def _all_of(decoder: Any, stored: Any, size: int) -> bytes:
    result: bytes = decoder.decompress(stored, size)
    rest = getattr(decoder, "unconsumed_tail", b"")  # bz2 keeps it inside the decoder
    # Only the checksum may be left.
    if not decoder.eof and (decoder.decompress(rest, 1) or not decoder.eof):
        raise DecodeError("the compressed data is cut off, or longer than the chunk")
    return result


def _lzf(stored: Any, out: np.ndarray) -> Any:
    return _load("imagecodecs").lzf_decode(stored, out=out)


def _zstd(stored: Any, out: np.ndarray) -> Any:
    return _load("imagecodecs").zstd_decode(stored, out=out)


def _blosc(stored: Any, out: np.ndarray) -> Any:
    sizes = int.from_bytes(stored[4:8], "little"), int.from_bytes(stored[12:16], "little")
    if len(stored) < _BLOSC_HEADER or sizes != (out.nbytes, len(stored)):  # Blosc would read beyond the buffers
        raise DecodeError(f"its header has the sizes {sizes}; they are {out.nbytes:,} and {len(stored):,} bytes")
    return _load("imagecodecs").blosc_decode(stored, numthreads=1, out=out)


_WITH_CODECS: dict[int, Decoder] = {LZF: _lzf, BLOSC: _blosc, ZSTD: _zstd}


class Pipeline:
    """The filters of one dataset.

    Args:
        filters: code and parameters of each filter, in the file's order.
        chunk_bytes: size of a decoded chunk in bytes.

    Raises:
        DecodeError: If kerasmem has no decoder for a filter.
    """

    def __init__(self, filters: Sequence[tuple[int, tuple[int, ...]]], chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.filters = tuple(filters)
        self._decoders = {}
        for code, parameters in filters:
            if code == SHUFFLE and not any(parameters[:1]):
                raise DecodeError("its shuffle filter has no element size")
            if code not in (SHUFFLE, FLETCHER32):
                decoder = find_decoder(code)
                if decoder is None:
                    raise DecodeError(f"filter {code} is not known here")
                self._decoders[code] = decoder

    def most_stored(self) -> int:
        """Return the largest size of an undamaged chunk in the file, in bytes."""
        return self.chunk_bytes + self.chunk_bytes // 8 + (4096 if self.filters else 0)

    def decode(self, stored: np.ndarray, mask: int, scratch: Scratch) -> np.ndarray:
        """Return the decoded bytes of a chunk. They may be a view of `scratch`.

        Args:
            stored: the bytes in the file.
            mask: bit i is set if filter i was skipped for this chunk.
            scratch: buffers of this thread.

        Raises:
            DecodeError: If the bytes are damaged.
        """
        sizes: list[int | None] = []  # input size of each filter when the chunk was written, if known
        size: int | None = self.chunk_bytes
        for index, (code, _) in enumerate(self.filters):
            sizes.append(size)
            if mask >> index & 1 or code == SHUFFLE or size is None:
                continue
            size = size + _CHECKSUM if code == FLETCHER32 else None
        data = stored
        for index in reversed(range(len(self.filters))):
            if mask >> index & 1:
                continue
            code, parameters = self.filters[index]
            if code == FLETCHER32:
                data = _strip_checksum(data)
            elif code == SHUFFLE:
                data = _unshuffle(data, parameters[0], scratch)
            else:
                decoded_size = sizes[index]
                if decoded_size is None:
                    raise DecodeError("it is compressed twice")
                data = self._decompress(code, data, decoded_size, scratch)
        if data.nbytes != self.chunk_bytes:
            raise DecodeError(f"a chunk of {self.chunk_bytes:,} bytes has {data.nbytes:,}")
        return data

    def _decompress(self, code: int, data: np.ndarray, decoded_size: int, scratch: Scratch) -> np.ndarray:
        out = scratch.take("decoded", decoded_size)
        try:
            result: Any = self._decoders[code](view_of(data), out)
        except DecodeError:
            raise
        except Exception as error:  # each library raises its own exceptions
            raise DecodeError(f"it cannot be decompressed ({type(error).__name__}: {error})") from error
        array = result if isinstance(result, np.ndarray) else np.frombuffer(result, np.uint8)
        array = array.reshape(-1).view(np.uint8)
        if array.nbytes != decoded_size:
            raise DecodeError(f"it decompresses to {array.nbytes:,} bytes instead of {decoded_size:,}")
        return array


def _unshuffle(data: np.ndarray, itemsize: int, scratch: Scratch) -> np.ndarray:
    """Reunite the bytes of each element. A partial element at the end is copied."""
    count = data.nbytes // itemsize if itemsize > 1 else 0
    if count <= 1:
        return data
    whole = count * itemsize
    out = scratch.take("unshuffled", data.nbytes)
    planes = data[:whole].reshape(itemsize, count)
    for first in range(0, count, _PIECE):
        part = slice(first, first + _PIECE)
        if itemsize in _WORDS:  # faster than strided copies of bytes
            word = out[:whole].view(_WORDS[itemsize])[part]
            word[...] = planes[-1, part]
            for byte in range(itemsize - 2, -1, -1):
                np.left_shift(word, 8, out=word)
                np.bitwise_or(word, planes[byte, part], out=word)
        else:
            elements = out[:whole].reshape(count, itemsize)
            for byte in range(itemsize):
                elements[part, byte] = planes[byte, part]
    out[whole:] = data[whole:]
    return out


def _strip_checksum(data: np.ndarray) -> np.ndarray:
    if data.nbytes < _CHECKSUM:
        raise DecodeError("its checksum is missing")
    data, tail = data[:-_CHECKSUM], data[-_CHECKSUM:]
    stored, computed = int.from_bytes(tail.tobytes(), "little"), fletcher32(data)
    # Both halves are sums modulo 65,535: 0 equals 65,535.
    if (stored >> 16) % 65535 != (computed >> 16) % 65535 or (stored & 65535) % 65535 != (computed & 65535) % 65535:
        raise DecodeError(f"its checksum is {computed:08x} instead of {stored:08x}")
    return data


def fletcher32(data: np.ndarray) -> int:
    """Return HDF5's Fletcher checksum: of big-endian 16-bit words, modulo 65,535.

    J. G. Fletcher, "An Arithmetic Checksum for Serial Transmissions", IEEE Trans. Comm. 30 (1982).
    """
    words = data[: data.nbytes // 2 * 2].view("<u2")
    sums = total = 0
    weights = np.arange(_PIECE, 0, -1, dtype=np.float64)
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE].astype(np.float64)  # fast, and exact below 2**53
        # The earlier sum counts once more for every word of the piece.
        total = (total + sums * len(piece) + int(np.dot(piece, weights[-len(piece) :]))) % 65535
        sums = (sums + int(piece.sum())) % 65535
    # Swapping the bytes of a word multiplies it by 256 modulo 65,535, and so the sums.
    sums, total = sums * 256 % 65535, total * 256 % 65535
    if data.nbytes % 2:
        sums = (sums + (int(data[-1]) << 8)) % 65535
        total = (total + sums) % 65535
    return total << 16 | sums
