"""Rows sorted into buckets on disk, so that each bucket can be shuffled in memory: an external shuffle.

Every row goes to a bucket drawn at random, and the rows of a bucket are shuffled among themselves. That is sorting
all rows by random numbers, whose first digits are the bucket and whose others are the place in it: every order of
all rows is as likely as any other, whatever the memory (Rao, 1961; Sandelius, 1962).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from kerasmem.datatools.converting.fields import Field, Piece
from kerasmem.datatools.converting.raw_files import open_log, read_into, write_at

_COPY_BYTES = 1 << 20  # put in order and written at a time


class BucketFile:
    """A file of runs: rows as they came, sorted by bucket. What is not flushed is lost with the process.

    Args:
        folder: where the file lies.
        fields: the datasets.
        buckets: how many there are.
        run_bytes: bytes that are sorted and written together.
        runs: runs to keep of a file that is there already; what follows them is cut off.
    """

    def __init__(self, folder: str, fields: Sequence[Field], buckets: int, run_bytes: int, runs: int = 0) -> None:
        self.names = [field.name for field in fields]
        self.record = np.dtype([(f"f{number}", field.dtype, field.shape) for number, field in enumerate(fields)])
        self.buckets = buckets
        self._room = max(1, run_bytes // self.record.itemsize)
        self._rows: np.ndarray | None = None
        self._keys = np.empty(0, np.int32)
        self._filled = 0
        self._index = open_log(folder, "buckets.index", runs * buckets * 4)
        kept = np.empty((runs, buckets), np.int32)
        read_into(self._index, kept.reshape(-1).view(np.uint8).data, 0)
        self._counts = list(kept)
        self._size = int(kept.sum(dtype=np.int64)) * self.record.itemsize
        self._data = open_log(folder, "buckets", self._size)

    @property
    def runs(self) -> int:
        """Runs written."""
        return len(self._counts)

    def has_room(self, rows: int) -> bool:
        """Return whether so many rows fit into the run that is being filled."""
        return self._filled + rows <= self._room or not self._filled

    def add(self, piece: Piece, buckets: np.ndarray) -> None:
        """Take rows, each with its bucket."""
        rows = len(buckets)
        if self._rows is None or self._filled + rows > len(self._rows):
            assert not self._filled
            room = max(self._room, rows)
            self._rows, self._keys = np.empty(room, self.record), np.empty(room, np.int32)
        part = slice(self._filled, self._filled + rows)
        for number, name in enumerate(self.names):
            self._rows[f"f{number}"][part] = piece[name]
        self._keys[part] = buckets
        self._filled += rows

    def flush(self) -> int:
        """Write the run that is being filled; return its bytes."""
        if not self._filled:
            return 0
        assert self._rows is not None
        before = self._size
        keys = self._keys[: self._filled]
        order = np.argsort(keys, kind="stable")
        step = max(1, _COPY_BYTES // self.record.itemsize)
        for first in range(0, self._filled, step):
            self._size += write_at(self._data, self._rows[order[first : first + step]], self._size)
        counts = np.bincount(keys, minlength=self.buckets).astype(np.int32)
        write_at(self._index, counts, self.runs * self.buckets * 4)
        self._counts.append(counts)
        self._filled = 0
        return self._size - before

    def sync(self) -> None:
        """Have what is written reach the disk."""
        os.fdatasync(self._data)
        os.fdatasync(self._index)

    def end_filling(self) -> None:
        """Give the memory for runs back; from now on buckets are loaded."""
        self._rows, self._keys = None, np.empty(0, np.int32)
        counts = np.array(self._counts, np.int64).reshape(self.runs, self.buckets)
        before = np.cumsum(counts, axis=None).reshape(counts.shape) - counts
        self._starts = before * self.record.itemsize
        self._sizes = counts * self.record.itemsize
        self.bucket_rows = counts.sum(axis=0)

    def load(self, bucket: int) -> np.ndarray:
        """Return the rows of a bucket, in the order in which they came."""
        rows = np.empty(int(self.bucket_rows[bucket]), self.record)
        view = rows.view(np.uint8).reshape(-1).data
        at = 0
        for start, size in zip(self._starts[:, bucket].tolist(), self._sizes[:, bucket].tolist(), strict=True):
            read_into(self._data, view[at : at + size], start)
            at += size
        return rows

    def close(self) -> None:
        """Close the files."""
        os.close(self._data)
        os.close(self._index)
