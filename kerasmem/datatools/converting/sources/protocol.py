"""What every kind of source looks like to a conversion: columns, a number of rows, and pieces from any row on."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kerasmem.datatools.converting.fields import Field, Piece


class RowSource(ABC):
    """Rows of several columns, in an order that stays the same. Nothing stays open between two calls of `pieces`.

    Args:
        label: what messages call it.
        paths: the files and folders that are read.

    Attributes:
        fields: the columns.
        rows: how many rows there are.
        notes: what a user should know about the data.
    """

    fields: tuple[Field, ...]
    rows: int

    def __init__(self, label: str, *paths: str) -> None:
        self.label, self.paths = label, paths
        self.notes: list[str] = []

    def identity(self) -> list[Any]:
        """Return what tells whether this is still the same data: name, size and time of change of the file."""
        found = os.stat(self.paths[0])
        return [os.path.abspath(self.paths[0]), found.st_size, found.st_mtime_ns]

    @abstractmethod
    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Piece]:
        """Yield rows from `start` on, `rows` at a time at most.

        Args:
            start: first row.
            rows: the most rows of a piece.
            names: columns wanted; None for all.
        """


def even_pieces(pieces: Iterator[Piece], rows: int) -> Iterator[Piece]:
    """Yield pieces of exactly `rows` rows, but for the last."""
    held: list[Piece] = []
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


def rows_in(piece: Piece) -> int:
    """Return how many rows a piece has."""
    return len(next(iter(piece.values())))


def _concatenate(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
