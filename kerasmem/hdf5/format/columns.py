"""Select columns and rows: datasets for x, y and sample_weight, their dtypes, and row numbers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kerasmem import checks
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import DatasetLayout, plain_name, quote
from kerasmem.units import format_count

STORED = "stored"
_DTYPES = ("float32", "float16", "float64", STORED)


@dataclass(frozen=True)
class Column:
    """One array of a batch: a dataset and its conversion.

    Args:
        name: path of the dataset in the file.
        row_shape: shape of one row.
        stored: NumPy type string as stored, such as ">i2".
        dtype: name of the delivered dtype, in native byte order.
        scale: factor, or None to cast values unscaled.
        offset: number added after scaling. Defaults to 0.
    """

    name: str
    row_shape: tuple[int, ...]
    stored: str
    dtype: str
    scale: float | None = None
    offset: float = 0.0

    @property
    def row_bytes(self) -> int:
        """Size of one delivered row in bytes."""
        return prod(self.row_shape) * np.dtype(self.dtype).itemsize

    @property
    def converts(self) -> bool:
        """Whether delivered values differ from the stored bytes."""
        same = np.dtype(self.stored) == np.dtype(self.dtype) and np.dtype(self.stored).kind != "b"
        return not same or self.scale is not None


@dataclass(frozen=True)
class Part:
    """x, y or sample_weight: one name, a tuple of names or a dict of names.

    Args:
        role: "x", "y" or "sample_weight".
        names: dataset paths in order.
        keys: keys of the dict, or None for a tuple.
        single: whether it is one bare name.
    """

    role: str
    names: tuple[str, ...]
    keys: tuple[str, ...] | None = None
    single: bool = False

    def build(self, arrays: Sequence[Any]) -> Any:
        """Return `arrays` in the structure of the names (a list becomes a tuple)."""
        if self.single:
            return arrays[0]
        return tuple(arrays) if self.keys is None else dict(zip(self.keys, arrays, strict=True))


def read_part(role: str, value: Any) -> Part:
    """Return x, y or sample_weight as a `Part`.

    Raises:
        UsageError: If it names no dataset.
    """
    if isinstance(value, str):
        names, keys, single = [value], None, True
    elif isinstance(value, Mapping):
        names, keys, single = list(value.values()), tuple(value.keys()), False
    elif isinstance(value, (list, tuple)):
        names, keys, single = list(value), None, False
    else:
        raise UsageError(f"{role} must be a dataset name, or a list or dict of names; got {type(value).__name__}")
    if not names:
        raise UsageError(f"{role} must name at least one dataset; got an empty {type(value).__name__}")
    for name in (*names, *(keys or ())):
        if not isinstance(name, str) or not plain_name(name) or "\0" in name:
            raise UsageError(f"{role} must be a dataset name such as 'train/images'; got {name!r}")
    return Part(role, tuple(plain_name(name) for name in names), keys, single)


def read_parts(x: Any, y: Any, sample_weight: Any) -> tuple[Part, ...]:
    """Return x, y and sample_weight as parts, without those that are None."""
    if x is None:
        raise UsageError("x must be the name of a dataset; got None")
    if y is None and sample_weight is not None:
        raise UsageError("sample_weight needs y: Keras takes weights only together with targets")
    values = (("x", x), ("y", y), ("sample_weight", sample_weight))
    return tuple(read_part(role, value) for role, value in values if value is not None)


def make_columns(
    part: Part, layouts: Mapping[str, DatasetLayout], dtype: Mapping[str, str], scale: Mapping[str, Any]
) -> list[Column]:
    """Return the columns of one part.

    Features and weights default to float32. Targets that are integers or booleans keep their type, in native byte
    order, unless they are scaled.

    Args:
        part: the names.
        layouts: layout of each dataset.
        dtype: dtype by dataset name; "" is the default for x.
        scale: (factor, offset) by dataset name; "" is the default for x.

    Raises:
        UsageError: If `dtype` and `scale` contradict each other.
        DataError: If weights have more than one value per row.
    """
    columns = []
    for name in part.names:
        layout = layouts[name]
        stored = np.dtype(layout.dtype)
        factor_and_offset = scale.get(name, scale.get("") if part.role == "x" else None)
        factor, offset = (None, 0.0) if factor_and_offset is None else factor_and_offset
        delivered = dtype.get(name, dtype[""] if part.role == "x" else "")
        if not delivered:
            keeps = part.role == "y" and stored.kind in "iub" and factor is None
            delivered = STORED if keeps else "float32"
        if delivered == STORED:
            if factor is not None:
                raise UsageError(f"scale and dtype='stored' contradict each other for {quote(name)}")
            delivered = stored.newbyteorder("=").name
        if part.role == "sample_weight" and layout.row_shape not in ((), (1,)):
            raise DataError(
                f"sample_weight must have one weight per row, shape ({layout.rows},) or ({layout.rows}, 1); dataset "
                f"{quote(name)} has shape {layout.shape}"
            )
        columns.append(Column(name, layout.row_shape, layout.dtype, delivered, factor, offset))
    return columns


def read_dtype(value: Any, names: Sequence[str]) -> dict[str, str]:
    """Return the dtype setting by dataset name. The key "" holds the default of x."""
    entries = {"": "float32", **_by_name("dtype", value, names)} if isinstance(value, Mapping) else {"": value}
    return {name: _dtype_name(entry) for name, entry in entries.items()}


def _dtype_name(entry: Any) -> str:
    text = entry
    if entry is not None and not isinstance(entry, str):
        try:
            text = np.dtype(getattr(entry, "as_numpy_dtype", entry)).name  # a tf.DType has the attribute
        except (TypeError, ValueError):
            text = ""
    if text not in _DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(_DTYPES)}; got {entry!r}")
    return str(text)


def read_scale(value: Any, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the scale setting as (factor, offset) by dataset name. The key "" holds the default of x."""
    if value is None:
        return {}
    entries = _by_name("scale", value, names) if isinstance(value, Mapping) else {"": value}
    return {name: _factor_and_offset(entry) for name, entry in entries.items()}


