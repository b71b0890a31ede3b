"""The places of the chunks of a dataset in its file, read once."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.hdf5.format.filters import DecodeError

MOST_CHUNKS = 8_000_000  # that are remembered, 24 bytes each


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
        places: offset, size and mask of each chunk, an array each.
        cells: row of chunks and number in it of each, rising; by default there are all chunks, one after another.

    Raises:
        DecodeError: If the index is damaged: two chunks lie in one place, or one lies outside the file.
    """

    def __init__(
        self,
        chunks: tuple[int, ...],
        shape: tuple[int, ...],
        file_size: int,
        places: tuple[np.ndarray, np.ndarray, np.ndarray],
        cells: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self._chunks, self._shape = chunks, shape
        self._grid = grid_of(chunks, shape)
        self._per_row = prod(self._grid[1:])
        self._offsets, self._sizes, self._masks = places
        if cells is None:
            if len(self._offsets) != prod(self._grid):
                raise DecodeError(f"its index has {len(self._offsets):,} chunks, and there are {prod(self._grid):,}")
            cells = np.divmod(np.arange(len(self._offsets)), self._per_row)
        self._rows, self._numbers = cells
        self._refuse_overlaps(file_size)

    def _refuse_overlaps(self, file_size: int) -> None:
        places = self._offsets.argsort()
        starts = self._offsets[places]
        ends = starts + self._sizes[places]
        if len(starts) and (starts[0] < 0 or ends.max() > file_size):
            raise DecodeError("its chunk index is damaged: a chunk lies outside the file")
        twice = (self._rows[1:] == self._rows[:-1]) & (self._numbers[1:] == self._numbers[:-1])
        if twice.any() or (starts[1:] < ends[:-1]).any():
            raise DecodeError("its chunk index is damaged: two chunks lie in one place")

    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return the `places` of this index; None if not every chunk was written."""
        if len(self._offsets) != prod(self._grid):
            return None
        return self._offsets, self._sizes, self._masks

    def row_of_chunks(self, number: int) -> Iterator[Chunk]:
        """Return the chunks that hold the rows from `number` × chunk rows onwards."""
        low, high = np.searchsorted(self._rows, [number, number + 1]).tolist()
        if self._per_row == 1 and high - low == 1:
            yield self._stored(low, self._inner(0))
            return
        at = low
        for cell in range(self._per_row):
            while at < high and self._numbers[at] < cell:
                at += 1
            inner = self._inner(cell)
            if at < high and self._numbers[at] == cell:
                yield self._stored(at, inner)
            else:
                yield Chunk(inner, None)

    def offsets(self, cells: np.ndarray, size: int) -> np.ndarray | None:
        """Return the offset of the only chunk of each row of chunks.

        None if there are several to a row, or one of these was not written or is not stored as it is.
        """
        if self._per_row != 1 or self._chunks[1:] != self._shape[1:] or not len(self._rows):
            return None
        at = np.minimum(np.searchsorted(self._rows, cells), len(self._rows) - 1)
        plain = np.array_equal(self._rows[at], cells) and not self._masks[at].any() and (self._sizes[at] == size).all()
        return self._offsets[at] if plain else None

    def _stored(self, at: int, inner: tuple[slice, ...]) -> Chunk:
        return Chunk(inner, int(self._offsets[at]), int(self._sizes[at]), int(self._masks[at]))

    def _inner(self, cell: int) -> tuple[slice, ...]:
        if self._chunks[1:] == self._shape[1:]:
            return ()
        parts = []
        for chunk, count, extent in zip(
            reversed(self._chunks[1:]), reversed(self._grid[1:]), reversed(self._shape[1:]), strict=True
        ):
            cell, at = divmod(cell, count)
            parts.append(slice(at * chunk, min((at + 1) * chunk, extent)))
        return tuple(reversed(parts))


def grid_of(chunks: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many chunks there are along each axis."""
    return tuple(-(-extent // chunk) for extent, chunk in zip(shape, chunks, strict=True))


def read_index(dataset: h5py.Dataset, shape: tuple[int, ...], file_size: int, base: int = 0) -> ChunkIndex:
    """Return the places of the chunks of a dataset.

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
    # A chunk's number may exceed 64 bits in a hostile file, so rows and the rest are kept apart.
    places = array("q")  # five numbers a chunk; as objects they would take six times the room

    def note(info: Any) -> None:
        cell = [at // chunk for at, chunk in zip(info.chunk_offset, chunks, strict=True)]
        if any(at % chunk for at, chunk in zip(info.chunk_offset, chunks, strict=True)):
            raise DecodeError(f"its chunk index is damaged: no chunk begins at {info.chunk_offset}")
        if any(at >= count for at, count in zip(cell, grid, strict=True)):
            return
        number = 0
        for at, count in zip(cell[1:], grid[1:], strict=True):
            number = number * count + at
        places.extend((cell[0], number, info.byte_offset, info.size, info.filter_mask))

    walk_chunks(dataset, note)
    table = np.array(places, np.int64).reshape(-1, 5)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    found = table[:, 2] + base, table[:, 3].astype(np.uint32), table[:, 4].astype(np.uint32)
    cells = table[:, 0].copy(), table[:, 1].copy()
    return ChunkIndex(chunks, shape, file_size, found, cells)


def walk_chunks(dataset: h5py.Dataset, note: Callable[[Any], None]) -> None:
    """Call `note` with h5py's record of each stored chunk: `chunk_offset`, `filter_mask`, `byte_offset`, `size`.

    Args:
        dataset: a chunked dataset of an open file.
        note: called once a chunk, in the order of the index; what it raises goes through.
    """
    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(note)
    else:  # h5py over an HDF5 before 1.14
        for number in range(dataset.id.get_num_chunks()):
            note(dataset.id.get_chunk_info(number))
