"""Decoders of single compressed buffers, each given the exact size that has to come out.

A decoder takes the stored bytes, an array to fill and the filter's numbers in the file, and returns whatever
holds the result: the array, or bytes of its own. It raises, or returns another size, when the bytes are
damaged; no decoder allocates more than the size it is given. All let other threads run meanwhile.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import numpy as np

Decoder = Callable[[Any, np.ndarray, Sequence[int]], Any]

GZIP, SHUFFLE, FLETCHER32 = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32
LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2 = 32000, 32001, 32004, 32008, 32015, 32026
_BLOSC_HEADER = 16  # bytes; the decoder trusts the sizes in them
EXTRA = frozenset({BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2})  # what `kerasmem[codecs]` brings


class DecodeError(Exception):
    """Stored bytes are not what the file says they are; the text goes on from "cannot be read: "."""


def register_filters() -> bool:
    """Let h5py know the filters of `kerasmem[codecs]`; return whether that is installed."""
    return _load("hdf5plugin") is not None


def find_decoder(filter_code: int) -> Decoder | None:
    """Return the decoder of an HDF5 filter, or None where only HDF5 itself may know it."""
    if filter_code == GZIP:
        return _libdeflate if _load("deflate") is not None else _zlib
    decoder = {LZF: _lzf, BLOSC: _blosc, LZ4: _lz4, BITSHUFFLE: _bitshuffle, ZSTD: _zstd}.get(filter_code)
    return decoder if decoder is not None and _load("imagecodecs") is not None else None


_modules: dict[str, Any] = {}


def _load(name: str) -> Any:
    if name not in _modules:
        try:
            _modules[name] = importlib.import_module(name)
        except ImportError:
            _modules[name] = None
    return _modules[name]


def _libdeflate(stored: Any, out: np.ndarray, _: Sequence[int]) -> Any:
    return _load("deflate").zlib_decompress(stored, out.nbytes)


def _zlib(stored: Any, out: np.ndarray, _: Sequence[int]) -> Any:
    decoder = zlib.decompressobj()
    result = decoder.decompress(stored, out.nbytes)
    # The checksum may be left, and nothing more.
    if not decoder.eof and (decoder.decompress(decoder.unconsumed_tail, 1) or not decoder.eof):
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
    _expect(int.from_bytes(stored[:8], "big"), out.nbytes)
    return _load("imagecodecs").lz4h5_decode(stored, out=out)


def _bitshuffle(stored: Any, out: np.ndarray, numbers: Sequence[int]) -> Any:
    """Decode blocks of elements whose bits are sorted by significance, each block compressed or not.

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


def _expect(size: int, wanted: int) -> None:
    if size != wanted:
        raise DecodeError(f"it says it holds {size:,} bytes, and the chunk has {wanted:,}")
