"""A chunk's filters undone: decoders of single buffers, each given the exact size that has to come out.

A decoder takes the stored bytes, an array to fill and the filter's numbers in the file, and returns whatever
holds the result: the array, or bytes of its own. It raises, or returns another size, when the bytes are
damaged; no decoder allocates more than the size it is given. All let other threads run meanwhile.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import numpy as np

Decoder = Callable[[Any, np.ndarray, Sequence[int]], Any]

GZIP, SHUFFLE, FLETCHER32 = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32
LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD = 32000, 32001, 32004, 32008, 32015
BZIP2 = 307
_BLOSC_HEADER = 16  # bytes; the decoder trusts the sizes in them
EXTRA = frozenset({LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD})  # what `kerasmem[codecs]` brings
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


def _libdeflate(stored: Any, out: np.ndarray, _: Sequence[int]) -> Any:
    return _load("deflate").zlib_decompress(stored, out.nbytes)


def _zlib(stored: Any, out: np.ndarray, _: Sequence[int]) -> Any:
    return _all_of(zlib.decompressobj(), stored, out.nbytes)


def _bzip2(stored: Any, out: np.ndarray, _: Sequence[int]) -> Any:
    import bz2

    return _all_of(bz2.BZ2Decompressor(), bytes(stored), out.nbytes)


def _all_of(decoder: Any, stored: Any, size: int) -> bytes:
    result: bytes = decoder.decompress(stored, size)
    rest = getattr(decoder, "unconsumed_tail", b"")  # bz2's keeps it
    # The checksum may be left, and nothing more.
    if not decoder.eof and (decoder.decompress(rest, 1) or not decoder.eof):
        raise DecodeError("it is longer than the chunk, or cut off")
    return result


def _lzf(stored: Any, out: np.ndarray, _: Sequence[int]) -> Any:
    return _load("imagecodecs").lzf_decode(stored, out=out)


def _zstd(stored: Any, out: np.ndarray, _: Sequence[int]) -> Any:
    return _load("imagecodecs").zstd_decode(stored, out=out)


def _blosc(stored: Any, out: np.ndarray, _: Sequence[int]) -> Any:
    _expect(int.from_bytes(stored[4:8], "little"), out.nbytes)
    if len(stored) < _BLOSC_HEADER or int.from_bytes(stored[12:16], "little") != len(stored):
        raise DecodeError(
            f"its header speaks of another size than the {len(stored):,} bytes stored"
        )  # read beyond them
    return _load("imagecodecs").blosc_decode(stored, numthreads=1, out=out)


def _lz4(stored: Any, out: np.ndarray, _: Sequence[int]) -> Any:
    """Decode blocks, each after its length. A block as long as its content is stored as it is."""
    total = out.nbytes
    _expect(int.from_bytes(stored[:8], "big"), total)
    block, at, decode = int.from_bytes(stored[8:12], "big"), 12, _load("imagecodecs").lz4_decode
    if not block:
        raise DecodeError("its blocks have no size")
    for start in range(0, total, block):
        target = out[start : start + block]
        size = int.from_bytes(stored[at : at + 4], "big")
        piece = stored[at + 4 : at + 4 + size]
        if len(piece) != size or not size:
            raise DecodeError("a block is cut off")
        if size == len(target):
            target[...] = np.frombuffer(piece, np.uint8)
        else:
            _expect(len(decode(piece, out=target)), len(target))
        at += 4 + size
    return out


def _bitshuffle(stored: Any, out: np.ndarray, numbers: Sequence[int]) -> Any:
    """Decode blocks of elements with bits sorted by significance, each block compressed or not.

    The format is that of github.com/kiyo-masui/bitshuffle: total and block size, then each block after its
    length, then, as they are, the elements that make no multiple of eight.
    """
    codecs = _load("imagecodecs")
    itemsize, block, method = (*numbers, 0, 0, 0, 0, 0)[2:5]
    if itemsize not in (1, 2, 4, 8) or method not in (0, 2, 3):
        raise DecodeError(f"bitshuffle of {itemsize} bytes with compression {method} is unknown")
    total, at = out.nbytes, 0
    if method:
        _expect(int.from_bytes(stored[:8], "big"), total)
        block, at = int.from_bytes(stored[8:12], "big") // itemsize, 12
    block = block or max(8192 // itemsize // 8 * 8, 128)  # the format's own default
    if block % 8:
        raise DecodeError(f"bitshuffle blocks of {block} elements are no multiple of 8")
    whole = total // itemsize // 8 * 8 * itemsize
    plain: Any = stored
    if method:
        plain = np.empty(total, np.uint8)
        for start in range(0, whole, block * itemsize):
            size = int.from_bytes(stored[at : at + 4], "big")
            piece, target = stored[at + 4 : at + 4 + size], plain[start : min(start + block * itemsize, whole)]
            if len(piece) != size or not size:
                raise DecodeError("a block is cut off")
            got = codecs.lz4_decode(piece, out=target) if method == 2 else codecs.zstd_decode(piece, out=target)
            _expect(len(got), len(target))
            at += 4 + size
        plain[whole:] = np.frombuffer(stored[at : at + total - whole], np.uint8)
    _expect(len(plain), total)
    source = np.frombuffer(plain, np.uint8)
    if whole:
        elements = source[:whole].view(f"u{itemsize}")
        codecs.bitshuffle_decode(elements, blocksize=block, out=out[:whole].view(f"u{itemsize}"))
    out[whole:] = source[whole:]
    return out


_WITH_CODECS: dict[int, Decoder] = {
    LZF: _lzf, BLOSC: _blosc, LZ4: _lz4, BITSHUFFLE: _bitshuffle, ZSTD: _zstd,
}  # fmt: skip


def _expect(size: int, wanted: int) -> None:
    if size != wanted:
        raise DecodeError(f"it says it holds {size:,} bytes, and the chunk has {wanted:,}")


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
                data = self._decompressed(code, numbers, data, wanted, scratch)
        if data.nbytes != self.chunk_bytes:
            raise DecodeError(f"a chunk of {self.chunk_bytes:,} bytes has {data.nbytes:,}")
        return data

    def _decompressed(
        self, code: int, numbers: Sequence[int], data: np.ndarray, wanted: int, scratch: Scratch
    ) -> np.ndarray:
        out = scratch.take("decoded", wanted)
        try:
            result: Any = self._decoders[code](view_of(data), out, numbers)
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
    stored = int.from_bytes(tail.tobytes(), "little")
    found = fletcher32(data)
    # HDF5 before 1.6.3 wrote the bytes of each half the other way round.
    swapped = int.from_bytes(tail[[1, 0, 3, 2]].tobytes(), "little")
    if not any(_same(found, other) for other in (stored, swapped)):
        raise DecodeError(f"its checksum is {found:08x}, and the file says {stored:08x}")
    return data


def _same(one: int, other: int) -> bool:
    """Compare sums modulo 65,535: 0 equals 65,535."""
    return not ((one ^ other) and ((one >> 16) - (other >> 16)) % 65535 | ((one & 65535) - (other & 65535)) % 65535)


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
