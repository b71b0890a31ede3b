"""How chunks are stored: the filters that `H5ChunkSequence` undoes outside of HDF5, applied outside of HDF5."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import h5py
import numpy as np

from kerasmem.datatools.converting.fields import Field
from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.hdf5.direct.codecs import ZSTD, register_filters

_LEVELS = {"gzip": (4, 1, 9), "zstd": (3, 1, 19)}  # usual, least, most


@dataclass(frozen=True)
class Compression:
    """What is done to a chunk on its way into the file.

    Args:
        kind: "none", "gzip" or "zstd"; the last two with the bytes of numbers sorted by significance before.
        level: of effort.
    """

    kind: str = "none"
    level: int = 0

    @property
    def packs(self) -> bool:
        """Whether chunks are compressed."""
        return self.kind != "none"

    def encoder(self) -> Callable[[np.ndarray], bytes]:
        """Return what makes a chunk's stored bytes; it lets other threads run meanwhile."""
        compress = _compressor(self)

        def encode(chunk: np.ndarray) -> bytes:
            data = np.ascontiguousarray(chunk).view(np.uint8).reshape(-1)
            if chunk.dtype.itemsize > 1:
                data = np.ascontiguousarray(data.reshape(-1, chunk.dtype.itemsize).T).reshape(-1)
            return compress(data)

        return encode


def read_compression(value: str | None) -> Compression:
    """Return what "none", "gzip", "gzip:6" or "zstd" asks for.

    Raises:
        UsageError: there is no such compression.
        MissingExtraError: it needs a package that is not installed.
    """
    kind, _, level = (value or "none").partition(":")
    if kind == "none" and not level:
        return Compression()
    if kind not in _LEVELS:
        raise UsageError(f"compression: {value!r} is none of none, gzip, zstd, gzip:1 to gzip:9, zstd:1 to zstd:19")
    usual, least, most = _LEVELS[kind]
    if level and not (level.isdigit() and least <= int(level) <= most):
        raise UsageError(f"compression: {kind} has levels {least} to {most}, not {level!r}")
    if kind == "zstd" and (not register_filters() or find_spec("imagecodecs") is None):
        raise MissingExtraError("compression with zstd", "codecs")
    return Compression(kind, int(level) if level else usual)


def create_dataset(
    file: h5py.File, name: str, field: Field, rows: int, chunk_rows: int, compression: Compression
) -> h5py.h5d.DatasetID:
    """Return a new dataset of chunks, whose place in the file is settled now where nothing is compressed."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk((chunk_rows, *field.shape))
    creation.set_obj_track_times(False)  # the same data makes the same file
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if compression.packs:
        if np.dtype(field.dtype).itemsize > 1:
            creation.set_shuffle()
        if compression.kind == "gzip":
            creation.set_deflate(compression.level)
        else:
            creation.set_filter(ZSTD, h5py.h5z.FLAG_MANDATORY, (compression.level,))
    else:
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    kind = h5py.h5t.py_create(np.dtype(field.dtype), logical=True)
    space = h5py.h5s.create_simple((rows, *field.shape))
    return h5py.h5d.create(file.id, name.encode(), kind, space, creation, links)


def _compressor(compression: Compression) -> Callable[[np.ndarray], bytes]:
    level = compression.level
    if compression.kind == "zstd":
        import imagecodecs

        return lambda data: bytes(imagecodecs.zstd_encode(data, level=level))  # type: ignore[arg-type]  # any buffer
    try:
        import deflate
    except ImportError:
        return lambda data: zlib.compress(data.data, level)
    return lambda data: bytes(deflate.zlib_compress(data, level))
