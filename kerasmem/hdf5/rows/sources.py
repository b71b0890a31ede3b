"""Read the rows of a dataset: contiguous bytes and chunks past HDF5, everything else through it."""

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

_SKIP_BYTES = 64 * KIB  # in data without chunks, shorter gaps are read along

Outputs = Sequence[tuple[Delivery, np.ndarray]]
"""What to make of the rows of a dataset, and the window's array for it; one a column."""


class UnreadableRowsError(Exception):
    """Rows of a dataset cannot be read.

    Args:
        start: first row, counted within the file.
        stop: row after the last.
        reason: goes on from "cannot be read: ".
    """

    def __init__(self, start: int, stop: int, reason: str) -> None:
        super().__init__(reason)
        self.start, self.stop = start, stop


Reader = Handle | Claim
"""Bytes of a file: its handle, or a claim on some of its ranges."""


@dataclass(eq=False)
class Source(ABC):
    """Reads rows of one dataset. Any number of threads may do so at a time.

    Args:
        shape: shape of the rows and all, the extents of an array type included.
        dtype: type as stored, without them.
        handle: the file.

    Attributes:
        row_bytes: bytes of a row as stored.
        cell_rows: rows read at a time, and not read if none of them is picked.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    handle: Handle

    def __post_init__(self) -> None:
        self.row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        self.cell_rows = self.shape[0]

    def read(self, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader | None = None) -> None:
        """Read rows into the windows.

        Args:
            run: the rows.
            outputs: what to make of them, and where to put them.
            scratch: this thread's buffers.
            reader: gives the bytes; by default the handle does.

        Raises:
            UnreadableRowsError: If they cannot be read.
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
        """Read rows of one cell into the windows."""

    def offsets(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the offset of each row, or None if not all are stored as they are."""
        return None

    def read_scattered(self, plan: ScatterRead, share: tuple[int, int]) -> None:
        """Read a share of a plan made with `offsets`.

        Raises:
            UnreadableRowsError: If it cannot be read.
        """
        assert isinstance(self.handle, FileHandle)  # or else there are no `offsets`
        try:
            plan.read(self.handle, share)
        except (EOFError, OSError) as error:
            rows = plan.rows[slice(*share)]
            raise UnreadableRowsError(int(rows.min()), int(rows.max()) + 1, str(error)) from error

    def extents(self, run: RowRun) -> Iterator[tuple[int, int]]:
        """Return the extents that `read` may read, or nothing if unknown."""
        return iter(())


@dataclass(eq=False)
class Hdf5Source(Source):
    """A dataset read by HDF5, one thread at a time.

    Args, after those of every source:
        find: returns the dataset, open.
        rows_at_once: rows of a cell.
    """

    find: Callable[[], h5py.Dataset]
    rows_at_once: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cell_rows = self.rows_at_once
        self._reading = threading.Lock()
        self._scratch = Scratch()

    def read_cell(self, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader) -> None:
        """Read rows of one cell into the windows."""
        with self._reading:
            shape = (run.stop - run.start, *self.shape[1:])
            raw = self._scratch.take("rows", shape[0] * self.row_bytes)
            raw[:] = 0  # HDF5 leaves the buffer as it is if nothing was written and the fill time is "never"
            rows = raw.view(self.dtype).reshape(shape)
            self.find().read_direct(rows, np.s_[run.start : run.stop])
            self.handle.count(raw.nbytes)
            for delivery, target in outputs:
                delivery.put(rows, run.picked, target, run.places, scratch)


@dataclass(eq=False)
class DirectSource(Source):
    """A dataset read past HDF5."""

    def extents_from(self, offset: int, run: RowRun) -> Iterator[tuple[int, int]]:
        """Return the extents of adjacent rows. The first of the run lies at `offset`."""
        parts = [run] if run.picked is None else run.cells(max(1, _SKIP_BYTES // self.row_bytes))
        for part in parts:
            yield offset + (part.start - run.start) * self.row_bytes, (part.stop - part.start) * self.row_bytes

    def read_from(self, offset: int, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader) -> None:
        """Read adjacent rows. The first of the run lies at `offset`."""
        size = self.row_bytes
        delivery, target = outputs[0]
        if len(outputs) == 1 and delivery.plain:
            straight = isinstance(run.places, slice)
            if size >= SCATTER_BYTES or (straight and run.picked is None):
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
                delivery.put(rows, part.picked, target, part.places, scratch)

    def _scatter(self, offset: int, run: RowRun, target: np.ndarray, reader: Reader) -> None:
        """Read each row into its place."""
        size, window = self.row_bytes, view_of(target)
        if isinstance(run.places, slice):
            reader.read(window[run.places.start * size : run.places.stop * size], offset)
            return
        for row, at in enumerate((run.places.astype(np.int64) * size).tolist()):
            reader.read(window[at : at + size], offset + row * size)


@dataclass(eq=False)
class ContiguousSource(DirectSource):
    """A dataset in one run of bytes, with no filters.

    Args, after those of `DirectSource`:
        offset: where in the file it begins.
    """

    offset: int

    def extents(self, run: RowRun) -> Iterator[tuple[int, int]]:
        """Return the extents of the rows."""
        return self.extents_from(self.offset + run.start * self.row_bytes, run)

    def offsets(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the offset of each row, or None for a remote file."""
        return self.offset + rows * self.row_bytes if isinstance(self.handle, FileHandle) else None

    def read_cell(self, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader) -> None:
        """Read rows into the windows."""
        self.read_from(self.offset + run.start * self.row_bytes, run, outputs, scratch, reader)


@dataclass(eq=False)
class ChunkedSource(DirectSource):
    """A dataset in chunks with known filters.

    Args, after those of `DirectSource`:
        index: where the chunks lie.
        chunk: shape of a chunk.
        pipeline: the filters.
    """

    index: ChunkIndex
    chunk: tuple[int, ...]
    pipeline: Pipeline

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cell_rows = self.chunk[0]
        self._whole = bool(self.pipeline.filters)  # whether chunks are read as a whole

    def offsets(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the offset of each row, or None if not all are stored as they are."""
        if self._whole or not isinstance(self.handle, FileHandle):
            return None
        cells, inside = np.divmod(rows, self.chunk[0])
        chunks = self.index.offsets(cells, self.pipeline.chunk_bytes)
        return None if chunks is None else chunks + inside * self.row_bytes

    def extents(self, run: RowRun) -> Iterator[tuple[int, int]]:
        """Return the extents of the chunks, or of the rows in chunks without filters."""
        for part in run.cells(self.chunk[0]):
            for chunk in self.index.row_of_chunks(part.start // self.chunk[0]):
                if chunk.offset is None:
                    continue
                if self._whole or chunk.inner:
                    yield chunk.offset, chunk.size
                else:
                    yield from self.extents_from(chunk.offset + part.start % self.chunk[0] * self.row_bytes, part)

    def read_cell(self, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader) -> None:
        """Read rows of one row of chunks into the windows."""
        for chunk in self.index.row_of_chunks(run.start // self.chunk[0]):
            self._read_chunk(chunk, run, outputs, scratch, reader)

    def _read_chunk(self, chunk: Chunk, run: RowRun, outputs: Outputs, scratch: Scratch, reader: Reader) -> None:
        skipped = run.start % self.chunk[0]
        if chunk.offset is None:
            raise DecodeError("a chunk is missing there")
        if not self._whole and not chunk.inner:
            self._check_size(chunk)
            self.read_from(chunk.offset + skipped * self.row_bytes, run, outputs, scratch, reader)
            return
        rows = self.decode(chunk, scratch, reader)[skipped : skipped + run.stop - run.start]
        index = (slice(None), *(slice(0, part.stop - part.start) for part in chunk.inner))
        rows = rows[index]
        for delivery, target in outputs:
            delivery.put(rows, run.picked, target, run.places, scratch, chunk.inner)

    def decode(self, chunk: Chunk, scratch: Scratch, reader: Reader) -> np.ndarray:
        """Return a stored chunk without its filters, in `scratch` or elsewhere."""
        self._check_size(chunk)
        assert chunk.offset is not None
        stored = scratch.take("stored", chunk.size)
        reader.read(view_of(stored), chunk.offset)
        try:
            data = self.pipeline.decode(stored, chunk.mask, scratch)
        except DecodeError:
            if chunk.size != self.pipeline.chunk_bytes:
                raise
            data = stored  # a writer can leave chunks at the dataset's edge as they are (H5Pset_chunk_opts)
        return data.view(self.dtype).reshape(self.chunk)

    def _check_size(self, chunk: Chunk) -> None:
        if chunk.size > self.pipeline.most_stored() or (
            not self.pipeline.filters and chunk.size != self.pipeline.chunk_bytes
        ):
            raise DecodeError(f"a chunk of {self.pipeline.chunk_bytes:,} bytes takes {chunk.size:,} in the file")
