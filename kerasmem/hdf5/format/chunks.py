"""The places of the chunks of a dataset in its file, read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.hdf5.format.filters import DecodeError

CHUNK = np.dtype([("offset", "<i8"), ("size", "<u4"), ("mask", "<u4")])
"""Place of a chunk in a file (-1 if it was never written), bytes in it, and which filters were left out."""
MOST_CHUNKS = 8_000_000  # that are remembered, 16 bytes each


@dataclass(frozen=True)
class Chunk:
    """One stored chunk, or one that was never written.

    Args:
        inner: which part of a row it covers; () where it covers whole rows.
        offset: place in the file; None if it was never written.
        size: bytes in the file.
        mask: which filters were left out.
    """

    inner: tuple[slice, ...]
    offset: int | None
    size: int = 0
    mask: int = 0


class ChunkIndex:
    """The chunks of a dataset by the rows they hold.

    Args:
        chunks: shape of a chunk.
        shape: the dataset's, as far as it is of interest.
        file_size: bytes of the file.
        places: a `CHUNK` for each chunk, in order.

    Raises:
        DecodeError: If the index is damaged: two chunks lie in one place, or one lies outside the file.
    """

    def __init__(self, chunks: tuple[int, ...], shape: tuple[int, ...], file_size: int, places: np.ndarray) -> None:
        self._chunks, self._shape = chunks, shape
        self._grid = grid_of(chunks, shape)
        self._per_row = prod(self._grid[1:])
        self._offsets, self._sizes, self._masks = places["offset"], places["size"], places["mask"]
        written = np.flatnonzero(self._offsets >= 0)
        written = written[self._offsets[written].argsort()]
        starts = self._offsets[written]
        ends = starts + self._sizes[written]
        if len(ends) and ends.max() > file_size:
            raise DecodeError("its chunk index is damaged: a chunk lies outside the file")
        if (starts[1:] < ends[:-1]).any():
            raise DecodeError("its chunk index is damaged: two chunks lie in one place")

    def row_of_chunks(self, number: int) -> Iterator[Chunk]:
        """Return the chunks that hold the rows from `number` × chunk rows onwards."""
        for cell in range(self._per_row):
            at = number * self._per_row + cell
            offset = int(self._offsets[at])
            if offset < 0:
                yield Chunk(self._inner(cell), None)
            else:
                yield Chunk(self._inner(cell), offset, int(self._sizes[at]), int(self._masks[at]))

    def offsets(self, cells: np.ndarray, size: int) -> np.ndarray | None:
        """Return the offset of the only chunk of each row of chunks.

        None if there are several to a row, or one of these was not written or is not stored as it is.
        """
        if self._chunks[1:] != self._shape[1:]:
            return None
        offsets = self._offsets[cells]
        plain = (offsets >= 0).all() and not self._masks[cells].any() and (self._sizes[cells] == size).all()
        return offsets if plain else None

    def _inner(self, cell: int) -> tuple[slice, ...]:
        if self._chunks[1:] == self._shape[1:]:
            return ()
        parts = zip(np.unravel_index(cell, self._grid[1:]), self._chunks[1:], self._shape[1:], strict=True)
        return tuple(slice(int(at) * chunk, min((int(at) + 1) * chunk, extent)) for at, chunk, extent in parts)


def grid_of(chunks: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many chunks there are along each axis."""
    return tuple(-(-extent // chunk) for extent, chunk in zip(shape, chunks, strict=True))


def read_index(dataset: h5py.Dataset, shape: tuple[int, ...], file_size: int, base: int = 0) -> ChunkIndex | None:
    """Return the places of the chunks of a dataset; None if there are too many.

    Args:
        dataset: the dataset; its index is read now.
        shape: its shape as far as it is of interest; it may have more rows.
        file_size: bytes of the file.
        base: added to every place that HDF5 tells.

    Raises:
        DecodeError: If the index is damaged.
    """
    chunks = tuple(int(extent) for extent in dataset.chunks)
    grid = grid_of(chunks, shape)
    count = prod(grid)
    if max(count, dataset.id.get_num_chunks()) > MOST_CHUNKS:
        return None
    places = np.zeros(count, CHUNK)
    places["offset"] = -1

    def note(info: Any) -> None:
        if any(at % chunk for at, chunk in zip(info.chunk_offset, chunks, strict=True)):
            raise DecodeError(f"its chunk index is damaged: no chunk begins at {info.chunk_offset}")
        number = 0
        for at, chunk, extent in zip(info.chunk_offset, chunks, grid, strict=True):
            if at // chunk >= extent:
                return
            number = number * extent + at // chunk
        if places["offset"][number] >= 0:
            raise DecodeError("its chunk index is damaged: a chunk is named twice")
        places[number] = (info.byte_offset + base, info.size, info.filter_mask)

    dataset.id.chunk_iter(note)
    return ChunkIndex(chunks, shape, file_size, places)
