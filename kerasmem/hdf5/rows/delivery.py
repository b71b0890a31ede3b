"""Deliver rows from a file into a window: runs, conversion and places.

Rows that need no change the kernel puts where they are delivered, planned for a whole window at once. What a row costs
in Python is then nothing: where it lies and where it goes are computed with NumPy, and these numbers are handed to
`preadv` as they are, where `os.preadv` would want an object a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kerasmem.hdf5.format.columns import Column
from kerasmem.hdf5.format.filters import Scratch, view_of
from kerasmem.hdf5.io.handle import MOST_VIEWS, FileHandle
from kerasmem.units import KIB

PIECE_BYTES = 256 * KIB  # read at a time where rows change on their way: they stay in the processor's cache
PIECE_VALUES = 32 * KIB  # converted at a time
SCATTER_BYTES = KIB  # rows of this size on are scattered by the kernel, smaller ones by NumPy
_WIDE = 1 << 12  # values of a row from which on each is converted straight into its place
_SHARE_BYTES = 4 << 20  # what a thread takes on at a time

Places = slice | np.ndarray
"""Where in a window rows go: a run, or one number a row."""


@dataclass(frozen=True)
class RowRun:
    """Rows to be read: `start` to `stop` of the file, all or those picked, and their places in a window."""

    start: int
    stop: int
    picked: np.ndarray | None
    places: Places

    def cells(self, size: int) -> Iterator[RowRun]:
        """Return the parts in one cell each of a grid of `size` rows, without rows that are not picked."""
        if self.picked is None and self.start // size == (self.stop - 1) // size:
            yield self
            return
        for cell in range(self.start // size, (self.stop - 1) // size + 1):
            low, high = max(cell * size, self.start), min((cell + 1) * size, self.stop)
            first, last = low - self.start, high - self.start
            picked = None
            if self.picked is not None:
                first, last = np.searchsorted(self.picked, [first, last]).tolist()
                if first == last:
                    continue
                inside = self.picked[first:last]
                low, high = self.start + int(inside[0]), self.start + int(inside[-1]) + 1
                picked = None if high - low == last - first else inside - inside[0]
            yield RowRun(low, high, picked, part_of(self.places, first, last))

    def runs(self) -> Iterator[RowRun]:
        """Return the parts without gaps."""
        if self.picked is None:
            yield self
            return
        breaks = np.flatnonzero(np.diff(self.picked) > 1) + 1
        bounds = [0, *breaks.tolist(), len(self.picked)]
        for first, last in itertools.pairwise(bounds):
            low = self.start + int(self.picked[first])
            yield RowRun(low, low + last - first, None, part_of(self.places, first, last))


def part_of(places: Places, first: int, last: int) -> Places:
    """Return the places of rows `first` to `last` of those that `places` are for."""
    if isinstance(places, slice):
        return slice(places.start + first, places.start + last)
    return places[first:last]


@dataclass(frozen=True)
class WantedRows:
    """The rows of a window.

    Args:
        numbers: returns the number of each row, counted through the files.
        runs: returns the same rows as runs, in the order of reading.
        places: where in the window they go.
    """

    numbers: Callable[[], np.ndarray]
    runs: Callable[[], Sequence[RowRun]]
    places: Places


class Delivery:
    """Brings rows of one column into windows.

    Values are scaled as float64 whatever comes in and goes out, and rounded once: float32 has no room for
    times in nanoseconds or for 40-bit numbers, and no exponents for small factors of large values.

    Args:
        column: what to make of the rows.
    """

    def __init__(self, column: Column) -> None:
        self._column = column
        self.plain = not column.converts
        self._quotient = _as_quotient(column)

    def put(
        self,
        rows: np.ndarray,
        picked: np.ndarray | None,
        target: np.ndarray,
        places: Places,
        scratch: Scratch,
        inner: tuple[slice, ...] = (),
    ) -> None:
        """Deliver rows, or those of them that are picked.

        Args:
            rows: rows, or the same part of each, as stored.
            picked: which of them; None for all.
            target: a window's array of the column.
            places: where in it they go.
            scratch: this thread's buffers.
            inner: which part of each row `rows` holds; () for all of it.
        """
        count = len(rows) if picked is None else len(picked)
        values = max(1, rows[0].size)
        if inner:
            index = (slice(None), *inner)
            target = target[index]
        step = count if self.plain and picked is None else max(1, PIECE_VALUES // values)
        for first in range(0, count, step):
            last = min(first + step, count)
            part = rows[first:last] if picked is None else rows[picked[first:last]]
            if isinstance(places, slice):
                self._convert(part, target[places.start + first : places.start + last], scratch)
                continue
            where = places[first:last]
            if self.plain:
                _scatter(part, target, where)
            elif values >= _WIDE:
                for row, place in zip(part, where.tolist(), strict=True):
                    self._convert(row, target[place], scratch)
            else:
                size = part.size * target.dtype.itemsize
                made = scratch.take("converted", size).view(target.dtype).reshape(part.shape)
                self._convert(part, made, scratch)
                _scatter(made, target, where)

    def _convert(self, source: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
        column = self._column
        if source.dtype.kind == "b":
            source = source.view(np.uint8) != 0  # other writers have other bytes for true
        if column.scale is None:
            np.copyto(out, source, casting="unsafe")
        elif self._quotient is not None:
            add, divisor = self._quotient
            np.copyto(out, source)
            if add:
                np.add(out, add, out=out)
            np.divide(out, divisor, out=out)
        elif not column.offset:
            np.multiply(source, column.scale, out=out, dtype=np.float64, casting="unsafe")
        elif source.size <= PIECE_VALUES or source.ndim == 0:
            values = scratch.take("scaled", source.size * 8).view(np.float64).reshape(source.shape)
            np.multiply(source, column.scale, out=values, dtype=np.float64, casting="unsafe")
            values += column.offset
            np.copyto(out, values, casting="unsafe")
        else:
            step = max(1, PIECE_VALUES // max(1, source[0].size))
            for first in range(0, len(source), step):
                part = slice(first, first + step) if step > 1 else first
                self._convert(source[part], out[part], scratch)


def _as_quotient(column: Column) -> tuple[np.float32, np.float32] | None:
    """Return (a, d) if (value + a) / d in float32, twice as fast, equals the scaled value to the last bit.

    It is for the usual scalings of bytes, such as 1/255 and (2/255, -1), since a float32 quotient is rounded
    once; whether it is for this one is tried with every byte.
    """
    stored = np.dtype(column.stored)
    if column.scale is None or stored.itemsize != 1 or stored.kind not in "iu" or column.dtype != "float32":
        return None
    every = np.arange(256, dtype=np.uint8).view(stored)
    with np.errstate(all="ignore"):
        exact = (every * np.float64(column.scale) + column.offset).astype(np.float32)
        divisor = np.float64(1) / column.scale
        halves = np.round(divisor * 2) / 2
        divisor = np.float32(halves if abs(halves - divisor) < 1e-9 * abs(divisor) else divisor)
        add = np.float32(column.offset * np.float64(divisor))
        same = np.array_equal((every.astype(np.float32) + add) / divisor, exact)
    return (add, divisor) if same else None


def _scatter(rows: np.ndarray, target: np.ndarray, places: np.ndarray) -> None:
    """Copy rows to their places, whole rows as one opaque item each, the fastest for NumPy."""
    size = rows[0].nbytes
    if target.flags.c_contiguous and rows.flags.c_contiguous and size:
        item = np.dtype((np.void, size)) if size not in (1, 2, 4, 8) else np.dtype(f"u{size}")
        target.reshape(-1).view(item)[places] = rows.reshape(-1).view(item)
    else:
        target[places] = rows


@dataclass(eq=False)
class ScatterRead:
    """Rows of one file into a window, in shares for any number of threads.

    Args:
        offsets: (rows,) int64, where in the file each row begins.
        places: where in the window each goes.
        target: the window's array, (rows of the window, …), C-contiguous and of the type that is stored.
        rows: the number of each within the file.
    """

    offsets: np.ndarray
    places: Places
    target: np.ndarray
    rows: np.ndarray

    def __post_init__(self) -> None:
        self._size = self.target[0].nbytes
        share = max(1, _SHARE_BYTES // self._size)
        # One view is enough for any number of rows that stay in order.
        most = share if isinstance(self.places, slice) else MOST_VIEWS
        self._firsts, self._lasts = _pieces(self.offsets, self._size, most)
        # A share begins where a multiple of so many rows is passed.
        cuts = np.flatnonzero(np.diff(self._firsts // share, prepend=-1))
        self._cuts = [*cuts.tolist(), len(self._firsts)]

    def shares(self) -> Iterator[tuple[int, int]]:
        """Return the parts that threads take on: first row, and row after the last, of those planned."""
        for low, high in itertools.pairwise(self._cuts):
            yield int(self._firsts[low]), int(self._lasts[high - 1])

    def read(self, handle: FileHandle, share: tuple[int, int]) -> None:
        """Read the rows of a share.

        Raises:
            EOFError: If the file ends before that.
            OSError: If it cannot be read.
        """
        first, last = share
        low, high = np.searchsorted(self._firsts, share).tolist()
        starts, ends = self._firsts[low:high], self._lasts[low:high]
        offsets, size = self.offsets[starts].tolist(), self._size
        if isinstance(self.places, slice):
            window, before = view_of(self.target), self.places.start
            for start, end, offset in zip(starts.tolist(), ends.tolist(), offsets, strict=True):
                handle.read(window[(before + start) * size : (before + end) * size], offset)
            return
        vectors = np.empty((last - first, 2), np.uintp)
        vectors[:, 0] = self.places[first:last]
        vectors[:, 0] *= size
        vectors[:, 0] += self.target.ctypes.data
        vectors[:, 1] = size
        pieces = zip((starts - first).tolist(), (ends - starts).tolist(), offsets, strict=True)
        handle.scatter(self.target, vectors, pieces, size)


def _pieces(offsets: np.ndarray, size: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row, and the row after the last, of each piece of at most so many without a gap in the file."""
    bounds = np.r_[0, np.flatnonzero(np.diff(offsets) != size) + 1, len(offsets)]
    counts = np.diff(bounds)
    parts = -(-counts // most)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of a piece within its run
    firsts = np.repeat(bounds[:-1], parts) + number * most
    return firsts, np.minimum(firsts + most, np.repeat(bounds[1:], parts))
