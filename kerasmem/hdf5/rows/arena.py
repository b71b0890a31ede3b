"""Memory for windows and batches that is used again as soon as nobody holds an array in it."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from math import prod

import numpy as np

_ALIGNED = 64  # bytes; TensorFlow takes over arrays that begin so, and copies others
_HUGE = 4 << 20  # from here on pages of 2 MiB are worth asking for


class Arena:
    """Hands out sets of arrays, each set in one piece of memory, and takes the memory back by itself.

    The arrays of a set, and all views of them, keep their set's memory; once the last of them has gone,
    whoever held it, the memory is free for the next set. So nothing that was handed out is ever overwritten.

    Args:
        shapes: row shape and type of each array of a set.
        rows: the most rows a set has.
        keep: pieces of memory kept for use again.
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
        # Filled, without the lock, by whichever thread happens to let go of an array or to collect garbage.
        self.free: deque[mmap.mmap] = deque()
        self._made = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all memory in use or kept."""
        with self._lock:
            self._drop_surplus()
            return self._made * self._size

    @property
    def idle(self) -> bool:
        """Whether a set fits into the memory kept."""
        return bool(self.free) or self._made < self._keep

    def take(self, rows: int) -> list[np.ndarray]:
        """Return one uninitialised array of `rows` rows a shape."""
        with self._lock:
            memory = self.free.pop() if self.free else self._map()
            self._drop_surplus()
        lease = np.frombuffer(memory, np.uint8)  # all views refer to this one, the first array there is
        weakref.finalize(lease, _give_back, weakref.ref(self), memory).atexit = False
        arrays = []
        for (shape, dtype), offset in zip(self._shapes, self._offsets, strict=False):
            size = rows * prod(shape) * np.dtype(dtype).itemsize
            arrays.append(lease[offset : offset + size].view(dtype).reshape(rows, *shape))
        return arrays

    def clear(self) -> None:
        """Release all memory. Arrays still held go with their last holder."""
        with self._lock:
            self._keep = 0
            self._drop_surplus()

    def _drop_surplus(self) -> None:
        while self._made > self._keep and self.free:
            self.free.pop()
            self._made -= 1

    def _map(self) -> mmap.mmap:
        memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self._size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._made += 1
        return memory


def _give_back(whose: weakref.ref[Arena], memory: mmap.mmap) -> None:
    arena = whose()
    if arena is not None:
        arena.free.append(memory)
