"""A chunk's filters undone: decoders of single buffers, each given the exact size that has to come out.

A decoder takes the stored bytes and an array to fill, and returns the array, or bytes of its own. It raises, or returns
another size, if the bytes are damaged; no decoder allocates more than the size it is given. All let other threads run
meanwhile.
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
EXTRA = frozenset({LZF, BLOSC, ZSTD})  # `kerasmem[codecs]` brings them
_CHECKSUM = 4  # bytes of it after the data
_WORDS = {2: "<u2", 4: "<u4"}  # of so many bytes, whose first is the lowest, as in a shuffled chunk
_PIECE = 1 << 16  # elements put together, or words added up, at a time


class Scratch:
    """Named byte buffers, each as large as the most that was asked of it so far."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, name: str, size: int) -> np.ndarray:
        """Return `size` bytes, those returned for `name` before included."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size]


def view_of(array: np.ndarray) -> memoryview:
    """Return an array's memory as bytes."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


class DecodeError(Exception):
    """Stored bytes contradict the file. The text follows "cannot be read: "."""


def register_filters() -> bool:
    """Register the filters of `kerasmem[codecs]` with h5py. Return whether they are installed."""
    return _load("hdf5plugin") is not None


def find_decoder(filter_code: int) -> Decoder | None:
    """Return the decoder of an HDF5 filter, or None if only HDF5 itself may know it."""
    if filter_code == GZIP:
        return _libdeflate if _load("deflate") is not None else _zlib
    if filter_code == BZIP2:
        return _bzip2
    return _WITH_CODECS.get(filter_code) if _load("imagecodecs") is not None else None


def is_undone_here(filter_code: int) -> bool:
    """Return whether kerasmem undoes a filter itself, so that HDF5 never sees the chunk."""
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
    rest = getattr(decoder, "unconsumed_tail", b"")  # bz2's keeps it
    # The checksum may be left, and nothing more.
    if not decoder.eof and (decoder.decompress(rest, 1) or not decoder.eof):
        raise DecodeError("it is longer than the chunk, or cut off")
    return result


def _lzf(stored: Any, out: np.ndarray) -> Any:
    return _load("imagecodecs").lzf_decode(stored, out=out)


def _zstd(stored: Any, out: np.ndarray) -> Any:
    return _load("imagecodecs").zstd_decode(stored, out=out)


def _blosc(stored: Any, out: np.ndarray) -> Any:
    sizes = int.from_bytes(stored[4:8], "little"), int.from_bytes(stored[12:16], "little")
    if len(stored) < _BLOSC_HEADER or sizes != (out.nbytes, len(stored)):  # or memory beyond them would be read
        raise DecodeError(f"its header has the sizes {sizes}; they are {out.nbytes:,} and {len(stored):,} bytes")
    return _load("imagecodecs").blosc_decode(stored, numthreads=1, out=out)


_WITH_CODECS: dict[int, Decoder] = {LZF: _lzf, BLOSC: _blosc, ZSTD: _zstd}