def _factor_and_offset(entry: Any) -> tuple[float, float]:
    pair = entry if isinstance(entry, (tuple, list)) else (entry, 0.0)
    try:
        factor, offset = (checks.number("scale", number, least=-np.inf) for number in pair)
    except (UsageError, ValueError, OverflowError):
        raise UsageError(f"scale must be a number or (factor, offset); got {entry!r}") from None
    return factor, offset


def _by_name(setting: str, entries: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    result = {}
    for name, entry in entries.items():
        plain = plain_name(name) if isinstance(name, str) else name
        if plain != "" and plain not in names:
            raise UsageError(f"{setting} must be keyed by {', '.join(map(quote, names))}; got {name!r}")
        result[plain] = entry
    return result


def read_rows(rows: Any, length: int, *, ordered: bool) -> range | np.ndarray:
    """Return the selected rows: a `range` if they are contiguous, otherwise a sorted int64 array.

    Args:
        rows: a slice, a range, a (start, stop) tuple, or an array or list of row numbers. None selects all rows.
        length: number of rows in the file.
        ordered: whether rows are delivered in file order. If True, row numbers must increase, because their own order
            would be lost silently.

    Raises:
        UsageError: If `rows` has another type, or the wrong order.
        DataError: If no row is selected, or one is negative, past the end or repeated.
    """
    if rows is None:
        return range(length)
    if isinstance(rows, (tuple, slice)):
        rows = _as_range(rows, length)
    if isinstance(rows, range):
        if not len(rows):
            raise DataError(f"rows: {rows.start:,} to {rows.stop:,} selects no rows; the file has {length:,}")
        if rows.step < 0:
            raise UsageError(f"rows must be increasing, because rows are read in file order; got {rows}")
    else:
        rows = _sort_rows(rows, length, ordered)
    low, high = int(rows[0]), int(rows[-1])
    if low < 0:
        raise DataError(f"rows: {low} is negative; rows are numbered from 0 to {length - 1:,}")
    if high >= length:
        raise DataError(f"rows: {high:,} is past the end; the file has {format_count(length, 'row')}")
    return range(low, high + 1) if high - low + 1 == len(rows) else np.asarray(rows, np.int64)


def _as_range(rows: Any, length: int) -> range:
    if isinstance(rows, tuple):
        if len(rows) != 2:
            raise UsageError(f"rows must be (start, stop) if it is a tuple; got {rows!r}")
        rows = slice(*rows)
    start, stop = (
        default if value is None else checks.whole("rows", value, -sys.maxsize)
        for value, default in ((rows.start, 0), (rows.stop, length))
    )
    return range(start, stop, 1 if rows.step is None else checks.whole("rows", rows.step))


def _sort_rows(rows: Any, length: int, ordered: bool) -> np.ndarray:
    try:
        array = np.asarray(rows)
    except (ValueError, TypeError) as error:
        raise UsageError(f"rows: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(
            "rows must be a slice, a range, (start, stop) or a flat array of row numbers, such as "
            "numpy.flatnonzero(mask)"
        )
    if not array.size:
        raise DataError(f"rows: the array is empty; the file has {format_count(length, 'row')}")
    unique, counts = np.unique(array.astype(np.int64), return_counts=True)
    if len(unique) < len(array):
        raise DataError(f"rows: row {int(unique[counts.argmax()]):,} is named more than once")
    if ordered and not np.array_equal(unique, array):
        raise UsageError(
            "rows must be sorted if shuffle=False, because rows are delivered in file order; "
            "pass numpy.sort(rows), and use that order for the results"
        )
    return unique
