"""Read the rows of a dataset: contiguous and chunked data directly, other data through HDF5."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.errors import DataError
from kerasmem.hdf5.format.chunks import Chunk, ChunkIndex
from kerasmem.hdf5.format.filters import DecodeError, Pipeline, Scratch, view_of
from kerasmem.hdf5.format.layout import one_line
from kerasmem.hdf5.format.links import DAMAGED
from kerasmem.hdf5.io.handle import FileHandle, Handle
from kerasmem.hdf5.io.ranges import Claim
from kerasmem.hdf5.rows.delivery import PIECE_BYTES, SCATTER_BYTES, Delivery, RowRun, ScatterRead
from kerasmem.units import KIB

_SKIP_BYTES = 64 * KIB  # shorter gaps in contiguous data are read along

Outputs = Sequence[tuple[Delivery, np.ndarray]]
"""Delivery and array in the window of each column of a dataset."""


class UnreadableRowsError(Exception):
    """Rows of a dataset cannot be read.

    Args:
        start: first row within the file.
        stop: row after the last.
        reason: reason, to follow "cannot be read: ".
    """

    def __init__(self, start: int, stop: int, reason: str) -> None:
        super().__init__(reason)
        self.start, self.stop = start, stop


Reader = Handle | Claim
"""Reader of a file's bytes: its handle, or a claim on prefetched ranges."""


@dataclass(eq=False)
class Source(ABC):
    """Reads rows of one dataset, in any number of threads.

    Args:
        shape: shape of the dataset, followed by the extents of an array type.
        dtype: stored dtype, without these extents.
        handle: the file.

    Attributes:
        row_bytes: size of a stored row in bytes.
        cell_rows: number of rows that are read together, or skipped if none is picked.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    handle: Handle

    def __post_init__(self) -> None:
        self.row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        self.cell_rows = self.shape[0]

    def read(self, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader | None = None) -> None:
        """Read rows into a window.

        Args:
            run: the rows.
            outputs: deliveries and arrays.
            scratch: buffers of this thread.
            reader: reader of the bytes. Defaults to the handle.

        Raises:
            UnreadableRowsError: If the rows cannot be read.
        """
        for part in run.cells(self.cell_rows):
            try:
                self.read_cell(part, outputs, scratch, reader or self.handle)
            except DataError:
                raise
            except (DecodeError, *DAMAGED) as error:
                raise UnreadableRowsError(part.start, part.stop, one_line(str(error))) from error

    @abstractmethod
    def read_cell(self, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader) -> None:
        """Read rows of one cell into a window."""

    def offsets(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the offset of each row, or None if rows cannot be read straight from the file."""
        return None

    def read_scattered(self, plan: ScatterRead, share: tuple[int, int]) -> None:
        """Read a share of a plan made with `offsets`.

        Raises:
            UnreadableRowsError: If the rows cannot be read.
        """
        assert isinstance(self.handle, FileHandle)
        try:
            plan.read(self.handle, share)
        except (EOFError, OSError) as error:
            rows = plan.rows[slice(*share)]
            raise UnreadableRowsError(int(rows.min()), int(rows.max()) + 1, str(error)) from error

    def extents(self, run: RowRun) -> Iterator[tuple[int, int]]:
        """Yield the extents that `read` may read, if known."""
        return iter(())


@dataclass(eq=False)
class Hdf5Source(Source):
    """A dataset read through HDF5, by one thread at once.

    Args, after those of every source:
        find: function that returns the open dataset.
        rows_at_once: number of rows per cell.
    """

    find: Callable[[], h5py.Dataset]
    rows_at_once: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cell_rows = self.rows_at_once
        self._reading = threading.Lock()
        self._scratch = Scratch()

    def read_cell(self, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader) -> None:
        """Read rows of one cell into a window."""
        with self._reading:
            shape = (run.stop - run.start, *self.shape[1:])
            raw = self._scratch.take("rows", shape[0] * self.row_bytes)
            raw[:] = 0  # HDF5 leaves the buffer as it is if nothing was written and the fill time is "never"
            rows = raw.view(self.dtype).reshape(shape)
            self.find().read_direct(rows, np.s_[run.start : run.stop])
            self.handle.count(raw.nbytes)
            for delivery, target in outputs:
                delivery.put(rows, run.picked, target, run.slots, scratch)


