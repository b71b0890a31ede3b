"""Draw the parts of rows, and shuffle rows on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np

from kerasmem.datatools.fields import Field, Rows
from kerasmem.datatools.planning import share_out

_DRAW, _BUCKETS, _PLACES = 1, 2, 3  # which of the random streams
_MOST_DRAWN = 10**9  # rows from which NumPy draws; of more, each piece gets its exact share
_COPY_BYTES = 1 << 20  # put in order and written at a time


class RandomSplit:
    """Draw the part of each row at random, without replacement, so that shares are exact.

    Args:
        rows: of each part.
        seed: of the draw.
    """

    def __init__(self, rows: Sequence[int], seed: int) -> None:
        self._left, self._seed = np.array(rows, np.int64), seed

    def deal(self, piece: int, rows: int) -> np.ndarray:
        """Return the number of the part of each row of the next piece.

        Args:
            piece: its number; pieces are dealt in order.
            rows: its rows.
        """
        rng = np.random.default_rng((self._seed, _DRAW, piece))
        taken = _draw(rng, self._left, rows)
        self._left -= taken
        parts = np.repeat(np.arange(len(taken), dtype=np.uint8), taken)
        rng.shuffle(parts)
        return parts


def _draw(rng: np.random.Generator, left: np.ndarray, count: int) -> np.ndarray:
    """Return how many of `count` rows go to each part."""
    total = int(left.sum())
    if total < _MOST_DRAWN:
        return rng.multivariate_hypergeometric(left, count, method="marginals")
    return np.array(share_out(count, (left / total).tolist()), np.int64)


class BucketFile:
    """Shuffle rows on disk: each goes to a random bucket, and each bucket is shuffled in memory.

    That is sorting all rows by random numbers, whose first digits are the bucket and whose others are the place in it.
    Every order of all rows is equally likely, whatever the memory (Rao, 1961; Sandelius, 1962).

    Args:
        file: a temporary file. It becomes a list of runs: rows as they came, sorted by bucket.
        fields: the datasets.
        buckets: the number of buckets of each part; parts have buckets of their own.
        run_rows: rows that are sorted and written together.
        seed: of the order.
    """

    def __init__(
        self, file: BinaryIO, fields: Sequence[Field], buckets: Sequence[int], run_rows: int, seed: int
    ) -> None:
        self._file, self._names, self._seed = file, [field.name for field in fields], seed
        record = [(field.name, field.dtype, field.shape) for field in fields]
        self._rows = np.empty(run_rows, record)
        self._keys = np.empty(run_rows, np.int32)
        self._filled = 0
        self._counts: list[np.ndarray] = []  # rows of each bucket, by run
        self._buckets = np.array(buckets)
        self._first = np.cumsum([0, *buckets[:-1]])

    def add(self, piece: int, rows: Rows, parts: np.ndarray) -> None:
        """Deal the rows of a piece to buckets.

        Args:
            piece: its number.
            rows: its rows.
            parts: the number of the part of each.
        """
        if self._filled + len(parts) > len(self._rows):
            self._flush()
        some = slice(self._filled, self._filled + len(parts))
        for name in self._names:
            self._rows[name][some] = rows[name]
        drawn = np.random.default_rng((self._seed, _BUCKETS, piece)).integers(0, self._buckets[parts])
        self._keys[some] = self._first[parts] + drawn
        self._filled = some.stop

    def shuffled(self, rows: int) -> Iterator[tuple[int, Rows]]:
        """Yield the part and the rows of each bucket in random order, `rows` at a time."""
        self._flush()
        record = self._rows.dtype
        self._rows, self._keys = self._rows[:0].copy(), self._keys[:0].copy()
        counts = np.array(self._counts, np.int64)
        starts = (np.cumsum(counts, axis=None).reshape(counts.shape) - counts) * record.itemsize
        part_of = np.repeat(np.arange(len(self._buckets)), self._buckets).tolist()
        for bucket, part in enumerate(part_of):
            found = np.empty(int(counts[:, bucket].sum()), record)
            done = 0
            for start, count in zip(starts[:, bucket].tolist(), counts[:, bucket].tolist(), strict=True):
                self._read(found[done : done + count], start)
                done += count
            order = np.random.default_rng((self._seed, _PLACES, bucket)).permutation(len(found))
            for at in range(0, len(found), rows):
                some = found[order[at : at + rows]]
                yield part, {name: some[name] for name in self._names}

    def _flush(self) -> None:
        """Write the run that is being filled."""
        keys = self._keys[: self._filled]
        order = np.argsort(keys, kind="stable")
        step = max(1, _COPY_BYTES // self._rows.dtype.itemsize)
        for first in range(0, self._filled, step):
            self._file.write(self._rows[order[first : first + step]].view(np.uint8).data)
        self._counts.append(np.bincount(keys, minlength=int(self._buckets.sum())))
        self._filled = 0

    def _read(self, rows: np.ndarray, start: int) -> None:
        self._file.seek(start)
        if self._file.readinto(rows.view(np.uint8).data) != rows.nbytes:  # type: ignore[attr-defined]
            raise OSError("a temporary file of the conversion was cut off")
