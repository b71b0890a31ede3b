"""Devices of training in this process, with the allocators of TensorFlow or JAX and their limits.

TensorFlow provides two figures for a device (`tf.config.experimental.get_memory_info`): the bytes in use, and their
peak since the last reset. They count whole chunks of the allocator, which are multiples of 256 bytes. TensorFlow does
not provide the bytes that its allocator has reserved, so they are None.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kerasmem.devices.catalogue import available_on_device
from kerasmem.devices.host import available_memory
from kerasmem.devices.kernels import CardKernels, CpuKernels, cpu_kernels
from kerasmem.devices.machine import find_device
from kerasmem.units import MIB

_FIRST_REGION = 2 * MIB  # of a growing allocator of TensorFlow
NO_RESERVED = (
    "reserved_bytes: TensorFlow does not report the reserved memory of its allocator; driver_used_bytes includes it if "
    "there is a driver"
)
_HOST_ONLY = "host memory is logged"
_NO_CPU_STATS = (
    "set TF_CPU_ALLOCATOR_USE_BFC=true in the environment before Python starts to use TensorFlow's allocator for GPUs, "
    "which has statistics"
)


def tracked_devices() -> tuple[list[TrackedDevice], list[str]]:
    """List the devices of training with their allocators, and notes on missing figures.

    They are TensorFlow's GPUs, or else its CPU. TensorFlow initializes its devices. On JAX, they are the GPUs of this
    process, or else a device without a name.

    Returns:
        At least one device, and notes on figures that cannot be read.
    """
    import keras

    backend = keras.config.backend()
    if backend == "jax":
        return devices_of_jax()
    if backend != "tensorflow":
        notes = [f"allocator: Keras runs on {backend}, which has no statistics; {_HOST_ONLY}"]
        return [TrackedDevice(None)], notes
    import tensorflow as tf

    logical = _local_devices(tf)
    gpus = [name for name in logical if name.startswith("GPU:")]
    names = gpus or [name for name in logical if name == "CPU:0"]
    cards = cards_behind(tf)
    devices, notes = [], []
    for name in names:
        allocator = None
        try:
            allocator = tensorflow_allocator(name)
        except Exception as error:  # usually ValueError; training continues in any case
            hint = f"; {_NO_CPU_STATS}" if name == "CPU:0" and name in logical else ""
            notes.append(f"allocator: {name}: {error}{hint}")
        devices.append(TrackedDevice(name, allocator, *cards.get(name, (None, None))))
    if not devices:
        notes.append(f"allocator: TensorFlow has only {logical} in this process, without GPU or CPU:0; {_HOST_ONLY}")
    if any(device.allocator for device in devices):
        notes.append(NO_RESERVED)
    if any(device.name == "CPU:0" and device.allocator for device in devices) and not cpu_uses_bfc():
        notes.append(f"allocator: oneDNN's allocator on CPU:0 counts only blocks of at least 256 KiB; {_NO_CPU_STATS}")
    return devices or [TrackedDevice(None)], notes


def _local_devices(tf: Any) -> list[str]:
    """Return this process's logical devices, such as "CPU:0", without other workers' devices."""
    names = [device.name for device in tf.config.list_logical_devices()]
    worker = ""
    if any(name.startswith("/job:") for name in names):
        worker = tf.constant(0).device.partition("/device:")[0]
    return [name.rpartition("/device:")[2] for name in names if name.startswith(f"{worker}/device:")]


def devices_of_jax() -> tuple[list[TrackedDevice], list[str]]:
    """List JAX's GPUs of this process and notes, as `tracked_devices`."""
    devices, notes = [], []
    try:
        local = [device for device in importlib.import_module("jax").local_devices() if device.platform != "cpu"]
    except Exception as error:  # usually a broken driver
        return [TrackedDevice(None)], [f"allocator: JAX cannot list its devices: {error}; {_HOST_ONLY}"]
    for device in local:
        is_gpu = device.platform in ("gpu", "cuda", "rocm")
        name = f"{'GPU' if is_gpu else device.platform.upper()}:{device.local_hardware_id}"
        allocator = None
        try:
            allocator = jax_allocator(name, device)
        except Exception as error:  # plug-ins may raise any error
            notes.append(f"allocator: {name}: {error}")
        card = (device.local_hardware_id, device.device_kind) if is_gpu else (None, None)
        devices.append(TrackedDevice(name, allocator, *card))
    if not devices:
        notes.append(f"allocator: JAX has no statistics of its allocator on a CPU; {_HOST_ONLY}")
    return devices or [TrackedDevice(None)], notes


def cpu_uses_bfc() -> bool:
    """Return whether the environment sets TensorFlow's allocator for GPUs (BFC) on the CPU."""
    return os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("true", "1")


def cards_behind(tf: Any) -> dict[str, tuple[int, str | None]]:
    """Map each logical GPU to its CUDA ordinal and the name of its card."""
    cards: dict[str, tuple[int, str | None]] = {}
    physical = tf.config.list_physical_devices("GPU")
    logical = 0
    for gpu in tf.config.get_visible_devices("GPU"):
        try:
            name = tf.config.experimental.get_device_details(gpu).get("device_name")
        except Exception:  # the name is only a hint for NVML
            name = None
        for _ in tf.config.get_logical_device_configuration(gpu) or [None]:
            cards[f"GPU:{logical}"] = (physical.index(gpu), name)
            logical += 1
    return cards


