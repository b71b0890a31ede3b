"""Index the chunks of a dataset: their offsets and sizes in the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.hdf5.format.filters import DecodeError

CHUNK = np.dtype([("offset", "<i8"), ("size", "<u4"), ("mask", "<u4")])
"""Offset of a chunk in the file (-1 if it was never written), its size, and a bit mask of its skipped filters."""
MOST_CHUNKS = 8_000_000  # largest index, of 16 bytes a chunk


@dataclass(frozen=True)
class Chunk:
    """One chunk of a dataset.

    Args:
        inner: slices of the row axes that it covers; () if it covers whole rows.
        offset: offset in the file; None if it was never written.
        size: size in the file in bytes.
        mask: bit i is set if filter i was skipped.
    """

    inner: tuple[slice, ...]
    offset: int | None
    size: int = 0
    mask: int = 0


class ChunkIndex:
    """The chunks of a dataset, by row.

    Args:
        chunks: chunk shape.
        shape: dataset shape; rows appended later are left out.
        file_size: size of the file in bytes.
        entries: one `CHUNK` per chunk, in C order.

    Raises:
        DecodeError: If chunks overlap or reach beyond the end of the file.
    """

    def __init__(self, chunks: tuple[int, ...], shape: tuple[int, ...], file_size: int, entries: np.ndarray) -> None:
        self._chunks, self._shape = chunks, shape
        self._grid = grid_of(chunks, shape)
        self._per_row = prod(self._grid[1:])
        self._offsets, self._sizes, self._masks = entries["offset"], entries["size"], entries["mask"]
        written = np.flatnonzero(self._offsets >= 0)
        written = written[self._offsets[written].argsort()]
        starts = self._offsets[written]
        ends = starts + self._sizes[written]
        if len(ends) and ends.max() > file_size:
            raise DecodeError("its chunk index is damaged: a chunk reaches beyond the end of the file")
        if (starts[1:] < ends[:-1]).any():
            raise DecodeError("its chunk index is damaged: two chunks overlap")

    def row_of_chunks(self, number: int) -> Iterator[Chunk]:
        """Yield the chunks of the `number`-th row of chunks."""
        for column in range(self._per_row):
            index = number * self._per_row + column
            offset = int(self._offsets[index])
            if offset < 0:
                yield Chunk(self._inner(column), None)
            else:
                yield Chunk(self._inner(column), offset, int(self._sizes[index]), int(self._masks[index]))

    def offsets(self, cells: np.ndarray, size: int) -> np.ndarray | None:
        """Return the offsets of chunks of whole rows, by chunk number.

        Returns None if chunks cover parts of rows, or if one of the chunks was never written, skipped a filter, or does
        not take `size` bytes.
        """
        if self._chunks[1:] != self._shape[1:]:
            return None
        offsets = self._offsets[cells]
        plain = (offsets >= 0).all() and not self._masks[cells].any() and (self._sizes[cells] == size).all()
        return offsets if plain else None

    def _inner(self, column: int) -> tuple[slice, ...]:
        if self._chunks[1:] == self._shape[1:]:
            return ()
        parts = zip(np.unravel_index(column, self._grid[1:]), self._chunks[1:], self._shape[1:], strict=True)
        return tuple(slice(int(at) * chunk, min((int(at) + 1) * chunk, extent)) for at, chunk, extent in parts)


def grid_of(chunks: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of chunks along each axis."""
    return tuple(-(-extent // chunk) for extent, chunk in zip(shape, chunks, strict=True))


def read_index(dataset: h5py.Dataset, shape: tuple[int, ...], file_size: int, base: int = 0) -> ChunkIndex | None:
    """Read the chunk index of a dataset. Return None if it has more than `MOST_CHUNKS` chunks.

    Args:
        dataset: the dataset.
        shape: dataset shape; rows appended later are left out.
        file_size: size of the file in bytes.
        base: number to add to the chunk offsets that HDF5 reports. Defaults to 0.

    Raises:
        DecodeError: If the index is damaged.
    """
    chunks = tuple(int(extent) for extent in dataset.chunks)
    grid = grid_of(chunks, shape)
    count = prod(grid)
    if max(count, dataset.id.get_num_chunks()) > MOST_CHUNKS:
        return None
    entries = np.zeros(count, CHUNK)
    entries["offset"] = -1

    def note(info: Any) -> None:
        if any(at % chunk for at, chunk in zip(info.chunk_offset, chunks, strict=True)):
            raise DecodeError(f"its chunk index is damaged: no chunk begins at {info.chunk_offset}")
        index = 0
        for at, chunk, extent in zip(info.chunk_offset, chunks, grid, strict=True):
            if at // chunk >= extent:
                return
            index = index * extent + at // chunk
        if entries["offset"][index] >= 0:
            raise DecodeError("its chunk index is damaged: a chunk is listed twice")
        entries[index] = (info.byte_offset + base, info.size, info.filter_mask)

    dataset.id.chunk_iter(note)
    return ChunkIndex(chunks, shape, file_size, entries)
