"""Rows sorted into buckets on disk, so that each bucket can be shuffled in memory: an external shuffle.

Every row goes to a bucket drawn at random, and the rows of a bucket are shuffled among themselves. That is sorting
all rows by random numbers, whose first digits are the bucket and whose others are the place in it: every order of
all rows is as likely as any other, whatever the memory (Rao, 1961; Sandelius, 1962).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kerasmem.datatools.converting.fields import Field, Rows
from kerasmem.datatools.converting.job import open_log, read_into, sync

_COPY_BYTES = 1 << 20  # put in order and written at a time


class BucketFile:
    """A file of runs: rows as they came, sorted by bucket. What is not flushed is lost with the process.

    Args:
        folder: where the file lies.
        fields: the datasets.
        buckets: how many there are.
        run_rows: rows that are sorted and written together.
        runs: runs to keep of a file that is there already; what follows them is cut off.
    """

    def __init__(self, folder: str, fields: Sequence[Field], buckets: int, run_rows: int, runs: int = 0) -> None:
        self.names = [field.name for field in fields]
        self.record = np.dtype([(f"f{number}", field.dtype, field.shape) for number, field in enumerate(fields)])
        self._index = open_log(folder, "buckets.index", runs * buckets * 4)
        kept = np.empty((runs, buckets), np.int32)
        read_into(self._index, kept, 0)
        self._counts = list(kept)
        self._data = open_log(folder, "buckets", int(kept.sum(dtype=np.int64)) * self.record.itemsize)
        self._rows = np.empty(run_rows, self.record)
        self._keys = np.empty(run_rows, np.int32)
        self._buckets, self._filled = buckets, 0

    @property
    def runs(self) -> int:
        """Runs written."""
        return len(self._counts)

    def has_room(self, rows: int) -> bool:
        """Return whether so many rows fit into the run that is being filled."""
        return self._filled + rows <= len(self._rows)

    def add(self, rows: Rows, buckets: np.ndarray) -> None:
        """Take rows, each with its bucket."""
        part = slice(self._filled, self._filled + len(buckets))
        for number, name in enumerate(self.names):
            self._rows[f"f{number}"][part] = rows[name]
        self._keys[part] = buckets
        self._filled = part.stop

    def flush(self) -> int:
        """Write the run that is being filled; return its bytes."""
        keys = self._keys[: self._filled]
        order = np.argsort(keys, kind="stable")
        step = max(1, _COPY_BYTES // self.record.itemsize)
        for first in range(0, self._filled, step):
            self._data.write(self._rows[order[first : first + step]].view(np.uint8).data)
        counts = np.bincount(keys, minlength=self._buckets).astype(np.int32)
        self._index.write(counts.data)
        self._counts.append(counts)
        self._filled = 0
        return len(keys) * self.record.itemsize

    def sync(self) -> None:
        """Have what is written reach the disk."""
        sync(self._data, self._index)

    def end_filling(self) -> None:
        """Write the last run and give the memory for runs back; from now on buckets are loaded."""
        if self._filled:
            self.flush()
        self._rows, self._keys = self._rows[:0].copy(), self._keys[:0].copy()
        counts = np.array(self._counts, np.int64).reshape(self.runs, self._buckets)
        self._starts = (np.cumsum(counts, axis=None).reshape(counts.shape) - counts) * self.record.itemsize
        self.bucket_rows = counts.sum(axis=0)

    def load(self, bucket: int) -> np.ndarray:
        """Return the rows of a bucket, in the order in which they came."""
        rows = np.empty(int(self.bucket_rows[bucket]), self.record)
        done = 0
        for start, counts in zip(self._starts[:, bucket].tolist(), self._counts, strict=True):
            count = int(counts[bucket])
            read_into(self._data, rows[done : done + count], start)
            done += count
        return rows

    def close(self) -> None:
        """Close the files."""
        self._data.close()
        self._index.close()
