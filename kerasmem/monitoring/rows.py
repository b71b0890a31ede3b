"""Samples in compact columns: 108 bytes a sample, where objects would take some 400."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

_UNKNOWN = -(2**63)  # inside the integer arrays only; outside, unknown is None


class PackedRows:
    """Rows of one layout, held as one array a column.

    Args:
        kinds: for each column "float", "int" (None allowed) or "text" (None allowed; few distinct values).
        keep: rows to hold at most; the oldest are dropped, some thousands at a time. None holds all.
        rows: the first ones.

    Attributes:
        dropped: how many rows were dropped.
    """

    def __init__(self, kinds: Sequence[str], keep: int | None = None, rows: Iterable[Iterable[Any]] = ()) -> None:
        self._kinds = tuple(kinds)
        self._columns: list[array[Any]] = [array({"float": "d", "int": "q", "text": "H"}[kind]) for kind in kinds]
        self._codes: dict[str | None, int] = {}  # of texts, in the order of their numbers
        self._keep = keep
        self.dropped = 0
        for row in rows:
            self.append(row)

    def append(self, row: Iterable[Any]) -> None:
        """Add a row at the end."""
        for kind, column, value in zip(self._kinds, self._columns, row, strict=True):
            if kind == "text":
                column.append(self._codes.setdefault(value, len(self._codes)))
            else:
                column.append(_UNKNOWN if value is None else value)
        if self._keep is not None and len(self) >= self._keep + max(1, self._keep // 8):
            self._drop(len(self) - self._keep)

    def copy(self) -> PackedRows:
        """Return an independent copy, one memory copy a column."""
        twin = PackedRows(self._kinds, self._keep)
        twin._columns = [column[:] for column in self._columns]
        twin._codes, twin.dropped = dict(self._codes), self.dropped
        return twin

    def column(self, place: int) -> np.ndarray[Any, Any]:
        """Return a column as an array: numbers as float64, NaN where they are None, and texts as objects."""
        held = np.array(self._columns[place])
        if self._kinds[place] == "text":
            return np.array(list(self._codes), dtype=object)[held]
        return np.where(held == _UNKNOWN, np.nan, held)

    @property
    def held_bytes(self) -> int:
        """Bytes that the columns take from the system, room for more rows included."""
        return sum(map(sys.getsizeof, self._columns))

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError("row index out of range")
        place = index % len(self)
        return next(self._unpacked([column[place : place + 1] for column in self._columns]))

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self._unpacked(self._columns)

    def _unpacked(self, columns: list[array[Any]]) -> Iterator[tuple[Any, ...]]:
        texts = list(self._codes)
        values = (
            (texts[value] for value in column)
            if kind == "text"
            else (None if value == _UNKNOWN else value for value in column)
            for kind, column in zip(self._kinds, columns, strict=True)
        )
        return zip(*values, strict=True)

    def _drop(self, count: int) -> None:
        for column in self._columns:
            del column[:count]
        self.dropped += count
