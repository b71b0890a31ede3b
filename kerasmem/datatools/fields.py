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
from kerasmem.hdf5.format.layout import plain_name, quote
from kerasmem.hdf5.rows.safe_reading import text_of

PACKING_ATTRIBUTES = frozenset(
    ("scale_factor", "add_offset", "_FillValue", "missing_value", "valid_range", "valid_min", "valid_max", "_Unsigned")
)
"""netCDF attributes of packed values, which do not apply to unpacked ones."""
_MOST_NAMES = 12  # in a message


@dataclass(frozen=True)
class Field:
    """One column to read, or one dataset to write.

    Args:
        name: name of the dataset; "/" creates groups.
        dtype: NumPy's type string, such as "<f4".
        shape: shape of one row.
        class_names: names of the classes 0, 1, 2 and so on, or None for plain numbers.
        columns: names of the columns of a dataset. Several are side by side.
        stored_dtype: type of the stored values if they were unpacked, or "".
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    class_names: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    stored_dtype: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


Rows = dict[str, np.ndarray]
"""Some rows: arrays of equal length by field name."""


def _check_name(name: str) -> str:
    """Return a dataset's name as a plain path.

    Raises:
        DataError: If it is empty, leaves its group, or cannot be stored by HDF5.
    """
    encodable = name.encode("utf-8", "ignore").decode() == name
    if not (encodable and plain_name(name)) or ".." in name.split("/") or "\0" in name:
        raise DataError(f"{quote(name)} cannot be the name of a dataset; rename or drop it")
    return plain_name(name)


def check_names(fields: Sequence[Field], label: str) -> None:
    """Raise `DataError` if a name would be that of two datasets, or of a dataset and a group."""
    names = Counter(field.name for field in fields)
    groups = {name[: match.start()] for name in names for match in re.finditer("/", name)}
    for name, count in names.items():
        if count > 1 or name in groups:
            several = "two datasets" if count > 1 else "a dataset and a group"
            raise DataError(f"{label}: {quote(name)} would be the name of {several}; rename or drop one")


class ColumnChoice:
    """Choice of the columns to read and of the datasets that they become.

    Args:
        columns: columns of each dataset by its name: names or patterns such as "pixel*". "*" is all columns that no
            other pattern matches. A single name keeps its shape; several names, or a pattern, are put side by side.
            None for all columns under their own names.
        drop: names or patterns of columns to omit.
    """

    def __init__(self, columns: Mapping[str, str | Sequence[str]] | None, drop: Sequence[str] = ()) -> None:
        self._datasets = {
            name: [patterns] if isinstance(patterns, str) else list(patterns)
            for name, patterns in (columns or {}).items()
        }
        self._patterns = [pattern for patterns in self._datasets.values() for pattern in patterns] or ["*"]
        self._drop = list(drop)
        self._seen: dict[str, None] = {}

    def reads(self, name: str) -> bool:
        """Return whether to read a column."""
        self._seen[name] = None
        return _matches(name, self._patterns) and not _matches(name, self._drop)

    def _chooses(self, pattern: str, name: str) -> bool:
        """Return whether a pattern matches a column. "*" matches those that no other pattern matches."""
        others = [other for other in self._patterns if other != "*"]
        return not _matches(name, others) if pattern == "*" else _matches(name, [pattern])

    def refuse_empty(self, label: str) -> NoReturn:
        """Raise the error for a source without columns to read."""
        raise UsageError(f"columns, drop: no column of {label} is chosen; there are {_list_names(self._seen)}")

    def datasets(self, fields: Sequence[Field]) -> tuple[Field, ...]:
        """Return the datasets to write.

        Args:
            fields: the columns that are written.

        Raises:
            UsageError: If no column matches a pattern.
            DataError: If columns cannot be put side by side.
        """
        for pattern in self._drop:
            if not any(_matches(name, [pattern]) for name in self._seen):
                raise UsageError(f"drop: no column matches {pattern!r}; there are {_list_names(self._seen)}")
        if not fields:
            self.refuse_empty("a source")
        if not self._datasets:
            return tuple(replace(field, name=_check_name(field.name), columns=(field.name,)) for field in fields)
        datasets = []
        for name, patterns in self._datasets.items():
            columns: dict[str, Field] = {}
            for pattern in patterns:
                matching = {field.name: field for field in fields if self._chooses(pattern, field.name)}
                if not matching:
                    names = _list_names(field.name for field in fields)
                    raise UsageError(f"columns: no column matches {pattern!r} for {name!r}; there are {names}")
                columns |= matching
            is_renamed = len(columns) == 1 and patterns == list(columns)
            joined = columns[patterns[0]] if is_renamed else _side_by_side(list(columns.values()))
            datasets.append(replace(joined, name=_check_name(name), columns=tuple(columns)))
        return tuple(datasets)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _list_names(names: Iterable[str]) -> str:
    quoted = [quote(name, 60) for name in names]
    more = len(quoted) - _MOST_NAMES
    return ", ".join(quoted[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _side_by_side(columns: Sequence[Field]) -> Field:
    for field in columns:
        if len(field.shape) > 1 or field.class_names is not None:
            content = "texts" if field.class_names else f"rows of shape {field.shape}"
            raise DataError(f"columns: {quote(field.name)} holds {content}; write it as a separate dataset")
    dtype = np.result_type(*(np.dtype(field.dtype) for field in columns))
    width = sum(prod(field.shape) for field in columns)
    return Field("", dtype.str, (width,))


def written_type(field: Field, *, float32: bool = True) -> str:
    """Return a column's type in the output, in little-endian byte order.

    Args:
        field: the column.
        float32: write float64 as float32.

    Raises:
        DataError: If the column does not contain plain numbers.
    """
    dtype = np.dtype(field.dtype)
    if dtype.kind not in "fiub":
        raise DataError(
            f"{quote(field.name)} must hold plain numbers; got {dtype.name}. Leave it out with drop, or convert it: "
            "complex numbers to two channels, np.stack([z.real, z.imag], -1)"
        )
    if dtype.kind == "f" and dtype.itemsize > 4:
        return "<f4" if float32 else "<f8"
    return dtype.newbyteorder("<").str


def written_rows(rows: Rows, datasets: Sequence[Field], label: str, first: int) -> Rows:
    """Return rows as datasets: columns side by side, in the types of the datasets.

    Args:
        rows: the rows of the source.
        datasets: the datasets to write.
        label: name of the source for messages.
        first: number of the first row, for messages.

    Raises:
        DataError: If a finite value would become infinite.
    """
    result = {}
    for field in datasets:
        columns = [_cast(rows[name], np.dtype(field.dtype), f"{label}: {quote(name)}", first) for name in field.columns]
        if len(columns) > 1:
            columns = [np.concatenate([values.reshape(len(values), -1) for values in columns], axis=1)]
        result[field.name] = columns[0].reshape(len(columns[0]), *field.shape)
    return result


def _cast(values: np.ndarray, dtype: np.dtype[Any], label: str, first: int) -> np.ndarray:
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        result = values.astype(dtype, order="C")
    lost = np.isinf(result) if values.dtype.kind == "f" else np.zeros(0, bool)
    if lost.any():
        lost &= np.isfinite(values)
    if lost.any():
        index = tuple(np.argwhere(lost)[0].tolist())
        value = f"{values[index]:.6g} in row {first + index[0]:,}, which is too large for float32"
        raise DataError(f"{label} holds {value}; scale the data, or keep the type: float32=False (--no-float32)")
    return result


@dataclass(frozen=True)
class Packing:
    """Encoding of the physical values of a dataset as stored values, by netCDF attributes.

    Args:
        factor: factor of the stored values.
        offset: number added to the product.
        missing: stored values that mean a missing value.
        low: smallest valid stored value, or None.
        high: largest valid stored value, or None.
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
        """Whether physical values differ from stored ones."""
        return (self.factor, self.offset) != (1.0, 0.0)

    def apply_sign(self, values: np.ndarray) -> np.ndarray:
        """Return stored values, as unsigned numbers if `unsigned` is set."""
        return values.view(values.dtype.str.replace("i", "u")) if self.unsigned else values

    def is_missing(self, values: np.ndarray) -> np.ndarray:
        """Return a mask of the missing values.

        Args:
            values: result of `apply_sign`.
        """
        missing = np.isin(values, np.array(self.missing, values.dtype))
        if self.low is not None:
            missing |= values < self.low
        if self.high is not None:
            missing |= values > self.high
        return missing

    def unpack(self, values: np.ndarray, dtype: str) -> np.ndarray:
        """Return physical values, with NaN for missing ones."""
        values = self.apply_sign(values)
        result = values.astype(np.float64) * self.factor + self.offset
        result[self.is_missing(values)] = np.nan
        return result.astype(dtype)


