"""Rows that need no change: the kernel puts each where it is delivered, planned for a whole window at once.

What a row costs in Python is then nothing: where it lies and where it goes are computed with NumPy, and these numbers
are handed to `preadv` as they are, where `os.preadv` would want an object a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from kerasmem.hdf5.direct.delivery import Places
from kerasmem.hdf5.direct.handle import CAN_SCATTER, MOST_VIEWS, Handle, view_of
from kerasmem.hdf5.direct.scratch import SCATTER_BYTES

_SHARE_BYTES = 4 << 20  # what a thread takes on at a time


def can_scatter(row_bytes: int) -> bool:
    """Return whether rows of so many bytes are worth reading this way, and whether this system can."""
    return CAN_SCATTER and row_bytes >= SCATTER_BYTES


class ScatterRead:
    """Rows of one file into a window, in shares for any number of threads.

    Args:
        offsets: (rows,) int64, where in the file each row begins.
        places: where in the window each goes.
        target: the window's array, (rows of the window, …), C-contiguous and of the type that is stored.
    """

    def __init__(self, offsets: np.ndarray, places: Places, target: np.ndarray) -> None:
        self._offsets = offsets
        self._places = places
        self._target = target
        self._size = target[0].nbytes
        share = max(1, _SHARE_BYTES // self._size)
        # One view is enough for any number of rows that stay in order.
        self._firsts, self._lasts = _pieces(offsets, self._size, share if isinstance(places, slice) else MOST_VIEWS)
        # A share begins where a multiple of so many rows is passed.
        cuts = np.flatnonzero(np.diff(self._firsts // share, prepend=-1))
        self._cuts = [*cuts.tolist(), len(self._firsts)]

    def shares(self) -> Iterator[tuple[int, int]]:
        """Return the parts that threads take on: first row, and row after the last, of those planned."""
        for low, high in itertools.pairwise(self._cuts):
            yield int(self._firsts[low]), int(self._lasts[high - 1])

    def read(self, handle: Handle, share: tuple[int, int]) -> None:
        """Read the rows of a share.

        Raises:
            EOFError: the file ends before that.
            OSError: it cannot be read.
        """
        first, last = share
        low, high = np.searchsorted(self._firsts, share).tolist()
        starts, ends = self._firsts[low:high], self._lasts[low:high]
        offsets, size = self._offsets[starts].tolist(), self._size
        if isinstance(self._places, slice):
            window, before = view_of(self._target), self._places.start
            for start, end, offset in zip(starts.tolist(), ends.tolist(), offsets, strict=True):
                handle.read([window[(before + start) * size : (before + end) * size]], offset, (end - start) * size)
            return
        vectors = np.empty((last - first, 2), np.uintp)
        vectors[:, 0] = self._places[first:last]
        vectors[:, 0] *= size
        vectors[:, 0] += self._target.ctypes.data
        vectors[:, 1] = size
        pieces = zip((starts - first).tolist(), (ends - starts).tolist(), offsets, strict=True)
        handle.scatter(self._target, vectors, pieces, size)


def _pieces(offsets: np.ndarray, size: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row, and the row after the last, of each piece of at most so many without a gap in the file."""
    bounds = np.r_[0, np.flatnonzero(np.diff(offsets) != size) + 1, len(offsets)]
    counts = np.diff(bounds)
    parts = -(-counts // most)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of a piece within its run
    firsts = np.repeat(bounds[:-1], parts) + number * most
    return firsts, np.minimum(firsts + most, np.repeat(bounds[1:], parts))
