"""Which datasets are written: their names, types and row shapes, and how the columns of the sources become them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.layout import plain_name, shown

_LISTED = 12  # names shown in a message


@dataclass(frozen=True)
class Field:
    """One column of the rows that are read, or one dataset that is written.

    Args:
        name: name of the dataset; "/" makes groups.
        dtype: NumPy's text for the type, such as "<f4".
        shape: shape of one row.
        class_names: what the whole numbers from 0 on stand for, where they stand for names.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    class_names: tuple[str, ...] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


Piece = dict[str, np.ndarray]
"""Some rows: an array of equal length a field, by name."""


def check_name(name: str, where: str) -> str:
    """Return a column's name if it can be a dataset's, as a plain path.

    Raises:
        DataError: it cannot: it is empty, climbs out of its group, or HDF5 cannot store it.
    """
    parts = name.split("/")
    try:
        name.encode("utf-8")
        fits = bool(plain_name(name)) and ".." not in parts and "\0" not in name
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise DataError(
            f"{where}: {shown(name)} cannot be the name of a dataset; rename it there, or leave it out with drop"
        )
    return plain_name(name)


def check_names(fields: Sequence[Field], where: str) -> None:
    """Refuse a name that would be a dataset and a group at once, or two datasets."""
    names = [field.name for field in fields]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise DataError(f"{where}: there are several columns called {shown(twice)}; rename them")
    known = set(names)
    for name in names:
        parts = name.split("/")
        for length in range(1, len(parts)):
            group = "/".join(parts[:length])
            if group in known:
                raise DataError(
                    f"{where}: {shown(group)} would be a dataset and the group of {shown(name)}; rename one"
                )


@dataclass(frozen=True)
class Join:
    """How one dataset is made: columns of the sources, side by side where they are several.

    Args:
        field: what is written.
        columns: names of the columns it is made of.
    """

    field: Field
    columns: tuple[str, ...]


def choose_fields(
    fields: Sequence[Field], columns: Mapping[str, str | Sequence[str]] | None, drop: Sequence[str] = ()
) -> list[Join]:
    """Return what is to be written: all columns under their own names, or those asked for.

    Args:
        fields: the columns there are.
        columns: by name of a dataset the columns it is made of, names or patterns such as "pixel*"; "*" stands for
            all that nothing else names. One name alone keeps its shape; several, or a pattern, are put side by side.
        drop: names or patterns of columns to leave out.

    Raises:
        UsageError: a name or pattern fits no column.
        DataError: columns that differ in type cannot be put together.
    """
    kept = [field for field in fields if not any(_fits(field.name, pattern) for pattern in drop)]
    if not kept:
        raise UsageError("drop: nothing is left to be written")
    if not columns:
        return [Join(field, (field.name,)) for field in kept]
    patterns = {name: [wanted] if isinstance(wanted, str) else list(wanted) for name, wanted in columns.items()}
    named = {
        field.name for field in kept if any(_fits(field.name, p) for ps in patterns.values() for p in ps if p != "*")
    }
    joins = []
    for name, wanted in patterns.items():
        found: list[Field] = []
        for pattern in wanted:
            fitting = [
                field for field in kept if (field.name not in named if pattern == "*" else _fits(field.name, pattern))
            ]
            if not fitting:
                raise UsageError(
                    f"columns: no column fits {pattern!r} for {name!r}; there are "
                    f"{_listed([field.name for field in kept])}"
                )
            found += [field for field in fitting if field not in found]
        check_name(name, "columns")
        single = len(wanted) == 1 and found[0].name == wanted[0]
        joins.append(Join(_joined(name, found, single=single), tuple(field.name for field in found)))
    return joins


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(shown(name, 60) for name in names[:_LISTED])
    return listed + (f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else "")


def _joined(name: str, found: Sequence[Field], *, single: bool) -> Field:
    if single:
        return Field(name, found[0].dtype, found[0].shape, found[0].class_names)
    for field in found:
        if len(field.shape) > 1:
            raise DataError(
                f"columns: {shown(field.name)} has rows of shape {field.shape}; only numbers and lists of them can "
                "be put side by side"
            )
        if field.class_names is not None:
            raise DataError(f"columns: {shown(field.name)} holds texts; give it a dataset of its own")
    dtype = np.result_type(*(np.dtype(field.dtype) for field in found))
    return Field(name, dtype.str, (sum(prod(field.shape) for field in found),))


def join_piece(piece: Piece, joins: Sequence[Join]) -> Piece:
    """Return rows as they are to be written, in place of the columns they were read from."""
    result = {}
    for join in joins:
        if len(join.columns) == 1:
            values = piece[join.columns[0]]
            result[join.field.name] = values.reshape(len(values), *join.field.shape)
            continue
        rows = len(piece[join.columns[0]])
        out = np.empty((rows, *join.field.shape), join.field.dtype)
        at = 0
        for column in join.columns:
            values = piece[column].reshape(rows, -1)
            out[:, at : at + values.shape[1]] = values
            at += values.shape[1]
        result[join.field.name] = out
    return result


class ColumnFilter:
    """Which columns of the sources matter, so that the others need not be fit for anything.

    Args:
        columns: as in `choose_fields`.
        drop: as in `choose_fields`.
        extra: columns that are needed but not written.
    """

    def __init__(
        self, columns: Mapping[str, str | Sequence[str]] | None, drop: Sequence[str], extra: Sequence[str]
    ) -> None:
        patterns = [p for wanted in (columns or {}).values() for p in ([wanted] if isinstance(wanted, str) else wanted)]
        self._patterns = patterns or ["*"]
        self._drop = list(drop)
        self._extra = set(extra)
        self._seen: dict[str, None] = {}

    def keeps(self, name: str) -> bool:
        """Return whether a column is looked at."""
        self._seen[name] = None
        if name in self._extra:
            return True
        if any(_fits(name, pattern) for pattern in self._drop):
            return False
        return any(_fits(name, pattern) for pattern in self._patterns)

    def check(self) -> None:
        """Refuse patterns that fit no column seen so far.

        Raises:
            UsageError: there is one.
        """
        for option, patterns in (("drop", self._drop), ("columns", self._patterns)):
            for pattern in patterns:
                if not any(_fits(name, pattern) for name in self._seen):
                    raise UsageError(f"{option}: no column fits {pattern!r}; there are {_listed(list(self._seen))}")
        if not any(self.keeps(name) for name in list(self._seen)):
            raise UsageError("drop: nothing is left to be written")
