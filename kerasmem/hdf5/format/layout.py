"""Layouts of files as plain results: shapes, types and storage of datasets, and rows cut into cells of equal size."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from kerasmem.errors import DataError
from kerasmem.hdf5.format.urls import place_of, redact


def shown(name: str, limit: int = 120) -> str:
    """Return a name so that it can be printed: quoted, control characters escaped, without a URL's secrets."""
    text = repr(redact(name))
    return text if len(text) <= limit else f"{text[: limit - 1]}…{text[0]}"


def one_line(text: str, limit: int = 1000) -> str:
    """Return text from elsewhere as one line that can be printed: white space joined, control characters escaped."""
    text = " ".join(text.split())
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def type_name(dtype: str) -> str:
    """Return a type as it is shown: "float32", "big-endian int16"."""
    kind = np.dtype(dtype)
    return ("big-endian " if kind.byteorder == ">" else "") + kind.newbyteorder("=").name


def plain_name(name: str) -> str:
    """Return a dataset's path in its plain form: "/train//x" is "train/x"."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


@dataclass(frozen=True)
class DatasetLayout:
    """How one dataset is stored.

    Args:
        name: full path inside the file, such as "train/images".
        shape: shape; axis 0 counts the rows.
        dtype: NumPy's text for the stored type: "<f4", ">i2", "|b1".
        storage: "contiguous", "chunked", "compact" or "virtual"; "several" where files differ in it.
        chunks: chunk shape, or None if the data is not chunked.
        filters: names of the filters a chunk passes through, such as ("shuffle", "gzip").
        stored_bytes: bytes taken in the file, after compression.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: str
    chunks: tuple[int, ...] | None = None
    filters: tuple[str, ...] = ()
    stored_bytes: int = 0

    @property
    def rows(self) -> int:
        """Length of axis 0."""
        return self.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[1:]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as stored, uncompressed."""
        return prod(self.row_shape) * np.dtype(self.dtype).itemsize

    @property
    def may_be_labels(self) -> bool:
        """Whether it holds one whole number a row, as class labels are."""
        return np.dtype(self.dtype).kind in "iub" and prod(self.row_shape) == 1

    @property
    def chunk_rows(self) -> int:
        """Rows that have to be read together: a chunk's rows, or 1 if the data is not chunked."""
        return min(self.chunks[0], max(self.rows, 1)) if self.chunks else 1


@dataclass(frozen=True)
class FileLayout:
    """A file and those of its datasets that were asked for.

    Args:
        path: absolute path of the file.
        size: bytes of the file when it was looked at.
        datasets: one entry a dataset, in the order asked for.
        tag: of a remote file, what its store says of its version (an ETag, or a time of change); None otherwise.
        time: of a local file in an index, its time of change in ns; else 0.
    """

    path: str
    size: int
    datasets: tuple[DatasetLayout, ...]
    tag: str | None = None
    time: int = 0


