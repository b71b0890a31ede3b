"""How chunks are stored: the filters that `H5ChunkSequence` undoes outside of HDF5, applied outside of HDF5."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import h5py
import numpy as np

from kerasmem.datatools.converting.fields import Target
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

    def encode(self, chunk: np.ndarray) -> bytes:
        """Return a chunk's stored bytes; lets other threads run meanwhile."""
        data = np.ascontiguousarray(chunk).view(np.uint8).reshape(-1)
        if chunk.dtype.itemsize > 1:
            data = np.ascontiguousarray(data.reshape(-1, chunk.dtype.itemsize).T).reshape(-1)
        return _compressor(self)(data)


def read_compression(value: str | None) -> Compression:
    """Return what "none", "gzip", "gzip:6" or "zstd" asks for.

    Raises:
        UsageError: there is no such compression.
        MissingExtraError: it needs a package that is not installed.
    """
    kind, _, level = str(value or "none").partition(":")
    if kind == "none" and not level:
        return Compression()
    if kind not in _LEVELS:
        raise UsageError(f"compression: {value!r} is none of none, gzip, zstd, gzip:1 to gzip:9, zstd:1 to zstd:19")
    usual, least, most = _LEVELS[kind]
    if level and not (level.isdecimal() and least <= int(level) <= most):
        raise UsageError(f"compression: {kind} has levels {least} to {most}, not {level!r}")
    if kind == "zstd" and (not register_filters() or find_spec("imagecodecs") is None):
        raise MissingExtraError("compression with zstd", "codecs")
    return Compression(kind, int(level) if level else usual)


def create_dataset(file: h5py.File, target: Target, compression: Compression) -> None:
    """Make a dataset of chunks, whose place in the file is settled now where nothing is compressed."""
    shape, dtype = target.field.shape, np.dtype(target.field.dtype)
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk((target.chunk_rows, *shape))
    creation.set_obj_track_times(False)  # the same data makes the same file
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if compression.packs:
        if dtype.itemsize > 1:
            creation.set_shuffle()
        if compression.kind == "gzip":
            creation.set_deflate(compression.level)
        else:
            creation.set_filter(ZSTD, h5py.h5z.FLAG_MANDATORY, (compression.level,))
    else:
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    space = h5py.h5s.create_simple((target.rows, *shape))
    created = h5py.h5d.create(file.id, None, h5py.h5t.py_create(dtype, logical=True), space, creation)
    file[target.name] = h5py.Dataset(created)


@functools.cache
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
