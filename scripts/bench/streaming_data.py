"""The files that streaming.py measures on: written by h5py, put into the page cache or out of it, and removed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

BATCH = 64
MIB = 2**20
_POOL = 2048  # rows of images made at random; a file repeats them, never within a chunk
_SAMPLED = 256  # pages looked at to tell how much of a file is cached


@dataclass(frozen=True)
class Shape:
    """Rows of one size."""

    name: str
    row: tuple[int, ...]
    chunk_rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as float32."""
        return prod(self.row) * 4


NARROW = Shape("3 KB", (16, 16, 3), 256)
WIDE = Shape("150 KB", (112, 112, 3), 8)


@dataclass(frozen=True)
class Stored:
    """A file with one dataset "x".

    Args:
        path: the file.
        layout: "contiguous", "chunked", or the name of a compression.
        dtype: as stored; float32 is delivered.
        shape: of the rows.
        rows: how many.
        budget: the `memory_budget` to read it with.
        extents: offset and size of every stored piece, in the order of the rows.
    """

    path: str
    layout: str
    dtype: str
    shape: Shape
    rows: int
    budget: int
    extents: tuple[tuple[int, int], ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the dataset in the file."""
        return sum(size for _, size in self.extents)

    @property
    def delivered_bytes(self) -> int:
        """Bytes of the dataset as float32."""
        return self.rows * self.shape.row_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return what a result has to say of it."""
        data = asdict(self) | {"shape": self.shape.name, "stored_bytes": self.stored_bytes, "chunks": None}
        if self.layout != "contiguous":
            data["chunks"] = [self.shape.chunk_rows, *self.shape.row]
        del data["extents"], data["path"]
        return data


class Absent(Exception):
    """What a measurement needs is not installed; the text says what."""


def compression(layout: str) -> dict[str, Any]:
    """Return the arguments of `create_dataset` for a layout."""
    if layout == "gzip":
        return {"compression": "gzip", "compression_opts": 4, "shuffle": True}
    if layout in ("zstd", "blosc"):
        try:
            hdf5plugin = importlib.import_module("hdf5plugin")
        except ImportError as error:
            raise Absent(f"hdf5plugin, which writes {layout}, is not installed ({error})") from error
        if layout == "zstd":
            return {"shuffle": True, **hdf5plugin.Zstd(clevel=3)}
        return dict(hdf5plugin.Blosc(cname="lz4", clevel=5, shuffle=hdf5plugin.Blosc.SHUFFLE))
    return {}


def make(folder: Path, shape: Shape, layout: str, megabytes: int, dtype: str = "float32") -> Stored:
    """Write a file of about so many megabytes of delivered rows, at least 32 batches and four buffers of 12."""
    batch_bytes = BATCH * shape.row_bytes
    size = max(megabytes * MIB, 32 * batch_bytes)
    rows = size // shape.row_bytes // shape.chunk_rows * shape.chunk_rows
    path = folder / f"{layout}-{dtype}-{shape.row_bytes}.h5"
    with h5py.File(path, "w") as file:
        chunks = None if layout == "contiguous" else (shape.chunk_rows, *shape.row)
        data = file.create_dataset("x", (rows, *shape.row), dtype, chunks=chunks, **compression(layout))
        pool = _images(shape, max(shape.chunk_rows, min(_POOL, 64 * MIB // shape.row_bytes)), dtype)
        for first in range(0, rows, len(pool)):
            part = pool[: min(len(pool), rows - first)]
            if dtype == "float32":
                part[:, 0, 0, 0] = np.arange(first, first + len(part))  # by which every row is known again
            data[first : first + len(part)] = part
    with h5py.File(path, "r") as file:
        extents = tuple(_extents(file["x"]))
    sync(path)
    return Stored(str(path), layout, dtype, shape, rows, max(size // 4, 12 * batch_bytes), extents)


def _images(shape: Shape, rows: int, dtype: str) -> np.ndarray:
    """Return something like photographs: smooth, with noise of a few bits, in 256 steps."""
    random = np.random.default_rng(0)
    height, width, colours = shape.row
    coarse = random.integers(30, 220, (rows, height // 8 + 2, width // 8 + 2, colours))
    smooth = np.repeat(np.repeat(coarse, 8, axis=1), 8, axis=2)[:, :height, :width]
    bytes_ = np.clip(smooth + random.integers(-6, 7, (rows, *shape.row)), 0, 255).astype(np.uint8)
    return bytes_ if dtype == "uint8" else (bytes_ / np.float32(255)).astype(dtype)


def _extents(data: h5py.Dataset) -> Iterator[tuple[int, int]]:
    if data.chunks is None:
        yield data.id.get_offset(), data.id.get_storage_size()
        return
    for number in range(data.id.get_num_chunks()):
        info = data.id.get_chunk_info(number)
        yield info.byte_offset, info.size


# ---- the page cache


def sync(path: str | Path) -> None:
    """Write to the disk what the system still holds back."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def evict(path: str | Path) -> None:
    """Ask the system to drop the file from its cache."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(number)


def load(path: str | Path) -> None:
    """Read the whole file, so that the system has it in its cache."""
    buffer = bytearray(8 * MIB)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def cached_share(path: str | Path) -> float | None:
    """Return which share of some pages all over the file is cached; None where the system does not tell."""
    number = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(number).st_size
        found, page = 0, bytearray(1)
        for at in range(_SAMPLED):
            try:
                found += os.preadv(number, [page], at * (size - 1) // _SAMPLED, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
        return found / _SAMPLED
    except (OSError, AttributeError):
        return None
    finally:
        os.close(number)


def bytes_read_so_far() -> int:
    """Return the bytes that this process has asked the system to read, from whatever file."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])