@dataclass(frozen=True)
class DataLayout:
    """One file, or several with rows counted through in the order of the files.

    Args:
        files: the files; their datasets agree in names, row shapes and types.

    Raises:
        DataError: If the datasets of two files differ.
    """

    files: tuple[FileLayout, ...]

    def __post_init__(self) -> None:
        first = self.files[0]
        for file in self.files[1:]:
            for wanted, other in zip(first.datasets, file.datasets, strict=True):
                for what, one, two in (
                    ("rows of shape", wanted.row_shape, other.row_shape),
                    ("the type", wanted.dtype, other.dtype),
                ):
                    if one != two:
                        raise DataError(
                            f"{shown(file.path)}: dataset {shown(other.name)} has {what} {two}, and in "
                            f"{shown(first.path)} it has {one}; files read as one have to agree: leave it out, "
                            "or write it like the others"
                        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first row of each file, and last the number of all rows."""
        return (0, *itertools.accumulate(file.datasets[0].rows for file in self.files))

    @cached_property
    def datasets(self) -> tuple[DatasetLayout, ...]:
        """The datasets as if all rows lay in one file, with the largest chunks and all filters there are."""
        if len(self.files) == 1:
            return self.files[0].datasets
        return tuple(_together(parts) for parts in zip(*(file.datasets for file in self.files), strict=True))

    @property
    def title(self) -> str:
        """The file, or the first of them and how many more."""
        first = shown(self.files[0].path)
        more = len(self.files) - 1
        return first if not more else f"{first} and {more:,} more file{'s' if more > 1 else ''}"

    @property
    def identity(self) -> list[tuple[str, int]]:
        """Names and rows of the files, relative to their common folder; [] for a single file."""
        if len(self.files) == 1:
            return []
        places = [place_of(file.path) for file in self.files]
        folder = os.path.commonpath([os.path.dirname(place) for place in places])
        rows = (file.datasets[0].rows for file in self.files)
        return [(os.path.relpath(place, folder), count) for place, count in zip(places, rows, strict=True)]

    def chunk_grid(self, name: str) -> Grid:
        """Return the places of the chunks of a dataset."""
        return Grid(self._chunks_of(name), self.starts)

    def block_grid(self, rows: int) -> Grid:
        """Return blocks of at most so many rows: whole chunks of the heaviest dataset if one fits."""
        heaviest = max(self.datasets, key=lambda layout: layout.row_bytes).name
        chunks = self._chunks_of(heaviest)
        if len(chunks) == 1:
            return Grid(rows)
        return Grid([rows // chunk * chunk if rows >= chunk else rows for chunk in chunks], self.starts)

    def _chunks_of(self, name: str) -> list[int]:
        at = [layout.name for layout in self.files[0].datasets].index(name)
        return [file.datasets[at].chunk_rows for file in self.files]


def _together(parts: Sequence[DatasetLayout]) -> DatasetLayout:
    first = parts[0]
    chunks = [part.chunks for part in parts if part.chunks is not None]
    kinds = {(part.storage, part.chunks is not None and part.chunks[1:] != part.row_shape) for part in parts}
    return DatasetLayout(
        name=first.name,
        shape=(sum(part.rows for part in parts), *first.row_shape),
        dtype=first.dtype,
        storage=first.storage if len(kinds) == 1 else "several",
        chunks=tuple(max(extents) for extents in zip(*chunks, strict=False)) if chunks else None,
        filters=tuple(dict.fromkeys(name for part in parts for name in part.filters)),
        stored_bytes=sum(part.stored_bytes for part in parts),
    )


class Grid:
    """Cells of rows, numbered through all files. No cell spans two files.

    Args:
        sizes: rows of a cell: one number, or one for each file.
        starts: the first row of each file, and last the number of all rows; by default one file without an end.

    Examples:
        >>> grid = Grid([4, 2], [0, 6, 9])
        >>> grid.cell(np.array([0, 3, 4, 6, 8])).tolist()
        [0, 0, 1, 2, 3]
        >>> grid.bounds(3), grid.bounds(1)
        ((8, 9), (4, 6))
    """

    def __init__(self, sizes: int | Sequence[int], starts: Sequence[int] | None = None) -> None:
        self._one = 0 if starts is not None and len(starts) > 2 else _only(sizes)
        if not self._one:
            assert starts is not None
            self._starts = np.asarray(starts, np.int64)
            rows = np.diff(self._starts)
            self._sizes = np.broadcast_to(np.asarray(sizes, np.int64), rows.shape)
            self._firsts = np.r_[0, np.cumsum(-(-rows // self._sizes))]

    @property
    def largest(self) -> int:
        """Rows of the largest cell."""
        return self._one or int(np.minimum(self._sizes, np.diff(self._starts)).max())

    @property
    def sizes(self) -> list[int]:
        """Rows of a cell in each file; one number if all are the same."""
        found = [self._one] if self._one else self._sizes.tolist()
        return found[:1] if len(set(found)) == 1 else found

    def cell(self, rows: Any) -> Any:
        """Return the number of the cell that each row lies in."""
        if self._one:
            return rows // self._one
        file = np.searchsorted(self._starts, rows, side="right") - 1
        return self._firsts[file] + (rows - self._starts[file]) // self._sizes[file]

    def bounds(self, cells: Any) -> tuple[Any, Any]:
        """Return the first row of each cell, and the row after its last."""
        if self._one:
            return cells * self._one, (cells + 1) * self._one
        file = np.searchsorted(self._firsts, cells, side="right") - 1
        low = self._starts[file] + (cells - self._firsts[file]) * self._sizes[file]
        high = np.minimum(low + self._sizes[file], self._starts[file + 1])
        return (low, high) if isinstance(cells, np.ndarray) else (int(low), int(high))

    def coarser(self, least: int) -> Grid:
        """Return the grid of whole numbers of these cells that have `least` rows or more."""
        if self._one:
            return Grid(self._one * -(-least // self._one))
        return Grid((self._sizes * -(-least // self._sizes)).tolist(), self._starts.tolist())


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return runs of numbers one after another: `counts[k]` of them from `starts[k]` on.

    Examples:
        >>> ranges(np.array([7, 3]), np.array([2, 3])).tolist()
        [7, 8, 3, 4, 5]
    """
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def as_grid(grid: Grid | int) -> Grid:
    """Return a grid. A number means the rows of a cell in a single file."""
    return grid if isinstance(grid, Grid) else Grid(grid)


def _only(sizes: int | Sequence[int]) -> int:
    return int(sizes) if isinstance(sizes, (int, np.integer)) else int(sizes[0])
