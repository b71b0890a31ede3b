"""Columns that are read, datasets that are written, and the conversion between their values."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

import numpy as np

from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import plain_name, shown
from kerasmem.hdf5.rows.safe_reading import text_of

UNPACKED = frozenset(
    ("scale_factor", "add_offset", "_FillValue", "missing_value", "valid_range", "valid_min", "valid_max", "_Unsigned")
)
"""Attributes that describe packed values, and are wrong for unpacked ones."""
_LISTED = 12  # names shown in a message


@dataclass(frozen=True)
class Field:
    """One column of the rows that are read, or one dataset that is written.

    Args:
        name: name of the dataset; "/" makes groups.
        dtype: NumPy's text for the type, such as "<f4".
        shape: shape of one row.
        class_names: names that the whole numbers from 0 on stand for; None for plain numbers.
        columns: of a dataset: the names of the columns it is made of, side by side if there are several.
        unpacked: type of the stored values if they were unpacked, so that attributes about packing are wrong; or "".
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    class_names: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    unpacked: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


Rows = dict[str, np.ndarray]
"""Some rows: an array of equal length a field, by name."""


def _check_name(name: str) -> str:
    """Return a dataset's name as a plain path.

    Raises:
        DataError: If it is empty, leaves its group, or cannot be stored by HDF5.
    """
    encodable = name.encode("utf-8", "ignore").decode() == name
    if not (encodable and plain_name(name)) or ".." in name.split("/") or "\0" in name:
        raise DataError(f"{shown(name)} cannot be the name of a dataset; rename it, or drop it")
    return plain_name(name)


def check_names(fields: Sequence[Field], where: str) -> None:
    """Refuse a name that would be a dataset and a group at once, or two datasets."""
    names = Counter(field.name for field in fields)
    groups = {name[: match.start()] for name in names for match in re.finditer("/", name)}
    for name, count in names.items():
        if count > 1 or name in groups:
            several = "two datasets" if count > 1 else "a dataset and a group"
            raise DataError(f"{where}: {shown(name)} would be the name of {several}; rename one, or drop it")


