"""Columns that are read, datasets that are written, and the conversion between them."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

import numpy as np

from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import plain_name, shown

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
