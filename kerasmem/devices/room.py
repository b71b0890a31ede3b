"""How much TensorFlow's allocator may hand out in this process, as far as settings and the driver tell."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence

from kerasmem.devices.allocator import Allocator, tensorflow_allocator
from kerasmem.devices.catalogue import available_bytes
from kerasmem.devices.host import host_memory
from kerasmem.devices.kernels import CardKernels, CpuKernels, cpu_kernels
from kerasmem.devices.live import list_devices
from kerasmem.devices.tracked_devices import cpu_uses_bfc
from kerasmem.units import MIB

_FIRST_REGION = 2 * MIB  # of TensorFlow's allocator where it grows


def allocator_limit() -> int | None:
    """Return the bytes that the allocator of the first GPU, or of the CPU if there is none, may hand out.

    On a GPU for which TensorFlow was given no limit it is what the card has, also where other processes hold a part.
    None if unknown.
    """
    import tensorflow as tf

    cards = tf.config.list_physical_devices("GPU")
    if not cards:
        return _cpu_limit()
    configured = tf.config.get_logical_device_configuration(cards[0])
    if configured and configured[0].memory_limit:
        return int(configured[0].memory_limit) * MIB
    first = next((each for each in list_devices() if each.cuda_index == 0), None)
    if first is None or first.total_bytes is None:
        return None
    return available_bytes(first.total_bytes, first.capability)


def room_for_training() -> int:
    """Return the bytes that training may take here: the allocator's limit, or the host's free memory."""
    limit = allocator_limit()
    return host_memory().available_bytes if limit is None else limit


def kernels_here() -> CpuKernels | CardKernels:
    """Return the kernels for training in this process: the first GPU's, or the CPU's."""
    import tensorflow as tf

    cards = tf.config.get_visible_devices("GPU")
    capability = tf.config.experimental.get_device_details(cards[0]).get("compute_capability") if cards else None
    return cpu_kernels() if capability is None else CardKernels(capability, room_for_training(), cpu_kernels())


def cpu_allocator_room() -> int | None:
    """Return the bytes left to TensorFlow's CPU allocator, or None if the environment sets no limit."""
    limit = _cpu_limit()
    return None if limit is None else limit - tensorflow_allocator("CPU:0").read().in_use_bytes


def _cpu_limit() -> int | None:
    text = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", "")
    return int(text) * MIB if text.isdecimal() and cpu_uses_bfc() else None


def in_use_reader() -> Callable[[], int]:
    """Return a function for the bytes in use of the first GPU's or the CPU's allocator, 0 if unknown."""
    allocator = _first_allocator()
    return (lambda: 0) if allocator is None else (lambda: allocator.read().in_use_bytes)


@functools.cache
def reserve_in_one_piece() -> None:
    """Have TensorFlow's allocator for the CPU take the memory up to its limit as one region, if it has a limit.

    A card's allocator does so, or gives free regions back when it runs out. The CPU's does neither: it doubles its
    regions as it grows, so that after a step that ran out no tensor larger than the largest of them fits any more.
    Nothing is written, so the host's memory is not taken. It is done once in a process, and the allocator's peak begins
    again then, for what was asked for is no step's.
    """
    import tensorflow as tf

    limit = None if tf.config.list_physical_devices("GPU") else _cpu_limit()
    allocator = None if limit is None else _first_allocator()
    if limit is None or allocator is None:
        return
    # Growing, it has reserved up to three times what was in use at most: regions double, and are not filled.
    free = limit - 3 * allocator.read().peak_bytes - _FIRST_REGION
    if free > limit // 4:
        with tf.device("CPU:0"), contextlib.suppress(tf.errors.ResourceExhaustedError):
            tf.raw_ops.Empty(shape=[free // 16], dtype=tf.complex128)
        allocator.reset()


def fits_on_the_cpu(sizes: Sequence[int]) -> bool:
    """Return whether TensorFlow's CPU allocator has pieces of these sizes (True without a limit).

    It is asked for them, which takes ten seconds if it has not. TensorFlow does not ask before it copies an array,
    and ends the process.
    """
    import tensorflow as tf

    if _cpu_limit() is None:
        return True
    pieces = []
    with tf.device("CPU:0"):
        for size in sizes:
            try:
                pieces.append(tf.raw_ops.Empty(shape=[size], dtype=tf.uint8))
            except tf.errors.ResourceExhaustedError:
                return False
    return True


def _first_allocator() -> Allocator | None:
    import tensorflow as tf

    try:
        return tensorflow_allocator("GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0")
    except Exception:  # ValueError as a rule: the CPU's own allocator keeps no statistics
        return None
