"""Rows out of storage that is read past HDF5: one run of bytes, and chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NoReturn

import numpy as np

from kerasmem.errors import DataError
from kerasmem.hdf5.direct.chunks import Chunk, ChunkIndex
from kerasmem.hdf5.direct.codecs import DecodeError
from kerasmem.hdf5.direct.delivery import Delivery
from kerasmem.hdf5.direct.handle import Handle, view_of
from kerasmem.hdf5.direct.pipeline import Pipeline
from kerasmem.hdf5.direct.runs import RowRun
from kerasmem.hdf5.direct.scatter import ScatterRead
from kerasmem.hdf5.direct.scratch import PIECE_BYTES, SCATTER_BYTES, Scratch
from kerasmem.units import KIB

_SKIP_BYTES = 64 * KIB  # in data without chunks, shorter gaps are read along

Refuse = Callable[[int, int, str, BaseException | None], NoReturn]
"""Raises the error for rows `start` to `stop` that cannot be read, for a reason."""


Outputs = Sequence[tuple[Delivery, np.ndarray]]
"""What to make of the rows of a dataset, and the window's array for it; one a column."""


class Source(ABC):
    """Reads rows of one dataset. Any number of threads may do so at a time."""

    @abstractmethod
    def read(self, run: RowRun, outputs: Outputs, scratch: Scratch) -> None:
        """Read rows into the windows."""

    @abstractmethod
    def lies_where(self, other: Source) -> bool:
        """Return whether the data known to `other`, made earlier, still lies where it did."""

    def offsets(self, rows: np.ndarray) -> np.ndarray | None:
        """Return where in the file each row begins; None where not all lie there as they are."""
        return None

    def read_scattered(self, plan: ScatterRead, share: tuple[int, int], rows: np.ndarray) -> None:
        """Read a share of what was planned with `offsets` of these rows."""
        raise NotImplementedError

    def extents(self, run: RowRun) -> Iterator[tuple[int, int]]:
        """Return where in the file all that `read` may read lies, and how many bytes; nothing where nobody knows."""
        return iter(())


