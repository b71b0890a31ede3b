"""Bytes that TensorFlow's or JAX's allocator has handed out on a device.

TensorFlow tells Python two numbers for a device: the bytes in use now, and the largest that was in use
since the last reset (`tf.config.experimental.get_memory_info`). Bytes are counted as the allocator hands
them out: rounded up to 256, and whole chunks where a chunk is not split. What the allocator keeps
reserved beyond that is not told to Python anywhere, so it is None here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kerasmem.compat.tensorflow_runtime import allocator_statistics


class AllocatorReading(NamedTuple):
    """One reading of a device's allocator, in bytes.

    Attributes:
        in_use_bytes: handed out now.
        peak_bytes: the largest handed out at once since the last reset.
        reserved_bytes: taken from the device, handed out or not; None if unknown.
    """

    in_use_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None


@dataclass(frozen=True)
class Allocator:
    """The allocator of one device. Two that read the same statistics are equal.

    Attributes:
        device: such as "GPU:0".
        read: returns the bytes in use, and the peak since the last reset.
        reset: starts a new peak from the bytes in use; raises if the backend cannot.
        backend: whose it is: "tensorflow" or "jax".
    """

    device: str
    read: Callable[[], AllocatorReading] = field(compare=False, repr=False)
    reset: Callable[[], None] = field(compare=False, repr=False)
    backend: str = "tensorflow"


def tensorflow_allocator(device: str) -> Allocator:
    """Return TensorFlow's allocator on one logical device.

    Args:
        device: a logical device, such as "GPU:0" or "CPU:0".

    Raises:
        ValueError: If TensorFlow has no such device, or no statistics of it.

    Examples:
        >>> import tensorflow as tf
        >>> allocator = tensorflow_allocator("CPU:0")
        >>> kept = tf.zeros([1024, 1024])
        >>> allocator.read().in_use_bytes >= 4 * 1024 * 1024
        True
    """
    import tensorflow as tf

    def read() -> AllocatorReading:
        told = tf.config.experimental.get_memory_info(device)
        return AllocatorReading(told["current"], told["peak"])

    read()
    with contextlib.suppress(Exception):  # nothing that TensorFlow promises; the public functions stay
        # What TensorFlow's two functions call in the end; their way there takes longer after a training step.
        short = allocator_statistics(device, AllocatorReading)
        if short[0]().in_use_bytes >= 0:
            return Allocator(device, *short)
    return Allocator(device, read, functools.partial(tf.config.experimental.reset_memory_stats, device))


def jax_allocator(name: str, source: Any) -> Allocator:
    """Return JAX's allocator on one device. Its peak dates from the start of the process, as JAX cannot reset it.

    Args:
        name: name of the device here, such as "GPU:0".
        source: a JAX device.

    Raises:
        ValueError: If JAX keeps no statistics of it.

    Examples:
        >>> class Device:
        ...     def memory_stats(self):
        ...         return {"bytes_in_use": 256, "peak_bytes_in_use": 1024, "pool_bytes": 2048}
        >>> jax_allocator("GPU:0", Device()).read()
        AllocatorReading(in_use_bytes=256, peak_bytes=1024, reserved_bytes=2048)
    """
    if not {"bytes_in_use", "peak_bytes_in_use"} <= set(source.memory_stats() or ()):
        raise ValueError("JAX keeps no statistics of its allocator there")

    def read() -> AllocatorReading:
        told = source.memory_stats()
        return AllocatorReading(told["bytes_in_use"], told["peak_bytes_in_use"], told.get("pool_bytes"))

    def reset() -> None:
        raise NotImplementedError("JAX cannot reset an allocator's peak")

    return Allocator(name, read, reset, "jax")


@dataclass(frozen=True)
class TrackedDevice:
    """A device to report on, and how.

    Attributes:
        name: the logical device, such as "GPU:0"; None if the backend names none.
        allocator: its allocator, or None if no statistics are to be had.
        ordinal: the CUDA ordinal of the GPU behind it; None for a CPU.
        card: the name of that GPU as CUDA gives it.
    """

    name: str | None
    allocator: Allocator | None = None
    ordinal: int | None = None
    card: str | None = None