class AllocatorReading(NamedTuple):
    """One reading of a device's allocator, in bytes.

    Attributes:
        in_use_bytes: memory in use.
        peak_bytes: peak memory in use since the last reset.
        reserved_bytes: memory allocated from the device, in use or not; None if unknown.
    """

    in_use_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None


@dataclass(frozen=True)
class Allocator:
    """Allocator of one device.

    Attributes:
        device: the device, such as "GPU:0".
        read: function that returns a reading.
        reset: function that resets the peak to the bytes in use. It raises an error if the backend cannot.
        backend: "tensorflow" or "jax".
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
        ValueError: If TensorFlow lacks the device or its statistics.

    Examples:
        >>> import tensorflow as tf
        >>> allocator = tensorflow_allocator("CPU:0")
        >>> tensor = tf.zeros([1024, 1024])
        >>> allocator.read().in_use_bytes >= 4 * 1024 * 1024
        True
    """
    import tensorflow as tf

    def read() -> AllocatorReading:
        info = tf.config.experimental.get_memory_info(device)
        return AllocatorReading(info["current"], info["peak"])

    read()
    return Allocator(device, read, functools.partial(tf.config.experimental.reset_memory_stats, device))


def jax_allocator(name: str, source: Any) -> Allocator:
    """Return JAX's allocator on one device. Its peak is since the start of the process, because JAX cannot reset it.

    Args:
        name: kerasmem's name of the device, such as "GPU:0".
        source: a JAX device.

    Raises:
        ValueError: If JAX has no statistics of the device.

    Examples:
        >>> class Device:
        ...     def memory_stats(self):
        ...         return {"bytes_in_use": 256, "peak_bytes_in_use": 1024, "pool_bytes": 2048}
        >>> jax_allocator("GPU:0", Device()).read()
        AllocatorReading(in_use_bytes=256, peak_bytes=1024, reserved_bytes=2048)
    """
    if not {"bytes_in_use", "peak_bytes_in_use"} <= set(source.memory_stats() or ()):
        raise ValueError("JAX has no statistics of its allocator there")

    def read() -> AllocatorReading:
        stats = source.memory_stats()
        return AllocatorReading(stats["bytes_in_use"], stats["peak_bytes_in_use"], stats.get("pool_bytes"))

    def reset() -> None:
        raise NotImplementedError("JAX cannot reset an allocator's peak")

    return Allocator(name, read, reset, "jax")


@dataclass(frozen=True)
class TrackedDevice:
    """Device of training.

    Attributes:
        name: name of the logical device, such as "GPU:0"; None if the backend lacks one.
        allocator: its allocator, or None if it has no statistics.
        ordinal: CUDA ordinal of the GPU; None for a CPU.
        card: CUDA's name of the GPU.
    """

    name: str | None
    allocator: Allocator | None = None
    ordinal: int | None = None
    card: str | None = None


def allocator_limit() -> int | None:
    """Return the limit of the allocator of the first visible GPU, or else of the CPU, or None if unknown.

    By default, the limit on a GPU is the card's memory less the CUDA context and TensorFlow's reserve. Memory of other
    processes is not subtracted.
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
    """Return the memory for training: the allocator's limit, or the host's memory available to this job."""
    limit = allocator_limit()
    return available_memory() if limit is None else limit


def training_kernels() -> CpuKernels | CardKernels:
    """Return the kernels of the first visible GPU, or else of the CPU."""
    import tensorflow as tf

    gpu = _first_gpu()
    capability = None if gpu is None else tf.config.experimental.get_device_details(gpu).get("compute_capability")
    return cpu_kernels() if capability is None else CardKernels(capability, training_memory(), cpu_kernels())


def _first_gpu() -> Any:
    """Return the first visible GPU, or None."""
    import tensorflow as tf

    return next(iter(tf.config.get_visible_devices("GPU")), None)


def _cpu_allocator_limit() -> int | None:
    text = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", "")
    return int(text) * MIB if text.isdecimal() and cpu_uses_bfc() else None


@functools.cache
def reserve_in_one_piece() -> None:
    """Reserve one region up to the limit of TensorFlow's allocator for the CPU, if it has a limit.

    A GPU's allocator does so itself, or releases free regions when it runs out of memory. The CPU's allocator doubles
    its regions as it grows. After a step that ran out of memory, no tensor larger than the largest region would fit.
    The region is not written, so it occupies no memory of the host. This happens once in a process, and resets the
    allocator's peak.
    """
    import tensorflow as tf

    limit = _cpu_allocator_limit() if _first_gpu() is None else None
    allocator = None if limit is None else _first_allocator()
    if limit is None or allocator is None:
        return
    # A growing allocator has reserved up to three times its peak, because regions double and are not filled.
    free = limit - 3 * allocator.read().peak_bytes - _FIRST_REGION
    if free > limit // 4:
        with tf.device("CPU:0"), contextlib.suppress(tf.errors.ResourceExhaustedError):
            tf.raw_ops.Empty(shape=[free // 16], dtype=tf.complex128)
        allocator.reset()


def _first_allocator() -> Allocator | None:
    try:
        return tensorflow_allocator("CPU:0" if _first_gpu() is None else "GPU:0")
    except Exception:  # usually ValueError, because the CPU's default allocator has no statistics
        return None
