"""Select columns and rows: the datasets of x, y and sample_weight, their types, and row numbers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kerasmem import checks
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import DatasetLayout, plain_name, shown
from kerasmem.units import format_count

STORED = "stored"
_DTYPES = ("float32", "float16", "float64", STORED)


@dataclass(frozen=True)
class Column:
    """One array of a batch: a dataset, and how it is converted.

    Args:
        name: the dataset's path in the file.
        row_shape: shape of one row.
        stored: NumPy's text for the stored type.
        dtype: name of the type delivered, native byte order.
        scale: factor, or None if values are cast as they are.
        offset: added after scaling.
    """

    name: str
    row_shape: tuple[int, ...]
    stored: str
    dtype: str
    scale: float | None = None
    offset: float = 0.0

    @property
    def row_bytes(self) -> int:
        """Bytes of one delivered row."""
        return prod(self.row_shape) * np.dtype(self.dtype).itemsize

    @property
    def converts(self) -> bool:
        """Whether rows change on their way from the file to the batch."""
        same = np.dtype(self.stored) == np.dtype(self.dtype) and np.dtype(self.stored).kind != "b"
        return not same or self.scale is not None


@dataclass(frozen=True)
class Part:
    """x, y or sample_weight: one name, a tuple of names or a dict of names.

    Args:
        role: "x", "y" or "sample_weight".
        names: dataset paths in order.
        keys: the dict's keys, or None.
        single: whether one bare name was given.
    """

    role: str
    names: tuple[str, ...]
    keys: tuple[str, ...] | None = None
    single: bool = False

    def build(self, arrays: Sequence[Any]) -> Any:
        """Return `arrays` in the structure the names were given in (a list becomes a tuple)."""
        if self.single:
            return arrays[0]
        return tuple(arrays) if self.keys is None else dict(zip(self.keys, arrays, strict=True))


def read_part(role: str, value: Any) -> Part:
    """Return the checked x, y or sample_weight as a `Part`."""
    if isinstance(value, str):
        names, keys, single = [value], None, True
    elif isinstance(value, Mapping):
        names, keys, single = list(value.values()), tuple(value.keys()), False
    elif isinstance(value, (list, tuple)):
        names, keys, single = list(value), None, False
    else:
        raise UsageError(
            f"{role}: give a dataset's name, a list of names or a dict of names, not {type(value).__name__}"
        )
    if not names:
        raise UsageError(f"{role}: no dataset named")
    for name in (*names, *(keys or ())):
        if not isinstance(name, str) or not plain_name(name) or "\0" in name:
            raise UsageError(f"{role}: {name!r} is not a dataset's name; write for example 'train/images'")
    return Part(role, tuple(plain_name(name) for name in names), keys, single)


def read_parts(x: Any, y: Any, sample_weight: Any) -> tuple[Part, ...]:
    """Return x, y and sample_weight as far as they are given."""
    if x is None:
        raise UsageError("x: name the dataset of the features")
    if y is None and sample_weight is not None:
        raise UsageError("sample_weight: Keras takes weights only together with y")
    given = (("x", x), ("y", y), ("sample_weight", sample_weight))
    return tuple(read_part(role, value) for role, value in given if value is not None)


def make_columns(
    part: Part, layouts: Mapping[str, DatasetLayout], dtype: Mapping[str, str], scale: Mapping[str, Any]
) -> list[Column]:
    """Return the columns of one part.

    Features and weights come out as float32 whatever is stored; targets that are integers or booleans keep
    their type, in native byte order, unless a scale is given for them.

    Args:
        part: the names.
        layouts: what the file says about each name.
        dtype: asked-for type by dataset name; "" holds the general one for x.
        scale: factor or (factor, offset) by dataset name; "" holds the general one for x.
    """
    columns = []
    for name in part.names:
        layout = layouts[name]
        stored = np.dtype(layout.dtype)
        given = scale.get(name, scale.get("") if part.role == "x" else None)
        factor, offset = (None, 0.0) if given is None else given
        wanted = dtype.get(name, dtype[""] if part.role == "x" else "")
        if not wanted:
            keeps = part.role == "y" and stored.kind in "iub" and factor is None
            wanted = STORED if keeps else "float32"
        if wanted == STORED:
            if factor is not None:
                raise UsageError(f"scale and dtype='stored' contradict each other for {shown(name)}")
            wanted = stored.newbyteorder("=").name
        if part.role == "sample_weight" and layout.row_shape not in ((), (1,)):
            raise DataError(
                f"sample_weight: dataset {shown(name)} has shape {layout.shape}; one weight a row is needed: "
                f"({layout.rows},) or ({layout.rows}, 1)"
            )
        columns.append(Column(name, layout.row_shape, layout.dtype, wanted, factor, offset))
    return columns


def read_dtype(value: Any, names: Sequence[str]) -> dict[str, str]:
    """Return the dtype setting by dataset name. The key "" holds the default of x."""
    given = {"": "float32", **_by_name("dtype", value, names)} if isinstance(value, Mapping) else {"": value}
    return {name: _dtype_name(entry) for name, entry in given.items()}


def _dtype_name(entry: Any) -> str:
    text = entry
    if entry is not None and not isinstance(entry, str):
        try:
            text = np.dtype(getattr(entry, "as_numpy_dtype", entry)).name  # TensorFlow's have one
        except (TypeError, ValueError):
            text = ""
    if text not in _DTYPES:
        raise UsageError(f"dtype: {entry!r} is not one of {', '.join(_DTYPES)}")
    return str(text)


def read_scale(value: Any, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the scale setting as (factor, offset) by dataset name. The key "" holds that of x."""
    if value is None:
        return {}
    given = _by_name("scale", value, names) if isinstance(value, Mapping) else {"": value}
    return {name: _factor_and_offset(entry) for name, entry in given.items()}


