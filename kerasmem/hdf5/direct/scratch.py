"""Buffers that belong to one thread and stay in the processor's cache."""

from __future__ import annotations

import numpy as np

from kerasmem.units import KIB

PIECE_BYTES = 256 * KIB  # read at a time where rows change on their way: they stay in the processor's cache
PIECE_VALUES = 32 * KIB  # converted at a time
SCATTER_BYTES = KIB  # rows of this size on are scattered by the kernel, smaller ones by NumPy


class Scratch:
    """Named byte buffers, each as large as the most that was asked of it so far."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, name: str, size: int) -> np.ndarray:
        """Return `size` bytes, those returned for `name` before included."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size]
