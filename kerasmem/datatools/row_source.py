"""Sources of rows: columns, a number of rows, and the rows in pieces.

Several sources are one too: those with the same columns one after another, those with other columns side by side.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from kerasmem.datatools.fields import Field, Rows, check_names
from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import shown
from kerasmem.units import format_count

_SHORT = 200  # characters of class names in a message


class RowSource(ABC):
    """Rows of several columns in a fixed order. A source keeps no file open, and can be sent to another process.

    Args:
        label: name for messages.
        paths: files and folders that are read.

    Attributes:
        fields: columns.
        first: number of the first row in the file.
        rows: number of rows.
        starts: rows at which a part may begin; None for any row.
        notes: facts for the user.
        losses: number of values read so far that lost something, by the note about it.
    """

    fields: tuple[Field, ...]
    rows: int
    first = 0
    starts: Sequence[int] | None = None

    def __init__(self, label: str, *paths: str) -> None:
        self.label, self.paths = label, paths
        self.notes: list[str] = []
        self.losses: Counter[str] = Counter()

    @abstractmethod
    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield the rows in order, at most `rows` at a time."""

    def part(self, start: int, stop: int) -> RowSource:
        """Return some of the rows as a source of their own."""
        if (start, stop) == (0, self.rows):
            return self
        part = copy.copy(self)
        part.first, part.rows, part.losses = self.first + start, stop - start, Counter()
        return part


def rows_in(rows: Rows) -> int:
    """Return the number of rows."""
    return len(next(iter(rows.values())))


def even_pieces(pieces: Iterator[Rows], rows: int) -> Iterator[Rows]:
    """Yield pieces of exactly `rows` rows, except the last."""
    held: list[Rows] = []
    count = 0
    for piece in pieces:
        length = rows_in(piece)
        for first in range(-count, length, rows):
            held.append({name: values[max(first, 0) : first + rows] for name, values in piece.items()})
            if first + rows <= length:
                yield _concatenate(held)
                held = []
        count = (count + length) % rows
    if held:
        yield _concatenate(held)


def _concatenate(pieces: Sequence[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


class _CombinedSource(RowSource):
    def __init__(self, label: str, sources: Sequence[RowSource]) -> None:
        super().__init__(label, *(path for source in sources for path in source.paths))
        self._sources = sources
        for source in sources:
            source.losses = self.losses


class ConcatenatedSource(_CombinedSource):
    """Sources with the same columns, one after another.

    Raises:
        DataError: If they differ in row shape, type or class names.
    """

    def __init__(self, sources: Sequence[RowSource]) -> None:
        first = sources[0]
        super().__init__(f"{first.label} and {len(sources) - 1:,} more", sources)
        self.fields = first.fields
        for other in sources[1:]:
            self._check_columns(other)
        *self._firsts, self.rows = itertools.accumulate((source.rows for source in sources), initial=0)
        if any(source.starts is not None for source in sources):
            placed = zip(self._firsts, sources, strict=True)
            self.starts = [at + start for at, source in placed for start in source.starts or (0,)]
        for note in dict.fromkeys(note for source in sources for note in source.notes):
            labels = [source.label for source in sources if note in source.notes]
            more = f" and {format_count(len(labels) - 1, 'more file')}" if len(labels) > 1 else ""
            self.notes.append(f"{labels[0]}{more}: {note}")

    def _check_columns(self, other: RowSource) -> None:
        kinds = {field.name: _kind(field) for field in other.fields}
        for field in self.fields:
            kind, other_kind = _kind(field), kinds[field.name]
            if kind != other_kind:
                differing = f"{shown(field.name)} has rows of {other_kind:.{_SHORT}}"
                raise DataError(f"{other.label}: {differing}, and in {self._sources[0].label} {kind:.{_SHORT}}")

    def part(self, start: int, stop: int) -> RowSource:
        """Return some of the rows: of the sources that have them."""
        parts = []
        for at, source in zip(self._firsts, self._sources, strict=True):
            first, last = max(start - at, 0), min(stop - at, source.rows)
            if first < last:
                parts.append(source.part(first, last))
        return parts[0] if len(parts) == 1 else ConcatenatedSource(parts)

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield rows of one source after the other."""
        for source in self._sources:
            yield from source.pieces(rows)


def _kind(field: Field) -> str:
    return f"{np.dtype(field.dtype).name} {field.shape}{field.class_names or ''}"


class SideBySideSource(_CombinedSource):
    """Sources with different columns and equally many rows, side by side.

    Raises:
        DataError: If they differ in their number of rows.
    """

    def __init__(self, sources: Sequence[RowSource]) -> None:
        super().__init__(", ".join(source.label for source in sources), sources)
        self.notes = [note for source in sources for note in source.notes]
        self.fields = tuple(field for source in sources for field in source.fields)
        self.rows = sources[0].rows
        if len({source.rows for source in sources}) > 1:
            counts = ", ".join(f"{source.label} has {source.rows:,}" for source in sources)
            raise DataError(f"the sources differ in their number of rows: {counts}")
        check_names(self.fields, f"{self.label}, whose columns differ and are put side by side")
        if any(source.starts is not None for source in sources):
            self.starts = (0,)

    def part(self, start: int, stop: int) -> RowSource:
        """Return some of the rows of all sources."""
        return SideBySideSource([source.part(start, stop) for source in self._sources])

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield rows of all sources at once."""
        streams = [even_pieces(source.pieces(rows), rows) for source in self._sources]
        for parts in zip(*streams, strict=True):
            yield {name: values for part in parts for name, values in part.items()}


def combine(sources: Sequence[RowSource]) -> RowSource:
    """Return several sources as one.

    Raises:
        DataError: If they do not fit together.
    """
    groups: dict[frozenset[str], list[RowSource]] = {}
    for source in sources:
        groups.setdefault(frozenset(field.name for field in source.fields), []).append(source)
    joined = [ConcatenatedSource(group) if len(group) > 1 else group[0] for group in groups.values()]
    return joined[0] if len(joined) == 1 else SideBySideSource(joined)
