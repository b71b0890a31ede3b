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
from kerasmem.hdf5.format.urls import comparable_path, redact


def quote(name: str, limit: int = 120) -> str:
    """Quote a name for a message: control characters are escaped, secrets in URLs are hidden."""
    text = repr(redact(name))
    return text if len(text) <= limit else f"{text[: limit - 1]}…{text[0]}"


def one_line(text: str, limit: int = 1000) -> str:
    """Return untrusted text as one printable line: white space is joined, control characters are escaped."""
    text = " ".join(text.split())
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def type_name(dtype: str) -> str:
    """Return the readable name of a type, such as "float32" or "big-endian int16"."""
    kind = np.dtype(dtype)
    return ("big-endian " if kind.byteorder == ">" else "") + kind.newbyteorder("=").name


def plain_name(name: str) -> str:
    """Normalize the path of a dataset: "/train//x" becomes "train/x"."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


@dataclass(frozen=True)
class DatasetLayout:
    """Shape, type and storage of one dataset.

    Args:
        name: full path in the file, such as "train/images".
        shape: shape; axis 0 counts the rows.
        dtype: NumPy type string as stored: "<f4", ">i2", "|b1".
        storage: "contiguous", "chunked", "compact" or "virtual"; "several" if files differ.
        chunks: chunk shape, or None if the data is not chunked.
        filters: names of the filters of a chunk, such as ("shuffle", "gzip").
        stored_bytes: size in the file in bytes, after compression.
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
        """Number of rows."""
        return self.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[1:]

    @property
    def row_bytes(self) -> int:
        """Size of one uncompressed row in bytes."""
        return prod(self.row_shape) * np.dtype(self.dtype).itemsize

    @property
    def may_be_labels(self) -> bool:
        """Whether each row is one integer or boolean, as class labels are."""
        return np.dtype(self.dtype).kind in "iub" and prod(self.row_shape) == 1

    @property
    def chunk_rows(self) -> int:
        """Number of rows per chunk, or 1 if the data is not chunked."""
        return min(self.chunks[0], max(self.rows, 1)) if self.chunks else 1


@dataclass(frozen=True)
class FileLayout:
    """A file and its selected datasets.

    Args:
        path: absolute path or URL.
        size: size in bytes when it was scanned.
        datasets: the selected datasets, in their order.
        tag: version of a remote file (an ETag or modification time); None if unknown or local.
        time: modification time in ns of a local file in an index. Defaults to 0.
    """

    path: str
    size: int
    datasets: tuple[DatasetLayout, ...]
    tag: str | None = None
    time: int = 0


@dataclass(frozen=True)
class DataLayout:
    """One or more files with consecutive row numbers, in the order of the files.

    Args:
        files: the files.

    Raises:
        DataError: If the datasets of two files differ in row shape or type.
    """

    files: tuple[FileLayout, ...]

    def __post_init__(self) -> None:
        first = self.files[0]
        for file in self.files[1:]:
            for expected, dataset in zip(first.datasets, file.datasets, strict=True):
                for aspect, one, other in (
                    ("row shape", expected.row_shape, dataset.row_shape),
                    ("type", expected.dtype, dataset.dtype),
                ):
                    if one != other:
                        raise DataError(
                            f"{quote(file.path)}: dataset {quote(dataset.name)} must have the {aspect} {one}, as in "
                            f"{quote(first.path)}; got {other}. Leave the file out, or write it like the others"
                        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each file, followed by the total number of rows."""
        return (0, *itertools.accumulate(file.datasets[0].rows for file in self.files))

    @cached_property
    def datasets(self) -> tuple[DatasetLayout, ...]:
        """Datasets across all files, with the largest chunks and every filter."""
        if len(self.files) == 1:
            return self.files[0].datasets
        return tuple(_combine(parts) for parts in zip(*(file.datasets for file in self.files), strict=True))

    @property
    def title(self) -> str:
        """Path of the first file, and the number of the others."""
        first = quote(self.files[0].path)
        more = len(self.files) - 1
        return first if not more else f"{first} and {more:,} more file{'s' if more > 1 else ''}"

    @property
    def identity(self) -> list[tuple[str, int]]:
        """Path (relative to the common folder) and number of rows of each file. Empty for a single file."""
        if len(self.files) == 1:
            return []
        paths = [comparable_path(file.path) for file in self.files]
        folder = os.path.commonpath([os.path.dirname(path) for path in paths])
        rows = (file.datasets[0].rows for file in self.files)
        return [(os.path.relpath(path, folder), count) for path, count in zip(paths, rows, strict=True)]

    def chunk_grid(self, name: str) -> Grid:
        """Return the rows of each chunk of a dataset as a grid."""
        return Grid(self._chunks_of(name), self.starts)

    def block_grid(self, rows: int) -> Grid:
        """Return blocks of at most `rows` rows: whole chunks of the heaviest dataset if one fits."""
        heaviest = max(self.datasets, key=lambda layout: layout.row_bytes).name
        chunks = self._chunks_of(heaviest)
        if len(chunks) == 1:
            return Grid(rows)
        return Grid([rows // chunk * chunk if rows >= chunk else rows for chunk in chunks], self.starts)

    def _chunks_of(self, name: str) -> list[int]:
        number = [layout.name for layout in self.files[0].datasets].index(name)
        return [file.datasets[number].chunk_rows for file in self.files]


def _combine(parts: Sequence[DatasetLayout]) -> DatasetLayout:
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
    """Rows cut into cells, numbered across files. No cell spans two files.

    Args:
        sizes: number of rows per cell: one number, or one per file.
        starts: first row of each file, followed by the total number of rows. Defaults to one file without an end.

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
        """Number of rows of the largest cell."""
        return self._one or int(np.minimum(self._sizes, np.diff(self._starts)).max())

    @property
    def sizes(self) -> list[int]:
        """Number of rows per cell in each file, or a single number if all files agree."""
        sizes = [self._one] if self._one else self._sizes.tolist()
        return sizes[:1] if len(set(sizes)) == 1 else sizes

    def cell(self, rows: Any) -> Any:
        """Return the cell of each row."""
        if self._one:
            return rows // self._one
        file = np.searchsorted(self._starts, rows, side="right") - 1
        return self._firsts[file] + (rows - self._starts[file]) // self._sizes[file]

    def bounds(self, cells: Any) -> tuple[Any, Any]:
        """Return the first row of each cell, and the first row after it."""
        if self._one:
            return cells * self._one, (cells + 1) * self._one
        file = np.searchsorted(self._firsts, cells, side="right") - 1
        low = self._starts[file] + (cells - self._firsts[file]) * self._sizes[file]
        high = np.minimum(low + self._sizes[file], self._starts[file + 1])
        return (low, high) if isinstance(cells, np.ndarray) else (int(low), int(high))

    def coarser(self, least: int) -> Grid:
        """Return a grid with cells of `least` rows or more, each a multiple of a cell of this one."""
        if self._one:
            return Grid(self._one * -(-least // self._one))
        return Grid((self._sizes * -(-least // self._sizes)).tolist(), self._starts.tolist())


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate ranges of `counts[k]` integers that begin at `starts[k]`.

    Examples:
        >>> ranges(np.array([7, 3]), np.array([2, 3])).tolist()
        [7, 8, 3, 4, 5]
    """
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def as_grid(grid: Grid | int) -> Grid:
    """Return a grid, or turn a number of rows per cell into one for a single file."""
    return grid if isinstance(grid, Grid) else Grid(grid)


def _only(sizes: int | Sequence[int]) -> int:
    return int(sizes) if isinstance(sizes, (int, np.integer)) else int(sizes[0])
