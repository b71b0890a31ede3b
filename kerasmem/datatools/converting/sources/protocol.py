"""What every kind of source looks like to a conversion: columns, a number of rows, and pieces from any place on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from kerasmem.datatools.converting.fields import Field, Piece


class RowSource(Protocol):
    """Rows of several columns, in an order that stays the same."""

    label: str
    fields: tuple[Field, ...]
    rows: int
    paths: tuple[str, ...]
    notes: list[str]

    def identity(self) -> list[Any]:
        """Return what tells whether this is still the same data: names, sizes, times of change."""

    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Piece]:
        """Yield rows from `start` on, `rows` at a time at most.

        Args:
            start: first row.
            rows: the most rows of a piece.
            names: columns wanted; None for all.
        """

    def close(self) -> None:
        """Close what is open."""


def even_pieces(pieces: Iterator[Piece], rows: int) -> Iterator[Piece]:
    """Yield pieces of exactly `rows` rows, but for the last."""
    held: list[Piece] = []
    count = 0
    for piece in pieces:
        length = _length(piece)
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
                yield _together(held)
                held, count = [], 0
    if held:
        yield _together(held)


def _together(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _length(piece: Piece) -> int:
    return len(next(iter(piece.values())))
