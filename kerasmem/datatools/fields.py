"""Columns that are read, datasets that are written, and the conversion between them."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

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
        class_names: what the whole numbers from 0 on stand for, where they stand for names.
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


def check_name(name: str, where: str) -> str:
    """Return a column's name if it can be a dataset's, as a plain path.

    Raises:
        DataError: it cannot: it is empty, climbs out of its group, or HDF5 cannot store it.
    """
    encodable = name.encode("utf-8", "ignore").decode() == name
    if not (encodable and plain_name(name)) or ".." in name.split("/") or "\0" in name:
        raise DataError(f"{where}: {shown(name)} cannot be the name of a dataset; rename it, or drop it")
    return plain_name(name)


def check_names(fields: Sequence[Field], where: str) -> None:
    """Refuse a name that would be a dataset and a group at once, or two datasets."""
    known: set[str] = set()
    for field in fields:
        if field.name in known:
            raise DataError(f"{where}: there are several columns called {shown(field.name)}; rename them")
        known.add(field.name)
    for name in known:
        parts = name.split("/")
        for length in range(1, len(parts)):
            group = "/".join(parts[:length])
            if group in known:
                raise DataError(
                    f"{where}: {shown(group)} would be a dataset and the group of {shown(name)}; rename one"
                )


class ColumnChoice:
    """Choice of the columns to read and of the datasets they become.

    Args:
        columns: by name of a dataset the columns it is made of, names or patterns such as "pixel*"; "*" stands for
            all that nothing else names. One name alone keeps its shape; several, or a pattern, are put side by side.
            None for all columns under their own names.
        drop: names or patterns of columns to leave out.
    """

    def __init__(self, columns: Mapping[str, str | Sequence[str]] | None, drop: Sequence[str] = ()) -> None:
        given = (columns or {}).items()
        self._datasets = {name: [wanted] if isinstance(wanted, str) else list(wanted) for name, wanted in given}
        self._patterns = [pattern for wanted in self._datasets.values() for pattern in wanted] or ["*"]
        self._drop = list(drop)
        self._seen: dict[str, None] = {}

    def reads(self, name: str) -> bool:
        """Return whether a column is read and written."""
        self._seen[name] = None
        return _fits(name, self._patterns) and not _fits(name, self._drop)

    def wants(self, name: str) -> bool:
        """Return whether a name, or a pattern other than "*", asks for a column."""
        return _fits(name, [pattern for pattern in self._patterns if pattern != "*"])

    def check(self) -> None:
        """Refuse patterns that fit no column seen so far.

        Raises:
            UsageError: there is one.
        """
        for option, patterns in (("drop", self._drop), ("columns", self._patterns)):
            for pattern in patterns:
                if not any(_fits(name, [pattern]) for name in self._seen):
                    raise UsageError(f"{option}: no column fits {pattern!r}; there are {_listed(self._seen)}")
        if not any(self.reads(name) for name in list(self._seen)):
            raise UsageError("drop: nothing is left to be written")

    def datasets(self, fields: Sequence[Field]) -> tuple[Field, ...]:
        """Return the datasets to write.

        Args:
            fields: the columns that are written.

        Raises:
            UsageError: a name or pattern fits none of them.
            DataError: columns that differ in type cannot be put together.
        """
        if not fields:
            raise UsageError("drop: nothing is left to be written")
        if not self._datasets:
            return tuple(replace(field, columns=(field.name,)) for field in fields)
        named = [pattern for pattern in self._patterns if pattern != "*"]
        found = []
        for name, wanted in self._datasets.items():
            columns: dict[str, Field] = {}
            for pattern in wanted:
                fitting = {
                    field.name: field
                    for field in fields
                    if (not _fits(field.name, named) if pattern == "*" else _fits(field.name, [pattern]))
                }
                if not fitting:
                    listed = _listed([field.name for field in fields])
                    raise UsageError(f"columns: no column fits {pattern!r} for {name!r}; there are {listed}")
                columns |= fitting
            check_name(name, "columns")
            found.append(_joined(name, list(columns.values()), single=len(wanted) == 1 and wanted == list(columns)))
        return tuple(found)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: Iterable[str]) -> str:
    shortened = [shown(name, 60) for name in names]
    more = len(shortened) - _LISTED
    return ", ".join(shortened[:_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def _joined(name: str, found: Sequence[Field], *, single: bool) -> Field:
    columns = tuple(field.name for field in found)
    if single:
        return replace(found[0], name=name, columns=columns)
    for field in found:
        if len(field.shape) > 1:
            raise DataError(
                f"columns: {shown(field.name)} has rows of shape {field.shape}; only lists can be put side by side"
            )
        if field.class_names is not None:
            raise DataError(f"columns: {shown(field.name)} holds texts; give it a dataset of its own")
    dtype = np.result_type(*(np.dtype(field.dtype) for field in found))
    return Field(name, dtype.str, (sum(prod(field.shape) for field in found),), columns=columns)


def join_columns(rows: Rows, datasets: Sequence[Field]) -> Rows:
    """Return rows as they are to be written, in place of the columns they were read from."""
    result = {}
    for field in datasets:
        columns = [rows[column] for column in field.columns]
        if len(columns) > 1:
            flat = [values.reshape(len(values), -1) for values in columns]
            columns = [np.concatenate(flat, axis=1, dtype=np.dtype(field.dtype))]
        result[field.name] = columns[0].reshape(len(columns[0]), *field.shape)
    return result


_EXACT = 2**24  # whole numbers beyond are not all float32 values


def written_type(field: Field, *, float32: bool = True) -> str:
    """Return the little-endian type in which a column is written.

    Args:
        field: the column as read.
        float32: write float64 as float32.

    Raises:
        DataError: the column holds no plain numbers.
    """
    dtype = np.dtype(field.dtype)
    if dtype.kind == "c":
        raise DataError(
            f"{shown(field.name)} holds complex numbers; store two channels, np.stack([z.real, z.imag], -1)"
        )
    if dtype.kind not in "fiub":
        kind = "dates or times" if dtype.kind in "mM" else "text" if dtype.kind in "SU" else f"the type {dtype}"
        raise DataError(f"{shown(field.name)} holds {kind}, no plain numbers; convert it, or leave it out with drop")
    if dtype.kind == "f" and dtype.itemsize > 4:
        return "<f4" if float32 else "<f8"
    return dtype.newbyteorder("<").str


class Caster:
    """Convert rows to the types written, and count values that this rounds.

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
        self.losses: Counter[str] = Counter()  # values rounded, by the note about it

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
            value = f"row {first + at[0]:,} of {shown(name)} holds {values[at]:.6g}, which float32 has no room for"
            raise DataError(f"{self._source}: {value}; scale the data, or keep the type: float32=False (--no-float32)")

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
            note = "beyond 16,777,216 were rounded to float32; float32=False (--no-float32) keeps their last digits"
            self.losses[f"whole numbers of {shown(name)} {note}"] += count
