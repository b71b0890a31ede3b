"""Several sources as one: those with the same columns one after another, those with other columns side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kerasmem.datatools.converting.fields import Field, Piece, check_names
from kerasmem.datatools.converting.sources.protocol import RowSource, even_pieces
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import shown


class Stacked:
    """Sources with the same columns, one after another.

    Raises:
        DataError: they differ in row shape, type or class names.
    """

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = list(sources)
        first = sources[0]
        self.label = first.label if len(sources) == 1 else f"{first.label} and {len(sources) - 1:,} more"
        self.rows = sum(source.rows for source in sources)
        self.paths = tuple(path for source in sources for path in source.paths)
        self.notes = [note for source in sources for note in source.notes]
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
                            f"{_short(one)}; "
                            "sources with the same columns are read as one and have to agree"
                        )

    def identity(self) -> list[Any]:
        """Return what tells whether this is still the same data."""
        return [source.identity() for source in self._sources]

    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Piece]:
        """Yield rows of one source after the other."""
        for source in self._sources:
            if start >= source.rows:
                start -= source.rows
                continue
            for piece in source.pieces(start, rows, names):
                # files may differ in byte order
                yield {
                    field.name: piece[field.name].astype(field.dtype, copy=False)
                    for field in self.fields
                    if field.name in piece
                }
            start = 0

    def close(self) -> None:
        """Close what is open."""
        for source in self._sources:
            source.close()


class Beside:
    """Sources with different columns and equally many rows, side by side.

    Raises:
        DataError: they differ in their number of rows, or share a column.
    """

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = list(sources)
        self.label = ", ".join(source.label for source in sources)
        self.fields = tuple(field for source in sources for field in source.fields)
        self.rows = sources[0].rows
        self.paths = tuple(path for source in sources for path in source.paths)
        self.notes = [note for source in sources for note in source.notes]
        if len({source.rows for source in sources}) > 1:
            counts = ", ".join(f"{source.label} has {source.rows:,}" for source in sources)
            raise DataError(
                f"the sources differ in their number of rows: {counts}; rows that belong together are needed"
            )
        check_names(self.fields, self.label)

    def identity(self) -> list[Any]:
        """Return what tells whether this is still the same data."""
        return [source.identity() for source in self._sources]

    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Piece]:
        """Yield rows of all sources at once."""
        wanted = None if names is None else set(names)
        streams = []
        for source in self._sources:
            own = [field.name for field in source.fields if wanted is None or field.name in wanted]
            if own:
                streams.append(even_pieces(source.pieces(start, rows, own), rows))
        for parts in zip(*streams, strict=True):
            yield {name: values for part in parts for name, values in part.items()}

    def close(self) -> None:
        """Close what is open."""
        for source in self._sources:
            source.close()


def combine(sources: Sequence[RowSource]) -> RowSource:
    """Return several sources as one.

    Raises:
        DataError: they do not fit together.
    """
    groups: dict[frozenset[str], list[RowSource]] = {}
    for source in sources:
        groups.setdefault(frozenset(field.name for field in source.fields), []).append(source)
    stacked: list[RowSource] = [Stacked(group) if len(group) > 1 else group[0] for group in groups.values()]
    if len(stacked) == 1:
        check_names(stacked[0].fields, stacked[0].label)
        return stacked[0]
    names = [name for group in groups for name in group]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(
            f"{stacked[0].label} and {stacked[1].label}: both have {shown(twice)}, and their other columns differ; "
            "sources "
            "have to have the same columns (to be read one after another) or none in common (side by side)"
        )
    return Beside(stacked)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else text[:199] + "…"


def field_of(fields: Sequence[Field], name: str) -> Field | None:
    """Return the column of a name, or None."""
    return next((field for field in fields if field.name == name), None)
