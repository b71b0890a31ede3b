"""Several sources as one: those with the same columns one after another, those with other columns side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kerasmem.datatools.converting.fields import Piece, check_names
from kerasmem.datatools.converting.sources.protocol import RowSource, even_pieces
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import shown


class _CombinedSource(RowSource):
    def __init__(self, label: str, sources: Sequence[RowSource]) -> None:
        super().__init__(label, *(path for source in sources for path in source.paths))
        self.notes = [note for source in sources for note in source.notes]
        self._sources = list(sources)

    def identity(self) -> list[Any]:
        """Return the identities of all sources."""
        return [source.identity() for source in self._sources]


class ConcatenatedSource(_CombinedSource):
    """Sources with the same columns, one after another.

    Raises:
        DataError: they differ in row shape, type or class names.
    """

    def __init__(self, sources: Sequence[RowSource]) -> None:
        first = sources[0]
        super().__init__(f"{first.label} and {len(sources) - 1:,} more", sources)
        self.rows = sum(source.rows for source in sources)
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
                        raise DataError(
                            f"{other.label}: {shown(field.name)} has {what} {_short(two)}, and in {first.label} "
                            f"{_short(one)}; sources with the same columns are read as one and have to agree"
                        )

    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Piece]:
        """Yield rows of one source after the other, all in the byte order of the first."""
        dtypes = {field.name: field.dtype for field in self.fields}
        for source in self._sources:
            if start >= source.rows:
                start -= source.rows
                continue
            for piece in source.pieces(start, rows, names):
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
            raise DataError(
                f"the sources differ in their number of rows: {counts}; rows that belong together are needed"
            )
        check_names(self.fields, self.label)

    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Piece]:
        """Yield rows of all sources at once."""
        streams = []
        for source in self._sources:
            own = [field.name for field in source.fields if names is None or field.name in names]
            if own:
                streams.append(even_pieces(source.pieces(start, rows, own), rows))
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
    names = [name for group in groups for name in group]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(
            f"{joined[0].label} and {joined[1].label}: both have {shown(twice)}, and their other columns differ; "
            "sources have to have the same columns (to be read one after another) or none in common (side by side)"
        )
    return SideBySideSource(joined)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else text[:199] + "…"
