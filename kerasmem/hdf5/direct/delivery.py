"""Rows as stored, converted and put into their places in a window, in one pass."""

from __future__ import annotations

import numpy as np

from kerasmem.hdf5.columns import Column
from kerasmem.hdf5.direct.scratch import PIECE_VALUES, Scratch

_WIDE = 1 << 12  # values of a row from which on each is converted straight into its place

Places = slice | np.ndarray
"""Where in a window rows go: a run, or one number a row."""


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
    """Return (a, d) where (value + a) / d, in float32 and so twice as fast, is the scaled value to the last bit.

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
    """Copy rows to their places; whole rows as what NumPy moves fastest, one opaque item each."""
    size = rows[0].nbytes
    if target.flags.c_contiguous and rows.flags.c_contiguous and size:
        item = np.dtype((np.void, size)) if size not in (1, 2, 4, 8) else np.dtype(f"u{size}")
        target.reshape(-1).view(item)[places] = rows.reshape(-1).view(item)
    else:
        target[places] = rows
