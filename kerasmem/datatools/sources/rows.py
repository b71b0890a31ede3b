"""Sources of rows: columns, a number of rows, and pieces from any row on.

Several sources are one too: those with the same columns one after another, those with other columns side by side.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kerasmem.datatools.fields import Field, Rows, check_names
from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import shown
from kerasmem.units import format_count


class RowSource(ABC):
    """Rows of several columns, in an order that stays the same. Nothing stays open between two calls of `pieces`.

    Args:
        label: what messages call it.
        paths: the files and folders that are read.

    Attributes:
        fields: the columns.
        rows: how many rows there are.
        notes: what a user should know about the data.
        starts: the rows at which reading can begin without reading what comes before them; None for any row.
    """

    fields: tuple[Field, ...]
    rows: int
    starts: Sequence[int] | None = None

    def __init__(self, label: str, *paths: str) -> None:
        self.label, self.paths = label, paths
        self.notes: list[str] = []
        self._losses: Counter[str] = Counter()

    @property
    def losses(self) -> Counter[str]:
        """Number of images or values read so far that lost something, by the note about it."""
        return self._losses

    def identity(self) -> list[Any]:
        """Return name, size and time of change of the file, to recognize the same data."""
        found = os.stat(self.paths[0])
        return [os.path.abspath(self.paths[0]), found.st_size, found.st_mtime_ns]

    @abstractmethod
    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield rows from `start` on, `rows` at a time at most.

        Args:
            start: first row.
            rows: the most rows of a piece.
        """

    def part(self, start: int, stop: int) -> RowSource:
        """Return some of the rows alone, as a source that can be sent to another process."""
        return _Part(self, start, stop)


class _Part(RowSource):
    def __init__(self, source: RowSource, start: int, stop: int) -> None:
        super().__init__(source.label, *source.paths)
        self.fields, self.rows = source.fields, stop - start
        self._source, self._start = source, start

    @property
    def losses(self) -> Counter[str]:
        """How many images lost something, of the whole source as far as it was read here."""
        return self._source.losses

    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield rows."""
        left = self.rows - start
        with contextlib.closing(self._source.pieces(self._start + start, rows)) as pieces:  # type: ignore[type-var]
            while left > 0:
                piece = next(pieces)
                yield {name: values[:left] for name, values in piece.items()}
                left -= rows_in(piece)


def even_pieces(pieces: Iterator[Rows], rows: int) -> Iterator[Rows]:
    """Yield pieces of exactly `rows` rows, but for the last."""
    held: list[Rows] = []
    count = 0
    for piece in pieces:
        length = rows_in(piece)
        if not held and length == rows:
            yield piece
            continue
        at = 0
        while at < length:
            taken = min(rows - count, length - at)
            held.append({name: values[at : at + taken] for name, values in piece.items()})
            count += taken
            at += taken
            if count == rows:
                yield _concatenate(held)
                held, count = [], 0
    if held:
        yield _concatenate(held)


def rows_in(rows: Rows) -> int:
    """Return how many rows there are."""
    return len(next(iter(rows.values())))


def _concatenate(pieces: Sequence[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


class _CombinedSource(RowSource):
    def __init__(self, label: str, sources: Sequence[RowSource]) -> None:
        super().__init__(label, *(path for source in sources for path in source.paths))
        self.notes = list(dict.fromkeys(note for source in sources for note in source.notes))
        self._sources = list(sources)

    @property
    def losses(self) -> Counter[str]:
        """How many images lost something, of all sources."""
        return sum((source.losses for source in self._sources), Counter())

    def identity(self) -> list[Any]:
        """Return the identities of all sources."""
        return [source.identity() for source in self._sources]

    def _with_files(self, note: str) -> str:
        """Return a note with the first file that it is about, and the number of the others."""
        labels = [source.label for source in self._sources if note in source.notes]
        more = f" and {format_count(len(labels) - 1, 'more file')}" if len(labels) > 1 else ""
        return f"{labels[0]}{more}: {note}"


class ConcatenatedSource(_CombinedSource):
    """Sources with the same columns, one after another.

    Raises:
        DataError: they differ in row shape, type or class names.
    """

    def __init__(self, sources: Sequence[RowSource]) -> None:
        first = sources[0]
        super().__init__(f"{first.label} and {len(sources) - 1:,} more", sources)
        self.rows = sum(source.rows for source in sources)
        self.notes = [self._with_files(note) for note in self.notes]
        self.fields = first.fields
        for other in sources[1:]:
            by_name = {field.name: field for field in other.fields}
            for field in first.fields:
                found = by_name[field.name]
                for what, one, two in (
                    ("rows of shape", field.shape, found.shape),
                    ("the type", np.dtype(field.dtype).name, np.dtype(found.dtype).name),
                    ("the class names", field.class_names, found.class_names),
                ):
                    if one != two:
                        one, two = _short(one), _short(two)
                        raise DataError(
                            f"{other.label}: {shown(field.name)} has {what} {two}, and in {first.label} {one}"
                        )

    @property
    def starts(self) -> Sequence[int] | None:  # type: ignore[override]
        """First rows of pieces that can be read alone, or None for any row."""
        if all(source.starts is None for source in self._sources):
            return None
        return [at + start for at, source in self._placed() for start in source.starts or (0,)]

    def part(self, start: int, stop: int) -> RowSource:
        """Return some of the rows: of the sources that have them."""
        found = []
        for at, source in self._placed():
            first, last = max(start - at, 0), min(stop - at, source.rows)
            if first < last:
                found.append(source if last - first == source.rows else source.part(first, last))
        return found[0] if len(found) == 1 else ConcatenatedSource(found)

    def _placed(self) -> Iterator[tuple[int, RowSource]]:
        """Yield each source with its first row."""
        return zip(itertools.accumulate([0, *(source.rows for source in self._sources)]), self._sources, strict=False)

    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield rows of one source after the other, all in the byte order of the first."""
        dtypes = {field.name: field.dtype for field in self.fields}
        for source in self._sources:
            if start >= source.rows:
                start -= source.rows
                continue
            for piece in source.pieces(start, rows):
                yield {name: values.astype(dtypes[name], copy=False) for name, values in piece.items()}
            start = 0