@dataclass(eq=False)
class DirectSource(Source):
    """A dataset read without HDF5."""

    def extents_from(self, offset: int, run: RowRun) -> Iterator[tuple[int, int]]:
        """Yield the extents of adjacent rows that begin at `offset`."""
        parts = [run] if run.picked is None else run.cells(max(1, _SKIP_BYTES // self.row_bytes))
        for part in parts:
            yield offset + (part.start - run.start) * self.row_bytes, (part.stop - part.start) * self.row_bytes

    def read_from(self, offset: int, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader) -> None:
        """Read adjacent rows that begin at `offset`."""
        size = self.row_bytes
        delivery, target = outputs[0]
        in_order = isinstance(run.slots, slice) and run.picked is None
        if len(outputs) == 1 and delivery.plain and (size >= SCATTER_BYTES or in_order):
            for part in run.runs():
                self._scatter(offset + (part.start - run.start) * size, part, target, reader)
            return
        cell = max(1, (PIECE_BYTES if run.picked is None else _SKIP_BYTES) // size)
        for part in run.cells(cell):
            count = part.stop - part.start
            raw = scratch.take("rows", count * size)
            reader.read(view_of(raw), offset + (part.start - run.start) * size)
            rows = raw.view(self.dtype).reshape(count, *self.shape[1:])
            for delivery, target in outputs:
                delivery.put(rows, part.picked, target, part.slots, scratch)

    def _scatter(self, offset: int, run: RowRun, target: np.ndarray, reader: Reader) -> None:
        """Read each row into its place."""
        size, window = self.row_bytes, view_of(target)
        if isinstance(run.slots, slice):
            reader.read(window[run.slots.start * size : run.slots.stop * size], offset)
            return
        for row, byte in enumerate((run.slots.astype(np.int64) * size).tolist()):
            reader.read(window[byte : byte + size], offset + row * size)


@dataclass(eq=False)
class ContiguousSource(DirectSource):
    """A contiguous dataset.

    Args, after those of `DirectSource`:
        offset: offset of the first row in the file.
    """

    offset: int

    def extents(self, run: RowRun) -> Iterator[tuple[int, int]]:
        """Yield the extents of the rows."""
        return self.extents_from(self.offset + run.start * self.row_bytes, run)

    def offsets(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the offset of each row, or None for a remote file."""
        return self.offset + rows * self.row_bytes if isinstance(self.handle, FileHandle) else None

    def read_cell(self, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader) -> None:
        """Read rows into a window."""
        self.read_from(self.offset + run.start * self.row_bytes, run, outputs, scratch, reader)


@dataclass(eq=False)
class ChunkedSource(DirectSource):
    """A chunked dataset with known filters.

    Args, after those of `DirectSource`:
        index: index of the chunks.
        chunk: chunk shape.
        pipeline: the filters.
    """

    index: ChunkIndex
    chunk: tuple[int, ...]
    pipeline: Pipeline

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cell_rows = self.chunk[0]
        self._whole = bool(self.pipeline.filters)  # whether chunks must be read completely

    def offsets(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the offset of each row, or None if rows cannot be read straight from the file."""
        if self._whole or not isinstance(self.handle, FileHandle):
            return None
        cells, inside = np.divmod(rows, self.chunk[0])
        chunks = self.index.offsets(cells, self.pipeline.chunk_bytes)
        return None if chunks is None else chunks + inside * self.row_bytes

    def extents(self, run: RowRun) -> Iterator[tuple[int, int]]:
        """Yield the extents of the chunks, or of the rows if chunks have no filters."""
        for part in run.cells(self.chunk[0]):
            for chunk in self.index.row_of_chunks(part.start // self.chunk[0]):
                if chunk.offset is None:
                    continue
                if self._whole or chunk.inner:
                    yield chunk.offset, chunk.size
                else:
                    yield from self.extents_from(chunk.offset + part.start % self.chunk[0] * self.row_bytes, part)

    def read_cell(self, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader) -> None:
        """Read rows of one row of chunks into a window."""
        for chunk in self.index.row_of_chunks(run.start // self.chunk[0]):
            self._read_chunk(chunk, run, outputs, scratch, reader)

    def _read_chunk(self, chunk: Chunk, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader) -> None:
        skipped = run.start % self.chunk[0]
        if chunk.offset is None:
            raise DecodeError("a chunk was never written")
        if not self._whole and not chunk.inner:
            self._check_size(chunk)
            self.read_from(chunk.offset + skipped * self.row_bytes, run, outputs, scratch, reader)
            return
        rows = self.decode(chunk, run.start, scratch, reader)[skipped : skipped + run.stop - run.start]
        index = (slice(None), *(slice(0, part.stop - part.start) for part in chunk.inner))
        rows = rows[index]
        for delivery, target in outputs:
            delivery.put(rows, run.picked, target, run.slots, scratch, chunk.inner)

    def decode(self, chunk: Chunk, row: int, scratch: Scratch, reader: Reader) -> np.ndarray:
        """Read and decode a chunk with a row. The result may be a view of `scratch`."""
        self._check_size(chunk)
        assert chunk.offset is not None
        stored = scratch.take("stored", chunk.size)
        reader.read(view_of(stored), chunk.offset)
        try:
            data = self.pipeline.decode(stored, chunk.mask, scratch)
        except DecodeError:
            if chunk.size != self.pipeline.chunk_bytes or not self._is_at_edge(chunk, row):
                raise
            data = stored  # with H5Pset_chunk_opts, chunks beyond the dataset's edge are not filtered
        return data.view(self.dtype).reshape(self.chunk)

    def _is_at_edge(self, chunk: Chunk, row: int) -> bool:
        sizes = (part.stop - part.start for part in chunk.inner)
        is_narrow = any(size < full for size, full in zip(sizes, self.chunk[1:], strict=False))
        return is_narrow or row // self.chunk[0] == self.shape[0] // self.chunk[0]

    def _check_size(self, chunk: Chunk) -> None:
        if chunk.size > self.pipeline.most_stored() or (
            not self.pipeline.filters and chunk.size != self.pipeline.chunk_bytes
        ):
            raise DecodeError(f"a chunk of {self.pipeline.chunk_bytes:,} bytes takes {chunk.size:,} in the file")
