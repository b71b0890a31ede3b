"""Files that the streaming bench reads, and contestants that take turns."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from common import MIB

BATCH = 64
POOL = 2048  # random images; a file repeats them, but never within a chunk

Contestant = Callable[[], float]
"""Does its work once and returns bytes, or steps, a second."""


class Shape(NamedTuple):
    """Shape of a row, and the rows of a chunk."""

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

    Attributes:
        path: The file.
        layout: "contiguous", "chunked" or a compression.
        dtype: Stored dtype; float32 is delivered.
        shape: Shape of its rows.
        rows: Number of rows.
        budget: The `memory_budget` to read it with.
        extents: Offset and size of every stored chunk, in the order of the rows.
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

    @property
    def name(self) -> str:
        """Layout, dtype and size of a row."""
        return f"{self.layout} {self.dtype}, rows of {self.shape.name}"


def compression(layout: str) -> dict[str, Any]:
    """Return the arguments of `create_dataset` for a layout."""
    if layout == "gzip":
        return {"compression": "gzip", "compression_opts": 4, "shuffle": True}
    if layout in ("zstd", "blosc"):
        import hdf5plugin

        if layout == "zstd":
            return {"shuffle": True, **hdf5plugin.Zstd(clevel=3)}
        return dict(hdf5plugin.Blosc(cname="lz4", clevel=5, shuffle=hdf5plugin.Blosc.SHUFFLE))
    return {}


def make(folder: Path, shape: Shape, layout: str, megabytes: int, dtype: str = "float32") -> Stored:
    """Write a file with about `megabytes` of delivered rows, at least 32 batches and four buffers of 12."""
    batch_bytes = BATCH * shape.row_bytes
    size = max(megabytes * MIB, 32 * batch_bytes)
    rows = size // shape.row_bytes // shape.chunk_rows * shape.chunk_rows
    path = folder / f"{layout}-{dtype}-{shape.row_bytes}.h5"
    with h5py.File(path, "w") as file:
        chunks = None if layout == "contiguous" else (shape.chunk_rows, *shape.row)
        data = file.create_dataset("x", (rows, *shape.row), dtype, chunks=chunks, **compression(layout))
        pool = _images(shape, max(shape.chunk_rows, min(POOL, 64 * MIB // shape.row_bytes)), dtype)
        for first in range(0, rows, len(pool)):
            part = pool[: min(len(pool), rows - first)]
            if dtype == "float32":
                part[:, 0, 0, 0] = np.arange(first, first + len(part))  # identifies every row
            data[first : first + len(part)] = part
    with h5py.File(path, "r") as file:
        extents = tuple(_extents(file["x"]))
    return Stored(str(path), layout, dtype, shape, rows, max(size // 4, 12 * batch_bytes), extents)


def _images(shape: Shape, rows: int, dtype: str) -> np.ndarray:
    """Return smooth images with a little noise, which compress like photographs."""
    random = np.random.default_rng(0)
    height, width, colours = shape.row
    coarse = random.integers(30, 220, (rows, height // 8 + 2, width // 8 + 2, colours))
    smooth = np.repeat(np.repeat(coarse, 8, axis=1), 8, axis=2)[:, :height, :width]
    pixels = np.clip(smooth + random.integers(-6, 7, (rows, *shape.row)), 0, 255).astype(np.uint8)
    return pixels if dtype == "uint8" else (pixels / np.float32(255)).astype(dtype)


def _extents(data: h5py.Dataset) -> Iterator[tuple[int, int]]:
    if data.chunks is None:
        yield data.id.get_offset(), data.id.get_storage_size()
        return
    for number in range(data.id.get_num_chunks()):
        info = data.id.get_chunk_info(number)
        yield info.byte_offset, info.size


def load(path: str | Path) -> None:
    """Read the whole file into the page cache."""
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(8 * MIB)
        while file.readinto(buffer):
            pass


def evict(path: str | Path) -> None:
    """Ask the system to drop the file from the page cache."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(number)


def bytes_read_so_far() -> int:
    """Return the bytes that this process has asked the system to read, from any file."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def rotate(
    contestants: dict[str, Contestant],
    repeats: int,
    before: Callable[[], object] = lambda: None,
    at_least: float = 0.0,
) -> dict[str, list[float]]:
    """Measure all contestants in turns, each round beginning with another one.

    Args:
        contestants: Contestants by name.
        repeats: Number of rounds.
        before: Called before each measurement.
        at_least: Seconds of a measurement; shorter work is repeated and averaged.

    Returns:
        Rates of each contestant, one for each round.
    """
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            before()
            begin, inverse = time.perf_counter(), [1 / contestants[name]()]
            while time.perf_counter() - begin < at_least:
                inverse.append(1 / contestants[name]())
            rates[name].append(1 / statistics.mean(inverse))
    return rates


def ratio(ours: list[float], base: list[float], times: float = 1.0) -> float:
    """Return our median rate over `times` the other's."""
    return round(statistics.median(ours) / statistics.median(base) / times, 4)


def goal(what: str, value: float, wanted: float, *, most: bool = False) -> dict[str, Any]:
    """Return a line of the summary: a measured value and the goal, the most or the least allowed."""
    met = value <= wanted if most else value >= wanted
    return {"what": what, "value": value, "goal": f"{'≤' if most else '≥'} {wanted:g}", "met": bool(met)}


def gigabytes(rates: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return rates in GB/s."""
    return {name: [round(rate / 1e9, 4) for rate in values] for name, values in rates.items()}
