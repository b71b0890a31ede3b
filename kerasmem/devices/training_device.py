"""The device that TensorFlow trains on in this process: the limit of its allocator, bytes in use, kernels."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

from kerasmem.devices.catalogue import available_on_device
from kerasmem.devices.host import host_memory
from kerasmem.devices.kernels import CardKernels, CpuKernels, cpu_kernels
from kerasmem.devices.machine import find_device
from kerasmem.devices.tracked_devices import Allocator, cards_behind, cpu_uses_bfc, tensorflow_allocator
from kerasmem.units import MIB

_FIRST_REGION = 2 * MIB  # of TensorFlow's allocator where it grows


def allocator_limit() -> int | None:
    """Return the bytes that the allocator of the first visible GPU, or of the CPU if there is none, may hand out.

    Without a limit set for it, a GPU's allocator gets the card's memory less the CUDA context and TensorFlow's
    reserve; other processes are not subtracted. None if unknown.
    """
    import tensorflow as tf

    gpu = _first_gpu()
    if gpu is None:
        return _cpu_allocator_limit()
    configured = tf.config.get_logical_device_configuration(gpu)
    if configured and configured[0].memory_limit:
        return int(configured[0].memory_limit) * MIB
    ordinal, name = cards_behind(tf)["GPU:0"]
    device = find_device(ordinal, name)
    if device is None or device.total_bytes is None:
        return None
    if device.capability is None:
        return device.total_bytes
    return available_on_device(device.total_bytes, device.name or "", device.capability)


def training_memory() -> int:
    """Return the bytes that training may take: the allocator's limit, or the host's available memory."""
    limit = allocator_limit()
    return host_memory().available_bytes if limit is None else limit


def training_kernels() -> CpuKernels | CardKernels:
    """Return the kernels for training in this process: the first visible GPU's, or the CPU's."""
    import tensorflow as tf

    gpu = _first_gpu()
    capability = None if gpu is None else tf.config.experimental.get_device_details(gpu).get("compute_capability")
    return cpu_kernels() if capability is None else CardKernels(capability, training_memory(), cpu_kernels())


def _first_gpu() -> Any:
    """Return the first GPU that TensorFlow may use, or None."""
    import tensorflow as tf

    return next(iter(tf.config.get_visible_devices("GPU")), None)


def _cpu_allocator_limit() -> int | None:
    text = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", "")
    return int(text) * MIB if text.isdecimal() and cpu_uses_bfc() else None


@functools.cache
def reserve_in_one_piece() -> None:
    """Have TensorFlow's allocator for the CPU take the memory up to its limit as one region, if it has a limit.

    A card's allocator does so, or gives free regions back when it runs out. The CPU's does neither: it doubles its
    regions as it grows, so that after a step that ran out no tensor larger than the largest of them fits any more.
    Nothing is written, so the host's memory is not taken. It is done once in a process, and the allocator's peak begins
    again then, for what was asked for is no step's.
    """
    import tensorflow as tf

    limit = _cpu_allocator_limit() if _first_gpu() is None else None
    allocator = None if limit is None else _first_allocator()
    if limit is None or allocator is None:
        return
    # Growing, it has reserved up to three times what was in use at most: regions double, and are not filled.
    free = limit - 3 * allocator.read().peak_bytes - _FIRST_REGION
    if free > limit // 4:
        with tf.device("CPU:0"), contextlib.suppress(tf.errors.ResourceExhaustedError):
            tf.raw_ops.Empty(shape=[free // 16], dtype=tf.complex128)
        allocator.reset()


def _first_allocator() -> Allocator | None:
    try:
        return tensorflow_allocator("CPU:0" if _first_gpu() is None else "GPU:0")
    except Exception:  # ValueError as a rule: the CPU's own allocator keeps no statistics
        return None
