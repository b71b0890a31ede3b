"""What TensorFlow's allocator has handed out, device by device (JAX's and PyTorch's: `other_allocators`).

TensorFlow tells Python two numbers for a device: the bytes in use now, and the largest that was in use
since the last reset (`tf.config.experimental.get_memory_info`). Bytes are counted as the allocator hands
them out: rounded up to 256, and whole chunks where a chunk is not split. What the allocator keeps
reserved beyond that is not told to Python anywhere, so it is None here.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kerasmem.compat.tensorflow_runtime import allocator_statistics


class AllocatorReading(NamedTuple):
    """One reading of a device's allocator, in bytes.

    Attributes:
        in_use_bytes: handed out now.
        peak_bytes: the largest handed out at once since the last reset.
        reserved_bytes: taken from the device, handed out or not; None where it is not known.
    """

    in_use_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None


class Allocator(ABC):
    """The allocator of one device. Objects that read the same statistics are equal."""

    device: str

    @abstractmethod
    def read(self) -> AllocatorReading:
        """Return what is in use, and the peak since the last reset."""

    @abstractmethod
    def reset(self) -> None:
        """Start a new peak from what is in use now."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Allocator) and type(self) is type(other) and self.device == other.device

    def __hash__(self) -> int:
        return hash((type(self), self.device))


class TensorFlowAllocator(Allocator):
    """TensorFlow's allocator on one logical device.

    Args:
        device: a logical device, such as "GPU:0" or "CPU:0".

    Raises:
        ValueError: TensorFlow has no such device, or no statistics of it.

    Examples:
        >>> import tensorflow as tf
        >>> allocator = TensorFlowAllocator("CPU:0")
        >>> kept = tf.zeros([1024, 1024])
        >>> allocator.read().in_use_bytes >= 4 * 1024 * 1024
        True
    """

    def __init__(self, device: str) -> None:
        import tensorflow as tf

        self.device = device
        self._info: Callable[[str], dict[str, int]] = tf.config.experimental.get_memory_info
        self._reset: Callable[[str], None] = tf.config.experimental.reset_memory_stats
        self.read()
        self._shorten()

    def read(self) -> AllocatorReading:
        """Return what is in use, and the peak since the last reset, in bytes."""
        told = self._info(self.device)
        return AllocatorReading(told["current"], told["peak"])

    def reset(self) -> None:
        """Start a new peak from what is in use now."""
        self._reset(self.device)

    def _shorten(self) -> None:
        """Call what TensorFlow's two functions call in the end; their way there takes longer after a training step."""
        with contextlib.suppress(Exception):  # nothing that TensorFlow promises; the public functions stay
            read, reset = allocator_statistics(self.device, AllocatorReading)
            if read().in_use_bytes >= 0:
                vars(self).update(read=read, reset=reset)


@dataclass(frozen=True)
class TrackedDevice:
    """A device to report on, and how.

    Attributes:
        name: the logical device, such as "GPU:0"; None where the backend names none.
        allocator: its allocator, or None where no statistics are to be had.
        ordinal: the CUDA ordinal of the GPU behind it; None for a CPU.
        card: the name of that GPU as CUDA gives it.
    """

    name: str | None
    allocator: Allocator | None = None
    ordinal: int | None = None
    card: str | None = None
