"""Write rows to the chunks of new HDF5 files, and copy attributes."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import h5py
import numpy as np

from kerasmem.compat.files import hdf5_lock
from kerasmem.datatools.fields import Field, Target
from kerasmem.datatools.listing import CHECKSUM, CLASS_NAMES
from kerasmem.datatools.packing import UNPACKED
from kerasmem.datatools.settings import Compression
from kerasmem.hdf5.format.filters import ZSTD
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.format.links import DAMAGED, encoded
from kerasmem.hdf5.rows.texts import TEXTS_AT_ONCE, read_attribute

_MOST_BYTES = 60_000  # of an attribute; HDF5 keeps no larger ones beside a dataset


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
        """End the threads and close the files. On a full disk, closing fails too."""
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
    file[target.field.name] = h5py.Dataset(created)
    if target.field.class_names is not None:
        _name_classes(file, target.field.name, target.field.class_names)
    return file[target.field.name]


def _name_classes(file: h5py.File, name: str, class_names: Sequence[str]) -> None:
    names = [text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0") for text in class_names]
    if len(names) <= TEXTS_AT_ONCE:
        file[name].attrs.create(CLASS_NAMES, names, dtype=h5py.string_dtype())
    else:
        file.create_dataset(f"{name}_{CLASS_NAMES}", data=names, dtype=h5py.string_dtype())


def copy_attributes(source: str, output: str, names: Sequence[tuple[str, Field]], *, trust_file: bool) -> list[str]:
    """Copy attributes that are numbers or texts, but no references.

    Args:
        source: the file that was read.
        output: the file that was written.
        names: names of datasets there, and the datasets here.
        trust_file: whether any number of texts of variable length is read.

    Returns:
        Notes on attributes that were left out.
    """
    left_out = []
    with h5py.File(source, "r") as one, h5py.File(output, "r+") as other:
        for name, field in [("/", Field("/", "<f4")), *names]:
            try:
                item = one[encoded(name)]
                for key in item.attrs:
                    value = read_attribute(item, key, trust_file=trust_file, most=_MOST_BYTES)
                    plain = isinstance(value, str) or getattr(value, "dtype", np.dtype("V")).kind in "iufbSUO"
                    if field.unpacked and key in UNPACKED:
                        continue
                    if plain and key not in other[field.name].attrs:
                        other[field.name].attrs[key] = value
                    elif value is None and h5py.check_string_dtype(item.attrs.get_id(key).dtype) is not None:
                        left_out.append(
                            f"left out: attribute {shown(key)} of {shown(name)}, which has many or long texts"
                        )
            except DAMAGED:
                continue
    return left_out
