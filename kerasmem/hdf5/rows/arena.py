"""Memory for windows and batches that is reused once its arrays are garbage-collected."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from math import prod

import numpy as np

_ALIGNED = 64  # bytes; TensorFlow copies arrays with a smaller alignment
_HUGE = 4 << 20  # smallest size for pages of 2 MiB


class Arena:
    """Allocates sets of arrays, each set in one piece of memory that is reused automatically.

    The arrays of a set and their views keep its memory alive. When the last one is garbage-collected, the memory
    becomes free for the next set. So no array in use is ever overwritten.

    Args:
        shapes: row shape and dtype of each array of a set.
        rows: maximum number of rows of a set.
        keep: number of pieces of memory kept for reuse.
    """

    def __init__(self, shapes: Sequence[tuple[tuple[int, ...], str]], rows: int, keep: int) -> None:
        self._shapes = tuple(shapes)
        self._keep = keep
        self._offsets = [0]
        for shape, dtype in self._shapes:
            size = rows * prod(shape) * np.dtype(dtype).itemsize
            self._offsets.append(-(-(self._offsets[-1] + size) // _ALIGNED) * _ALIGNED)
        self._size = max(self._offsets[-1], 1)
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._in_use: dict[int, tuple[weakref.ref[np.ndarray], mmap.mmap]] = {}  # by ID of the reference
        # Filled without the lock by any thread that collects garbage. The references call `append` themselves: Ctrl-C
        # within a callback written in Python would be reported as ignored, and lost.
        self._released: deque[weakref.ref[np.ndarray]] = deque()
        self._allocated = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use or kept for reuse."""
        with self._lock:
            self._reclaim()
            return self._allocated * self._size

    @property
    def idle(self) -> bool:
        """Whether the next set needs no memory beyond that kept for reuse."""
        return bool(self._free or self._released) or self._allocated < self._keep

    def take(self, rows: int) -> list[np.ndarray]:
        """Return a set of uninitialised arrays with `rows` rows."""
        with self._lock:
            self._reclaim(wanted=1)
            memory = self._free.pop() if self._free else self._map()
            base = np.frombuffer(memory, np.uint8)  # the base of all views
            reference = weakref.ref(base, self._released.append)
            self._in_use[id(reference)] = reference, memory
        arrays = []
        for (shape, dtype), offset in zip(self._shapes, self._offsets, strict=False):
            size = rows * prod(shape) * np.dtype(dtype).itemsize
            arrays.append(base[offset : offset + size].view(dtype).reshape(rows, *shape))
        return arrays

    def clear(self) -> None:
        """Free all memory. Arrays in use keep theirs until they are garbage-collected."""
        with self._lock:
            self._keep = 0
            self._reclaim()

    def _reclaim(self, wanted: int = 0) -> None:
        """Collect released memory, and free all but `keep` pieces and the `wanted` ones."""
        while self._released:
            self._free.append(self._in_use.pop(id(self._released.popleft()))[1])
        while self._allocated > self._keep and len(self._free) > wanted:
            self._free.pop()
            self._allocated -= 1

    def _map(self) -> mmap.mmap:
        memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self._size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # not supported by the kernel
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._allocated += 1
        return memory
