"""Sources of rows, and the combination of several.

Sources with the same columns are read one after another, sources with different columns side by side.
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
from kerasmem.hdf5.format.layout import quote
from kerasmem.units import format_count

_MOST_TEXT = 200  # characters of class names in a message


class RowSource(ABC):
    """Rows of several columns in a fixed order. Sources keep no file open and can be pickled.

    Args:
        label: name for messages.
        paths: files and folders to read.

    Attributes:
        fields: the columns.
        first: number of the first row in the file.
        rows: number of rows.
        starts: rows at which a part may begin, or None for any row.
        notes: notes for the user.
        losses: number of values read so far that were not converted exactly, by the text of the note.
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
        """Yield all rows in order, in pieces of at most `rows`."""

    def part(self, start: int, stop: int) -> RowSource:
        """Return rows `start` to `stop` as a separate source."""
        if (start, stop) == (0, self.rows):
            return self
        part = copy.copy(self)
        part.first, part.rows, part.losses = self.first + start, stop - start, Counter()
        return part


def rows_in(rows: Rows) -> int:
    """Return the number of rows in a piece."""
    return len(next(iter(rows.values())))


def even_pieces(pieces: Iterator[Rows], rows: int) -> Iterator[Rows]:
    """Yield pieces of exactly `rows` rows, except the last."""
    slices: list[Rows] = []
    count = 0
    for piece in pieces:
        length = rows_in(piece)
        for first in range(-count, length, rows):
            slices.append({name: values[max(first, 0) : first + rows] for name, values in piece.items()})
            if first + rows <= length:
                yield _concatenate(slices)
                slices = []
        count = (count + length) % rows
    if slices:
        yield _concatenate(slices)


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
            pairs = zip(self._firsts, sources, strict=True)
            self.starts = [first_row + start for first_row, source in pairs for start in source.starts or (0,)]
        for note in dict.fromkeys(note for source in sources for note in source.notes):
            labels = [source.label for source in sources if note in source.notes]
            more = f" and {format_count(len(labels) - 1, 'more file')}" if len(labels) > 1 else ""
            self.notes.append(f"{labels[0]}{more}: {note}")

    def _check_columns(self, other: RowSource) -> None:
        kinds = {field.name: _kind(field) for field in other.fields}
        for field in self.fields:
            kind, other_kind = _kind(field), kinds[field.name]
            if kind != other_kind:
                raise DataError(
                    f"{other.label}: rows of {quote(field.name)} must be {kind:.{_MOST_TEXT}} as in "
                    f"{self._sources[0].label}; got {other_kind:.{_MOST_TEXT}}"
                )

    def part(self, start: int, stop: int) -> RowSource:
        """Return rows `start` to `stop` as a separate source."""
        parts = []
        for first_row, source in zip(self._firsts, self._sources, strict=True):
            first, last = max(start - first_row, 0), min(stop - first_row, source.rows)
            if first < last:
                parts.append(source.part(first, last))
        return parts[0] if len(parts) == 1 else ConcatenatedSource(parts)

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield the rows of one source after another."""
        for source in self._sources:
            yield from source.pieces(rows)


def _kind(field: Field) -> str:
    return f"{np.dtype(field.dtype).name} {field.shape}{field.class_names or ''}"


class SideBySideSource(_CombinedSource):
    """Sources with different columns and equally many rows, side by side.

    Raises:
        DataError: If their numbers of rows differ.
    """

    def __init__(self, sources: Sequence[RowSource]) -> None:
        super().__init__(", ".join(source.label for source in sources), sources)
        self.notes = [note for source in sources for note in source.notes]
        self.fields = tuple(field for source in sources for field in source.fields)
        self.rows = sources[0].rows
        if len({source.rows for source in sources}) > 1:
            counts = ", ".join(f"{source.label} has {source.rows:,}" for source in sources)
            raise DataError(f"sources must have equally many rows; {counts}")
        check_names(self.fields, f"{self.label} (columns side by side)")
        if any(source.starts is not None for source in sources):
            self.starts = (0,)

    def part(self, start: int, stop: int) -> RowSource:
        """Return rows `start` to `stop` as a separate source."""
        return SideBySideSource([source.part(start, stop) for source in self._sources])

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield rows with the columns of all sources."""
        streams = [even_pieces(source.pieces(rows), rows) for source in self._sources]
        for parts in zip(*streams, strict=True):
            yield {name: values for part in parts for name, values in part.items()}


def combine(sources: Sequence[RowSource]) -> RowSource:
    """Return several sources as one.

    Raises:
        DataError: If their columns or numbers of rows do not match.
    """
    groups: dict[frozenset[str], list[RowSource]] = {}
    for source in sources:
        groups.setdefault(frozenset(field.name for field in source.fields), []).append(source)
    joined = [ConcatenatedSource(group) if len(group) > 1 else group[0] for group in groups.values()]
    return joined[0] if len(joined) == 1 else SideBySideSource(joined)