def _factor_and_offset(entry: Any) -> tuple[float, float]:
    pair = entry if isinstance(entry, (tuple, list)) else (entry, 0.0)
    try:
        factor, offset = (checks.number("scale", each, least=-np.inf) for each in pair)
    except (UsageError, ValueError, OverflowError):
        raise UsageError(f"scale: {entry!r} is neither a number nor (factor, offset)") from None
    return factor, offset


def _by_name(setting: str, given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    result = {}
    for name, entry in given.items():
        plain = plain_name(name) if isinstance(name, str) else name
        if plain != "" and plain not in names:
            known = ", ".join(shown(known) for known in names)
            raise UsageError(f"{setting}: {name!r} is none of the datasets used ({known})")
        result[plain] = entry
    return result


def read_rows(rows: Any, length: int, *, ordered: bool) -> range | np.ndarray:
    """Return the selected rows: a `range` if they are one run, else a sorted int64 array.

    Args:
        rows: None (all), a slice, a range, a (start, stop) tuple or an array or list of row numbers.
        length: rows in the file.
        ordered: whether the rows will be delivered in file order; an index array must then be increasing,
            because its own order would be lost without a word.

    Raises:
        UsageError: If `rows` is nothing of the kind.
        DataError: If rows are outside the file, negative, named twice, or none at all.
    """
    if rows is None:
        return range(length)
    if isinstance(rows, (tuple, slice)):
        rows = _as_range(rows, length)
    if isinstance(rows, range):
        if not len(rows):
            raise DataError(f"rows: {rows.start:,} to {rows.stop:,} selects no rows; the file has {length:,}")
        if rows.step < 0:
            raise UsageError(f"rows: {rows} falls; give a rising range, as rows are taken in file order")
    else:
        rows = _as_rising(rows, length, ordered)
    low, high = int(rows[0]), int(rows[-1])
    if low < 0:
        raise DataError(f"rows: {low} is negative; count from the first row, 0 to {length - 1:,}")
    if high >= length:
        raise DataError(f"rows: {high:,} is past the end; the file has {format_count(length, 'row')}")
    return range(low, high + 1) if high - low + 1 == len(rows) else np.asarray(rows, np.int64)


def _as_range(rows: Any, length: int) -> range:
    if isinstance(rows, tuple):
        if len(rows) != 2:
            raise UsageError(f"rows: a tuple means (start, stop), and {rows!r} has {len(rows)} entries")
        rows = slice(*rows)
    start, stop = (
        default if value is None else checks.whole("rows", value, -sys.maxsize)
        for value, default in ((rows.start, 0), (rows.stop, length))
    )
    return range(start, stop, 1 if rows.step is None else checks.whole("rows", rows.step))


def _as_rising(rows: Any, length: int, ordered: bool) -> np.ndarray:
    try:
        array = np.asarray(rows)
    except (ValueError, TypeError) as error:
        raise UsageError(f"rows: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(
            "rows: give a slice, a range, (start, stop) or a flat array of whole row numbers, such as "
            "numpy.flatnonzero(mask)"
        )
    if not array.size:
        raise DataError(f"rows: the array is empty; the file has {format_count(length, 'row')}")
    rising, counts = np.unique(array.astype(np.int64), return_counts=True)
    if len(rising) < len(array):
        raise DataError(f"rows: row {int(rising[counts.argmax()]):,} is named more than once")
    if ordered and not np.array_equal(rising, array):
        raise UsageError(
            "rows: with shuffle=False rows come in file order, and these are not in it; "
            "pass numpy.sort(rows), and use that order for the results"
        )
    return rising