class ColumnChoice:
    """Choice of the columns to read and of the datasets they become.

    Args:
        columns: by name of a dataset the columns it is made of, names or patterns such as "pixel*"; "*" stands for
            all that nothing else names. One name alone keeps its shape; several, or a pattern, are put side by side.
            None for all columns under their own names.
        drop: names or patterns of columns to leave out.
    """

    def __init__(self, columns: Mapping[str, str | Sequence[str]] | None, drop: Sequence[str] = ()) -> None:
        self._datasets = {
            name: [patterns] if isinstance(patterns, str) else list(patterns)
            for name, patterns in (columns or {}).items()
        }
        self._patterns = [pattern for wanted in self._datasets.values() for pattern in wanted] or ["*"]
        self._drop = list(drop)
        self._seen: dict[str, None] = {}

    def reads(self, name: str) -> bool:
        """Return whether a column is read and written."""
        self._seen[name] = None
        return _fits(name, self._patterns) and not _fits(name, self._drop)

    def _chooses(self, pattern: str, name: str) -> bool:
        """Return whether a pattern fits a column. "*" fits those that no other pattern fits."""
        others = [other for other in self._patterns if other != "*"]
        return not _fits(name, others) if pattern == "*" else _fits(name, [pattern])

    def refuse_empty(self, where: str) -> NoReturn:
        """Raise the error for a source without columns to read."""
        raise UsageError(f"columns, drop: {where} has no column that is read; there are {_listed(self._seen)}")

    def datasets(self, fields: Sequence[Field]) -> tuple[Field, ...]:
        """Return the datasets to write.

        Args:
            fields: the columns that are written.

        Raises:
            UsageError: If no column fits a pattern.
            DataError: If columns cannot be put side by side.
        """
        for pattern in self._drop:
            if not any(_fits(name, [pattern]) for name in self._seen):
                raise UsageError(f"drop: no column fits {pattern!r}; there are {_listed(self._seen)}")
        if not fields:
            self.refuse_empty("a source")
        if not self._datasets:
            return tuple(replace(field, name=_check_name(field.name), columns=(field.name,)) for field in fields)
        datasets = []
        for name, patterns in self._datasets.items():
            columns: dict[str, Field] = {}
            for pattern in patterns:
                fitting = {field.name: field for field in fields if self._chooses(pattern, field.name)}
                if not fitting:
                    listed = _listed(field.name for field in fields)
                    raise UsageError(f"columns: no column fits {pattern!r} for {name!r}; there are {listed}")
                columns |= fitting
            is_renamed = len(columns) == 1 and patterns == list(columns)
            joined = columns[patterns[0]] if is_renamed else _side_by_side(list(columns.values()))
            datasets.append(replace(joined, name=_check_name(name), columns=tuple(columns)))
        return tuple(datasets)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: Iterable[str]) -> str:
    shortened = [shown(name, 60) for name in names]
    more = len(shortened) - _LISTED
    return ", ".join(shortened[:_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def _side_by_side(columns: Sequence[Field]) -> Field:
    for field in columns:
        if len(field.shape) > 1 or field.class_names is not None:
            content = "texts" if field.class_names else f"rows of shape {field.shape}"
            raise DataError(f"columns: {shown(field.name)} holds {content}; write it as a separate dataset")
    dtype = np.result_type(*(np.dtype(field.dtype) for field in columns))
    width = sum(prod(field.shape) for field in columns)
    return Field("", dtype.str, (width,))


def written_type(field: Field, *, float32: bool = True) -> str:
    """Return a column's little-endian type in the file.

    Args:
        field: the column as read.
        float32: write float64 as float32.

    Raises:
        DataError: If the column holds no plain numbers.
    """
    dtype = np.dtype(field.dtype)
    if dtype.kind not in "fiub":
        raise DataError(
            f"{shown(field.name)} holds {dtype.name}, no plain numbers; leave it out with drop, or convert it: complex "
            "numbers to two channels, np.stack([z.real, z.imag], -1)"
        )
    if dtype.kind == "f" and dtype.itemsize > 4:
        return "<f4" if float32 else "<f8"
    return dtype.newbyteorder("<").str


def written_rows(rows: Rows, datasets: Sequence[Field], source: str, first: int) -> Rows:
    """Return rows as they are written: columns side by side, in the types of the datasets.

    Args:
        rows: the rows as read.
        datasets: the datasets.
        source: the source's name for messages.
        first: number of the first row, for messages.

    Raises:
        DataError: If a finite value would become infinite.
    """
    result = {}
    for field in datasets:
        columns = [
            _cast(rows[name], np.dtype(field.dtype), f"{source}: {shown(name)}", first) for name in field.columns
        ]
        if len(columns) > 1:
            columns = [np.concatenate([values.reshape(len(values), -1) for values in columns], axis=1)]
        result[field.name] = columns[0].reshape(len(columns[0]), *field.shape)
    return result


def _cast(values: np.ndarray, dtype: np.dtype[Any], where: str, first: int) -> np.ndarray:
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        result = values.astype(dtype, order="C")
    lost = np.isinf(result) if values.dtype.kind == "f" else np.zeros(0, bool)
    if lost.any():
        lost &= np.isfinite(values)
    if lost.any():
        at = tuple(np.argwhere(lost)[0].tolist())
        value = f"{values[at]:.6g} in row {first + at[0]:,}, which float32 has no room for"
        raise DataError(f"{where} holds {value}; scale the data, or keep the type: float32=False (--no-float32)")
    return result


@dataclass(frozen=True)
class Packing:
    """How the stored values of a dataset stand for physical ones.

    Args:
        factor: factor of the stored values.
        offset: number added to the product.
        missing: stored values that stand for no value.
        low: smallest valid stored value; None for no limit.
        high: largest valid stored value; None for no limit.
        unsigned: whether signed whole numbers are read as unsigned.
    """

    factor: float = 1.0
    offset: float = 0.0
    missing: tuple[float, ...] = ()
    low: float | None = None
    high: float | None = None
    unsigned: bool = False

    @property
    def scales(self) -> bool:
        """Whether a physical value is not the stored one."""
        return (self.factor, self.offset) != (1.0, 0.0)

    def stored(self, values: np.ndarray) -> np.ndarray:
        """Return stored values as numbers: as unsigned ones if they are read so."""
        return values.view(values.dtype.str.replace("i", "u")) if self.unsigned else values

    def is_missing(self, values: np.ndarray) -> np.ndarray:
        """Return a mask of the values that stand for no value.

        Args:
            values: values that `stored` returned.
        """
        missing = np.isin(values, np.array(self.missing, values.dtype))
        if self.low is not None:
            missing |= values < self.low
        if self.high is not None:
            missing |= values > self.high
        return missing

    def unpack(self, values: np.ndarray, dtype: str) -> np.ndarray:
        """Return physical values, NaN for missing ones."""
        values = self.stored(values)
        result = values.astype(np.float64) * self.factor + self.offset
        result[self.is_missing(values)] = np.nan
        return result.astype(dtype)


def read_packing(attribute: Callable[[str], Any], dtype: np.dtype[Any]) -> Packing | None:
    """Return the packing that attributes describe, or None.

    Args:
        attribute: returns an attribute's value, or None.
        dtype: type of the stored values.
    """
    if dtype.kind not in "iuf":
        return None
    factor, offset = _numbers(attribute("scale_factor")) or [1.0], _numbers(attribute("add_offset")) or [0.0]
    scale = float(factor[0]), float(offset[0])
    if not np.isfinite(scale).all() or not scale[0]:
        return None
    unsigned = dtype.kind == "i" and text_of(attribute("_Unsigned")).lower() == "true"
    kind = np.dtype(f"u{dtype.itemsize}") if unsigned else dtype
    missing = [*_numbers(attribute("_FillValue")), *_numbers(attribute("missing_value"))]
    limits = _numbers(attribute("valid_range"))
    if len(limits) != 2:
        limits = [(_numbers(attribute(name)) or [None])[0] for name in ("valid_min", "valid_max")]
    low, high = (_stored_limit(limit, scale, kind) for limit in limits)
    if low is not None and high is not None and low > high:  # a negative factor turns them round
        low, high = high, low
    stored = dict.fromkeys(value for number in missing for value in _stored_number(number, kind))
    packing = Packing(*scale, tuple(stored), low, high, unsigned)
    return None if packing == Packing() else packing


def _numbers(value: Any) -> list[Any]:
    """Return an attribute's numbers in NumPy's types, or nothing if it has none."""
    array = np.asarray([] if value is None else value).reshape(-1)
    return list(array) if array.dtype.kind in "iuf" else []


def _stored_number(number: Any, dtype: np.dtype[Any]) -> list[float]:
    """Return a number in the type of the stored values, or nothing if that cannot hold it."""
    if np.isnan(number):
        return []
    with np.errstate(invalid="ignore", over="ignore"):
        cast = number.astype(dtype)
    wraps = dtype.kind == "u" and number.dtype.kind == "i"
    return [cast.item()] if dtype.kind == "f" or wraps or cast == number else []


def _stored_limit(limit: Any, scale: tuple[float, float], dtype: np.dtype[Any]) -> float | None:
    """Return a limit as a stored value: one of fractions for stored whole numbers is a physical value."""
    if limit is None or not np.isfinite(limit):
        return None
    if dtype.kind == "f":
        return float(limit)
    if limit.dtype.kind == "f":
        return round((float(limit) - scale[1]) / scale[0])
    return int(limit.astype(dtype) if dtype.kind == "u" else limit)