class RowBytes:
    """Rows that lie one after another in the file.

    Args:
        handle: the file.
        shape: shape of a row.
        dtype: type as stored.
    """

    def __init__(self, handle: Handle, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._handle = handle
        self._shape = shape
        self._dtype = dtype
        self.size = prod(shape) * dtype.itemsize
        self.scatters = handle.scatters

    def extents(self, offset: int, run: RowRun) -> Iterator[tuple[int, int]]:
        """Return where rows lie; the first of the run lies at `offset`."""
        parts = [run] if run.picked is None else run.cells(max(1, _SKIP_BYTES // self.size))
        for part in parts:
            yield offset + (part.start - run.start) * self.size, (part.stop - part.start) * self.size

    def read(self, offset: int, run: RowRun, outputs: Outputs, scratch: Scratch) -> None:
        """Read rows; the first of the run lies at `offset`."""
        size = self.size
        delivery, target = outputs[0]
        if len(outputs) == 1 and delivery.plain:
            straight = isinstance(run.places, slice)
            if size >= SCATTER_BYTES or (straight and run.picked is None):
                for part in run.runs():
                    self._scatter(offset + (part.start - run.start) * size, part, target)
                return
        cell = max(1, (PIECE_BYTES if run.picked is None else _SKIP_BYTES) // size)
        for part in run.cells(cell):
            count = part.stop - part.start
            raw = scratch.take("rows", count * size)
            self._handle.read([view_of(raw)], offset + (part.start - run.start) * size, len(raw))
            rows = raw.view(self._dtype).reshape(count, *self._shape)
            for delivery, target in outputs:
                delivery.put(rows, part.picked, target, part.places, scratch)

    def _scatter(self, offset: int, run: RowRun, target: np.ndarray) -> None:
        """Let the kernel put each row into its place."""
        size, count = self.size, run.stop - run.start
        window = view_of(target)
        if isinstance(run.places, slice):
            views = [window[run.places.start * size : run.places.stop * size]]
        else:
            views = [window[at : at + size] for at in (run.places.astype(np.int64) * size).tolist()]
        self._handle.read(views, offset, count * size)


class DirectSource(Source):
    """A dataset whose rows are read past HDF5.

    Args:
        handle: the file.
        shape: shape of a row.
        dtype: type as stored.
        refuse: raises the error for rows that cannot be read.
    """

    def __init__(self, handle: Handle, shape: tuple[int, ...], dtype: np.dtype[Any], refuse: Refuse) -> None:
        self._handle = handle
        self._refuse = refuse
        self._rows = RowBytes(handle, shape, dtype)

    def read_scattered(self, plan: ScatterRead, share: tuple[int, int], rows: np.ndarray) -> None:
        """Read a share of what was planned with `offsets` of these rows."""
        try:
            plan.read(self._handle, share)
        except (EOFError, OSError) as error:
            first, last = share
            self._refuse(int(rows[first:last].min()), int(rows[first:last].max()) + 1, str(error), error)


class ContiguousSource(DirectSource):
    """A dataset in one run of bytes, with no filters.

    Args:
        handle: the file.
        shape: shape of a row.
        dtype: type as stored.
        refuse: raises the error for rows that cannot be read.
        offset: where in the file it begins.
    """

    def __init__(
        self, handle: Handle, shape: tuple[int, ...], dtype: np.dtype[Any], refuse: Refuse, offset: int
    ) -> None:
        super().__init__(handle, shape, dtype, refuse)
        self.offset = offset

    def lies_where(self, other: Source) -> bool:
        """Return whether the data known to `other`, made earlier, still lies where it did."""
        return isinstance(other, ContiguousSource) and other.offset == self.offset

    def extents(self, run: RowRun) -> Iterator[tuple[int, int]]:
        """Return where the rows lie."""
        return self._rows.extents(self.offset + run.start * self._rows.size, run)

    def offsets(self, rows: np.ndarray) -> np.ndarray | None:
        """Return where in the file each row begins; None where that is of no use."""
        return self.offset + rows * self._rows.size if self._rows.scatters else None

    def read(self, run: RowRun, outputs: Outputs, scratch: Scratch) -> None:
        """Read rows into the windows."""
        try:
            self._rows.read(self.offset + run.start * self._rows.size, run, outputs, scratch)
        except (EOFError, OSError) as error:
            self._refuse(run.start, run.stop, str(error), error)


class ChunkedSource(DirectSource):
    """A dataset in chunks whose filters are known here.

    Args:
        handle: the file.
        index: where the chunks lie.
        chunk: shape of a chunk.
        shape: shape of the dataset.
        dtype: type as stored.
        pipeline: the filters.
        filtered: whether there are any.
        fill: value of what was never written; None where that is an error.
        other: reads chunks that are stored in a way not known here.
        refuse: raises the error for rows that cannot be read.
    """

    def __init__(
        self,
        handle: Handle,
        index: ChunkIndex,
        *,
        chunk: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        pipeline: Pipeline,
        filtered: bool,
        fill: np.ndarray | None,
        other: Source,
        refuse: Refuse,
    ) -> None:
        super().__init__(handle, shape[1:], dtype, refuse)
        self.index = index
        self._chunk = chunk
        self._shape = shape
        self._dtype = dtype
        self._pipeline = pipeline
        self._filtered = filtered
        self._fill = fill
        self._other = other
        self._bytes = prod(chunk) * dtype.itemsize

    def lies_where(self, other: Source) -> bool:
        """Return whether the data known to `other`, made earlier, still lies where it did."""
        return isinstance(other, ChunkedSource) and self.index.same_as(other.index)

    def offsets(self, rows: np.ndarray) -> np.ndarray | None:
        """Return where in the file each row begins; None where not all lie there as they are."""
        if self._filtered or not self._rows.scatters:
            return None
        cells, inside = np.divmod(rows, self._chunk[0])
        chunks = self.index.offsets(cells, self._bytes)
        return None if chunks is None else chunks + inside * self._rows.size

    def extents(self, run: RowRun) -> Iterator[tuple[int, int]]:
        """Return where the chunks lie, or of those without filters the rows."""
        for part in run.cells(self._chunk[0]):
            for chunk in self.index.row_of_chunks(part.start // self._chunk[0]):
                if chunk.offset is None:
                    continue
                if self._filtered or chunk.inner:
                    yield chunk.offset, chunk.size
                else:
                    yield from self._rows.extents(chunk.offset + part.start % self._chunk[0] * self._rows.size, part)

    def read(self, run: RowRun, outputs: Outputs, scratch: Scratch) -> None:
        """Read rows into the windows."""
        for part in run.cells(self._chunk[0]):
            try:
                for chunk in self.index.row_of_chunks(part.start // self._chunk[0]):
                    self._read_chunk(chunk, part, outputs, scratch)
            except DataError:
                raise
            except (EOFError, OSError, DecodeError, ValueError, OverflowError) as error:
                self._refuse(part.start, part.stop, str(error), error)

    def _read_chunk(self, chunk: Chunk, run: RowRun, outputs: Outputs, scratch: Scratch) -> None:
        skipped = run.start % self._chunk[0]
        if chunk.offset is None:
            if self._fill is None:
                raise DecodeError("a chunk is missing there")
            rest = tuple(part.stop - part.start for part in chunk.inner) + self._shape[1 + len(chunk.inner) :]
            rows = np.broadcast_to(self._fill, (run.stop - run.start, *rest))
        elif not self._filtered and not chunk.inner:
            self._check_size(chunk)
            self._rows.read(chunk.offset + skipped * self._rows.size, run, outputs, scratch)
            return
        elif self._filtered and chunk.edge and not chunk.mask and chunk.size == self._bytes:
            # HDF5 can be told to leave the filters out for chunks at the edge, and tells nobody.
            self._other.read(run, outputs, scratch)
            return
        else:
            rows = self._decode(chunk, scratch)[skipped : skipped + run.stop - run.start]
            index = (slice(None), *(slice(0, part.stop - part.start) for part in chunk.inner))
            rows = rows[index]
        for delivery, target in outputs:
            delivery.put(rows, run.picked, target, run.places, scratch, chunk.inner)

    def _decode(self, chunk: Chunk, scratch: Scratch) -> np.ndarray:
        self._check_size(chunk)
        assert chunk.offset is not None
        stored = scratch.take("stored", chunk.size)
        self._handle.read([view_of(stored)], chunk.offset, chunk.size)
        data = self._pipeline.decode(stored, chunk.mask, scratch)
        return data.view(self._dtype).reshape(self._chunk)

    def _check_size(self, chunk: Chunk) -> None:
        most = self._pipeline.most_stored()
        if chunk.size > most or (not self._filtered and chunk.size != self._bytes):
            raise DecodeError(f"a chunk of {self._bytes:,} bytes takes {chunk.size:,} in the file")