class SideBySideSource(_CombinedSource):
    """Sources with different columns and equally many rows, side by side.

    Raises:
        DataError: they differ in their number of rows, or share a column.
    """

    def __init__(self, sources: Sequence[RowSource]) -> None:
        super().__init__(", ".join(source.label for source in sources), sources)
        self.fields = tuple(field for source in sources for field in source.fields)
        self.rows = sources[0].rows
        if len({source.rows for source in sources}) > 1:
            counts = ", ".join(f"{source.label} has {source.rows:,}" for source in sources)
            raise DataError(f"the sources differ in their number of rows: {counts}")
        check_names(self.fields, self.label)

    @property
    def starts(self) -> Sequence[int] | None:  # type: ignore[override]
        """First rows of pieces that can be read alone from all sources."""
        told = [set(source.starts) for source in self._sources if source.starts is not None]
        return sorted(set.intersection(*told)) if told else None

    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield rows of all sources at once."""
        streams = [even_pieces(source.pieces(start, rows), rows) for source in self._sources]
        for parts in zip(*streams, strict=True):
            yield {name: values for part in parts for name, values in part.items()}


def combine(sources: Sequence[RowSource]) -> RowSource:
    """Return several sources as one.

    Raises:
        DataError: they do not fit together.
    """
    groups: dict[frozenset[str], list[RowSource]] = {}
    for source in sources:
        groups.setdefault(frozenset(field.name for field in source.fields), []).append(source)
    joined = [ConcatenatedSource(group) if len(group) > 1 else group[0] for group in groups.values()]
    if len(joined) == 1:
        check_names(joined[0].fields, joined[0].label)
        return joined[0]
    counts = Counter(name for group in groups for name in group)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        both = f"{joined[0].label} and {joined[1].label}: both have {shown(twice)}, and their other columns differ"
        raise DataError(
            f"{both}; sources must have the same columns (one after another) or none in common (side by side)"
        )
    return SideBySideSource(joined)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else text[:199] + "…"