class Pipeline:
    """The filters of one dataset.

    Args:
        filters: code and numbers of each filter, as the file lists them.
        chunk_bytes: bytes of a decoded chunk.

    Raises:
        DecodeError: If there is a filter that only HDF5 itself may know.
    """

    def __init__(self, filters: Sequence[tuple[int, tuple[int, ...]]], chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.filters = tuple(filters)
        self._decoders = {}
        for code, numbers in filters:
            if code == SHUFFLE and not any(numbers[:1]):
                raise DecodeError("its shuffle filter names no size of an element")
            if code not in (SHUFFLE, FLETCHER32):
                decoder = find_decoder(code)
                if decoder is None:
                    raise DecodeError(f"filter {code} is not known here")
                self._decoders[code] = decoder

    def most_stored(self) -> int:
        """Return the most bytes a sound chunk can take in the file."""
        return self.chunk_bytes + self.chunk_bytes // 8 + (4096 if self.filters else 0)

    def decode(self, stored: np.ndarray, mask: int, scratch: Scratch) -> np.ndarray:
        """Return a chunk's bytes, in `scratch` or elsewhere.

        Args:
            stored: the bytes in the file.
            mask: bit i set means that filter i was left out for this chunk.
            scratch: this thread's buffers.

        Raises:
            DecodeError: If the bytes are damaged.
        """
        sizes: list[int | None] = []  # before each filter, on the way into the file
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
            code, numbers = self.filters[index]
            if code == FLETCHER32:
                data = _checked(data)
            elif code == SHUFFLE:
                data = _unshuffled(data, numbers, scratch)
            else:
                wanted = sizes[index]
                if wanted is None:
                    raise DecodeError("it is compressed twice over")
                data = self._decompressed(code, data, wanted, scratch)
        if data.nbytes != self.chunk_bytes:
            raise DecodeError(f"a chunk of {self.chunk_bytes:,} bytes has {data.nbytes:,}")
        return data

    def _decompressed(self, code: int, data: np.ndarray, wanted: int, scratch: Scratch) -> np.ndarray:
        out = scratch.take("decoded", wanted)
        try:
            result: Any = self._decoders[code](view_of(data), out)
        except DecodeError:
            raise
        except Exception as error:  # every library has its own
            raise DecodeError(f"it does not decompress ({type(error).__name__}: {error})") from error
        array = result if isinstance(result, np.ndarray) else np.frombuffer(result, np.uint8)
        array = array.reshape(-1).view(np.uint8)
        if array.nbytes != wanted:
            raise DecodeError(f"it decompresses to {array.nbytes:,} bytes in place of {wanted:,}")
        return array


def _unshuffled(data: np.ndarray, numbers: Sequence[int], scratch: Scratch) -> np.ndarray:
    """Put the bytes of each element together again. A partial element at the end stays as it is."""
    itemsize = numbers[0]
    count = data.nbytes // itemsize if itemsize > 1 else 0
    if count <= 1:
        return data
    whole = count * itemsize
    out = scratch.take("unshuffled", data.nbytes)
    planes = data[:whole].reshape(itemsize, count)
    for first in range(0, count, _PIECE):
        part = slice(first, first + _PIECE)
        if itemsize in _WORDS:  # shifted into words, which is faster than going through memory byte by byte
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


def _checked(data: np.ndarray) -> np.ndarray:
    if data.nbytes < _CHECKSUM:
        raise DecodeError("its checksum is missing")
    data, tail = data[:-_CHECKSUM], data[-_CHECKSUM:]
    stored, computed = int.from_bytes(tail.tobytes(), "little"), fletcher32(data)
    # Both halves are sums modulo 65,535: 0 equals 65,535.
    if (stored >> 16) % 65535 != (computed >> 16) % 65535 or (stored & 65535) % 65535 != (computed & 65535) % 65535:
        raise DecodeError(f"its checksum is {computed:08x}, and the file says {stored:08x}")
    return data


def fletcher32(data: np.ndarray) -> int:
    """Return HDF5's Fletcher checksum: of 16-bit words, the first byte the higher, modulo 65,535.

    J. G. Fletcher, "An Arithmetic Checksum for Serial Transmissions", IEEE Trans. Comm. 30 (1982).
    """
    words = data[: data.nbytes // 2 * 2].view("<u2")
    sums = total = 0
    weights = np.arange(_PIECE, 0, -1, dtype=np.float64)
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE].astype(np.float64)  # fast, and exact below 2**53
        # Each sum so far is added once more for every word that follows it.
        total = (total + sums * len(piece) + int(np.dot(piece, weights[-len(piece) :]))) % 65535
        sums = (sums + int(piece.sum())) % 65535
    # Swapping the bytes of a word multiplies it by 256 modulo 65,535, and so the sums.
    sums, total = sums * 256 % 65535, total * 256 % 65535
    if data.nbytes % 2:
        sums = (sums + (int(data[-1]) << 8)) % 65535
        total = (total + sums) % 65535
    return total << 16 | sums