def read_packing(attribute: Callable[[str], Any], dtype: np.dtype[Any]) -> Packing | None:
    """Return the packing of a dataset from its attributes, or None.

    Args:
        attribute: returns the value of an attribute by name, or None.
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
    if low is not None and high is not None and low > high:  # because of a negative factor
        low, high = high, low
    stored = dict.fromkeys(value for number in missing for value in _stored_number(number, kind))
    packing = Packing(*scale, tuple(stored), low, high, unsigned)
    return None if packing == Packing() else packing


def _numbers(value: Any) -> list[Any]:
    """Return an attribute's numbers in NumPy's types, or an empty list."""
    array = np.asarray([] if value is None else value).reshape(-1)
    return list(array) if array.dtype.kind in "iuf" else []


def _stored_number(number: Any, dtype: np.dtype[Any]) -> list[float]:
    """Return a number in the type of the stored values, or an empty list if it is out of range."""
    if np.isnan(number):
        return []
    with np.errstate(invalid="ignore", over="ignore"):
        cast = number.astype(dtype)
    wraps = dtype.kind == "u" and number.dtype.kind == "i"
    return [cast.item()] if dtype.kind == "f" or wraps or cast == number else []


def _stored_limit(limit: Any, scale: tuple[float, float], dtype: np.dtype[Any]) -> float | None:
    """Return a limit as a stored value. If the data is whole numbers, a floating-point limit is a physical value."""
    if limit is None or not np.isfinite(limit):
        return None
    if dtype.kind == "f":
        return float(limit)
    if limit.dtype.kind == "f":
        return round((float(limit) - scale[1]) / scale[0])
    return int(limit.astype(dtype) if dtype.kind == "u" else limit)
