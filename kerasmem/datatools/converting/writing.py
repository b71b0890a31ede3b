"""Write rows to new HDF5 files: chunks are filled one after another and compressed in threads."""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import h5py
import numpy as np

from kerasmem.compat.hdf5_lock import hdf5_lock
from kerasmem.datatools.converting.fields import Target
from kerasmem.datatools.inspecting.listing import CHECKSUM, CLASS_NAMES
from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.hdf5.direct.codecs import ZSTD, register_filters
from kerasmem.hdf5.direct.raw import raw_file
from kerasmem.hdf5.links import DAMAGED, encoded
from kerasmem.hdf5.texts import read_attribute

_LEVELS = {"gzip": (4, 1, 9), "zstd": (3, 1, 19)}  # usual, least, most
_MOST_IN_ATTRIBUTE = 2000  # class names: an attribute has 64 KiB
_MOST_BYTES = 60_000  # of an attribute; HDF5 keeps no larger ones beside a dataset


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


class ChunkWriter:
    """Write rows to the datasets of new files.

    Args:
        paths: the files.
        targets: the datasets.
        compression: what is done to chunks.
        threads: that compress.

    Attributes:
        sums: CRC-32 of the rows of each dataset so far.
    """

    def __init__(self, paths: Sequence[str], targets: Sequence[Target], compression: Compression, threads: int) -> None:
        self._paths, self._targets = paths, targets
        self._files = [h5py.File(path, "w") for path in paths]
        self._datasets = [_create_dataset(self._files[target.file], target, compression) for target in targets]
        self._chunks = [np.zeros((target.chunk_rows, *target.field.shape), target.field.dtype) for target in targets]
        self._filled = [0] * len(targets)
        self._done = [0] * len(targets)
        self.sums = [0] * len(targets)
        self._encode = compression.encode
        self._pool = ThreadPoolExecutor(threads, "kerasmem-pack") if compression.packs else None
        self._most = threads + 2
        self._waiting: deque[tuple[int, int, Future[bytes]]] = deque()

    def append(self, target: int, rows: np.ndarray) -> None:
        """Take rows of a dataset."""
        chunk, size = self._chunks[target], self._targets[target].chunk_rows
        at = 0
        while at < len(rows):
            filled = self._filled[target]
            taken = min(size - filled, len(rows) - at)
            chunk[filled : filled + taken] = rows[at : at + taken]
            self._filled[target] += taken
            at += taken
            if self._filled[target] == size:
                self._emit(target)

    def finish(self) -> None:
        """Write the chunks that are not full and the checksums, and make the files reach the disk."""
        for target, filled in enumerate(self._filled):
            if filled:
                self._chunks[target][filled:] = 0
                self._emit(target)
        self._drain(0)
        for dataset, value in zip(self._datasets, self.sums, strict=True):
            dataset.attrs[CHECKSUM] = np.uint32(value)
        for file in self._files:
            file.flush()
        self.close()
        for path in self._paths:
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """End the threads and close the files; on a full disk, closing fails too."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files:
            with contextlib.suppress(RuntimeError):
                file.close()

    def _emit(self, target: int) -> None:
        chunk, filled, number = self._chunks[target], self._filled[target], self._done[target]
        self.sums[target] = zlib.crc32(chunk[:filled].reshape(-1).view(np.uint8).data, self.sums[target])
        if self._pool is None:
            self._put(target, number, chunk.reshape(-1).view(np.uint8).data)
        else:
            self._waiting.append((target, number, self._pool.submit(self._encode, chunk.copy())))
            self._drain(self._most)
        self._filled[target] = 0
        self._done[target] += 1

    def _drain(self, most: int) -> None:
        while len(self._waiting) > most:
            target, number, done = self._waiting.popleft()
            self._put(target, number, done.result())

    def _put(self, target: int, chunk: int, data: Any) -> None:
        dataset = self._datasets[target]
        place = (chunk * self._targets[target].chunk_rows, *(0 for _ in dataset.shape[1:]))
        with hdf5_lock():
            dataset.id.write_direct_chunk(place, data, 0)


def _create_dataset(file: h5py.File, target: Target, compression: Compression) -> h5py.Dataset:
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
    if target.field.class_names is not None:
        _name_classes(file, target.name, target.field.class_names)
    return file[target.name]


def _name_classes(file: h5py.File, name: str, class_names: Sequence[str]) -> None:
    names = [text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0") for text in class_names]
    if len(names) <= _MOST_IN_ATTRIBUTE:
        file[name].attrs.create(CLASS_NAMES, names, dtype=h5py.string_dtype())
    else:
        file.create_dataset(f"{name}_{CLASS_NAMES}", data=names, dtype=h5py.string_dtype())


def copy_attributes(source: str, output: str, names: Sequence[tuple[str, str]]) -> None:
    """Copy attributes that are numbers or texts; those that point to other objects would point nowhere.

    Args:
        source: the file that was read.
        output: the file that was written.
        names: datasets there and here.
    """
    with h5py.File(source, "r") as one, h5py.File(output, "r+") as other:
        raw = raw_file(one)
        for name, written in [("/", "/"), *names]:
            try:
                item = one[encoded(name)]
                for key in item.attrs:
                    value = read_attribute(item, key, raw, _MOST_BYTES)
                    plain = isinstance(value, str) or getattr(value, "dtype", np.dtype("V")).kind in "iufbSUO"
                    if plain and key not in other[written].attrs:
                        other[written].attrs[key] = value
            except DAMAGED:
                continue


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
