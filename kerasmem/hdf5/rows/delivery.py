"""Deliver rows from a file into a window: select, convert and place them.

If rows need no conversion, the kernel reads them straight into the window. The reads of a whole window are planned with
NumPy, and the C function `preadv` gets the resulting arrays, because `os.preadv` would need a Python object per row.
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

PIECE_BYTES = 256 * KIB  # read per call if rows are converted, so that they stay in the processor's cache
PIECE_VALUES = 32 * KIB  # converted per NumPy call
SCATTER_BYTES = KIB  # smallest row that the kernel scatters; NumPy scatters smaller ones
_WIDE = 1 << 12  # smallest number of values of a row that is converted straight into the window
_SHARE_BYTES = 4 << 20  # read per task

Slots = slice | np.ndarray
"""Row numbers in a window: a slice, or an array of one number per row."""


@dataclass(frozen=True)
class RowRun:
    """Rows `start` to `stop` of a file, and their slots in a window.

    Args:
        start: first row.
        stop: row after the last.
        picked: numbers of the selected rows, counted from `start`; None for all rows.
        slots: slot of each selected row.
    """

    start: int
    stop: int
    picked: np.ndarray | None
    slots: Slots

    def cells(self, size: int) -> Iterator[RowRun]:
        """Yield the part in each cell of `size` rows, trimmed to its picked rows."""
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
            yield RowRun(low, high, picked, slice_slots(self.slots, first, last))

    def runs(self) -> Iterator[RowRun]:
        """Yield the parts without gaps."""
        if self.picked is None:
            yield self
            return
        breaks = np.flatnonzero(np.diff(self.picked) > 1) + 1
        bounds = [0, *breaks.tolist(), len(self.picked)]
        for first, last in itertools.pairwise(bounds):
            low = self.start + int(self.picked[first])
            yield RowRun(low, low + last - first, None, slice_slots(self.slots, first, last))


def slice_slots(slots: Slots, first: int, last: int) -> Slots:
    """Return the slots of rows `first` to `last`."""
    if isinstance(slots, slice):
        return slice(slots.start + first, slots.start + last)
    return slots[first:last]


@dataclass(frozen=True)
class WantedRows:
    """The rows of a window.

    Args:
        numbers: function that returns the number of each row across files.
        runs: function that returns the same rows as runs, in reading order.
        slots: slot of each row in the window.
    """

    numbers: Callable[[], np.ndarray]
    runs: Callable[[], Sequence[RowRun]]
    slots: Slots


class Delivery:
    """Converts rows of one column and copies them into windows.

    Values are scaled in float64 and rounded once, regardless of their types: float32 has too few digits for times in
    nanoseconds or 40-bit integers, and too few exponents for small factors of large values.

    Args:
        column: the column.
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
        slots: Slots,
        scratch: Scratch,
        inner: tuple[slice, ...] = (),
    ) -> None:
        """Convert rows and copy them into a window.

        Args:
            rows: stored rows, or the same part of each.
            picked: numbers of the rows to deliver; None for all.
            target: array of the column in the window.
            slots: slot of each delivered row in `target`.
            scratch: buffers of this thread.
            inner: part of each row that `rows` holds. Defaults to (): whole rows.
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
            if isinstance(slots, slice):
                self._convert(part, target[slots.start + first : slots.start + last], scratch)
                continue
            row_slots = slots[first:last]
            if self.plain:
                _scatter(part, target, row_slots)
            elif values >= _WIDE:
                for row, index in zip(part, row_slots.tolist(), strict=True):
                    self._convert(row, target[index], scratch)
            else:
                size = part.size * target.dtype.itemsize
                converted = scratch.take("converted", size).view(target.dtype).reshape(part.shape)
                self._convert(part, converted, scratch)
                _scatter(converted, target, row_slots)

    def _convert(self, source: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
        column = self._column
        if source.dtype.kind == "b":
            source = source.view(np.uint8) != 0  # other writers store other bytes than 1 for true
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
    """Return (a, d) if (value + a) / d in float32 equals the scaled value to the last bit, otherwise None.

    It is twice as fast, and exact for common scalings of bytes, such as 1/255 and (2/255, -1). All 256 bytes are tried.
    """
    stored = np.dtype(column.stored)
    if column.scale is None or stored.itemsize != 1 or stored.kind not in "iu" or column.dtype != "float32":
        return None
    values = np.arange(256, dtype=np.uint8).view(stored)
    with np.errstate(all="ignore"):
        exact = (values * np.float64(column.scale) + column.offset).astype(np.float32)
        divisor = np.float64(1) / column.scale
        halves = np.round(divisor * 2) / 2
        divisor = np.float32(halves if abs(halves - divisor) < 1e-9 * abs(divisor) else divisor)
        add = np.float32(column.offset * np.float64(divisor))
        is_exact = np.array_equal((values.astype(np.float32) + add) / divisor, exact)
    return (add, divisor) if is_exact else None


def _scatter(rows: np.ndarray, target: np.ndarray, slots: np.ndarray) -> None:
    """Copy rows to their slots. NumPy is fastest if each row is one opaque item."""
    size = rows[0].nbytes
    if target.flags.c_contiguous and rows.flags.c_contiguous and size:
        item = np.dtype((np.void, size)) if size not in (1, 2, 4, 8) else np.dtype(f"u{size}")
        target.reshape(-1).view(item)[slots] = rows.reshape(-1).view(item)
    else:
        target[slots] = rows


@dataclass(eq=False)
class ScatterRead:
    """Reads rows of one file straight into a window, in shares for any number of threads.

    Args:
        offsets: (rows,) int64 array, offset of each row in the file.
        slots: slot of each row in the window.
        target: C-contiguous array of the window, with the stored dtype.
        rows: number of each row within the file.
    """

    offsets: np.ndarray
    slots: Slots
    target: np.ndarray
    rows: np.ndarray

    def __post_init__(self) -> None:
        self._size = self.target[0].nbytes
        share = max(1, _SHARE_BYTES // self._size)
        # Rows that stay in order need a single view.
        most = share if isinstance(self.slots, slice) else MOST_VIEWS
        self._firsts, self._lasts = _pieces(self.offsets, self._size, most)
        # Each share begins at the first piece beyond a multiple of `share` rows.
        cuts = np.flatnonzero(np.diff(self._firsts // share, prepend=-1))
        self._cuts = [*cuts.tolist(), len(self._firsts)]

    def shares(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each share, and the row after its last."""
        for low, high in itertools.pairwise(self._cuts):
            yield int(self._firsts[low]), int(self._lasts[high - 1])

    def read(self, handle: FileHandle, share: tuple[int, int]) -> None:
        """Read the rows of a share.

        Raises:
            EOFError: If the file ends before the last row.
            OSError: If the file cannot be read.
        """
        first, last = share
        low, high = np.searchsorted(self._firsts, share).tolist()
        starts, ends = self._firsts[low:high], self._lasts[low:high]
        offsets, size = self.offsets[starts].tolist(), self._size
        if isinstance(self.slots, slice):
            window, before = view_of(self.target), self.slots.start
            for start, end, offset in zip(starts.tolist(), ends.tolist(), offsets, strict=True):
                handle.read(window[(before + start) * size : (before + end) * size], offset)
            return
        vectors = np.empty((last - first, 2), np.uintp)
        vectors[:, 0] = self.slots[first:last]
        vectors[:, 0] *= size
        vectors[:, 0] += self.target.ctypes.data
        vectors[:, 1] = size
        pieces = zip((starts - first).tolist(), (ends - starts).tolist(), offsets, strict=True)
        handle.scatter(self.target, vectors, pieces, size)


def _pieces(offsets: np.ndarray, size: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row of each piece of at most `most` adjacent rows, and the row after its last."""
    bounds = np.r_[0, np.flatnonzero(np.diff(offsets) != size) + 1, len(offsets)]
    counts = np.diff(bounds)
    parts = -(-counts // most)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of each piece within its run
    firsts = np.repeat(bounds[:-1], parts) + number * most
    return firsts, np.minimum(firsts + most, np.repeat(bounds[1:], parts))
