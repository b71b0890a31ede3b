"""Which type each dataset is written as, and the conversion that loses nothing in silence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kerasmem.datatools.converting.fields import Field, Rows
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import shown

_EXACT = 2**24  # whole numbers beyond are not all float32 values
_MOST_ROWS = 1 << 16  # looked at at a time


def written_type(field: Field, *, keep_float64: bool = False) -> str:
    """Return the type a column is written as: little-endian, float64 as float32.

    Args:
        field: the column as read.
        keep_float64: keep it.

    Raises:
        DataError: the column holds no plain numbers.
    """
    dtype = np.dtype(field.dtype)
    if dtype.kind == "c":
        raise DataError(
            f"{shown(field.name)} holds complex numbers; store real and imaginary parts as two channels, "
            "np.stack([z.real, z.imag], -1)"
        )
    if dtype.kind not in "fiub":
        kind = "dates or times" if dtype.kind in "mM" else "text" if dtype.kind in "SU" else f"the type {dtype}"
        raise DataError(f"{shown(field.name)} holds {kind}, no plain numbers; convert it, or leave it out with drop")
    if dtype.kind == "f" and dtype.itemsize > 4 and not (keep_float64 and dtype.itemsize == 8):
        return "<f8" if keep_float64 else "<f4"
    return dtype.newbyteorder("<").str


class Caster:
    """Converts rows to the types that are written, and counts what that changes.

    Args:
        source: what is read, in words, for messages.
        fields: the columns as read.
        written: the same columns as written.
    """

    def __init__(self, source: str, fields: Sequence[Field], written: Sequence[Field]) -> None:
        self._source = source
        self._types = {
            field.name: (np.dtype(field.dtype), np.dtype(target.dtype))
            for field, target in zip(fields, written, strict=True)
        }
        self.inexact: dict[str, int] = {}  # whole numbers that float32 rounds, by dataset

    def cast(self, rows: Rows, first: int) -> Rows:
        """Return rows in the types written.

        Args:
            rows: the rows.
            first: number of the first of them, for messages.

        Raises:
            DataError: a finite value would become infinite.
        """
        return {name: np.ascontiguousarray(self._cast(name, values, first)) for name, values in rows.items()}

    def _cast(self, name: str, values: np.ndarray, first: int) -> np.ndarray:
        stored, target = self._types[name]
        if stored == target:
            return values
        with np.errstate(over="ignore"):
            result = values.astype(target, order="C")
        if stored.kind == "f" and target.itemsize < stored.itemsize:
            self._refuse_overflow(name, values, result, first)
            self._count_inexact(name, values, result)
        return result

    def _refuse_overflow(self, name: str, values: np.ndarray, result: np.ndarray, first: int) -> None:
        lost = np.isinf(result)
        if not lost.any():
            return
        lost &= np.isfinite(values)
        if lost.any():
            at = tuple(int(k) for k in np.argwhere(lost)[0])
            raise DataError(
                f"{self._source}: row {first + at[0]:,} of {shown(name)} holds {values[at]:.6g}, which float32 has no "
                "room for (it ends at 3.4e38) and would turn into infinity; scale the data, mend the value, or keep "
                "the type with keep_float64 (--keep-float64)"
            )

    def _count_inexact(self, name: str, values: np.ndarray, result: np.ndarray) -> None:
        with np.errstate(invalid="ignore"):
            large = np.abs(values) > _EXACT
            if not large.any():
                return
            suspect = values[large]
            changed = (suspect == np.rint(suspect)) & (result[large].astype(values.dtype) != suspect)
            changed &= np.isfinite(suspect) & (np.abs(suspect) < 2**53)
        count = int(np.count_nonzero(changed))
        if count:
            self.inexact[name] = self.inexact.get(name, 0) + count
