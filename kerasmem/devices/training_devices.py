"""The devices that training uses here, each with its allocator: bytes that TensorFlow or JAX has handed out.

TensorFlow tells Python two numbers for a device: the bytes in use now, and the largest that was in use
since the last reset (`tf.config.experimental.get_memory_info`). Bytes are counted as the allocator hands
them out: rounded up to 256, and whole chunks where a chunk is not split. What the allocator keeps
reserved beyond that is not told to Python anywhere, so it is None here.
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
from kerasmem.devices.host import host_memory
from kerasmem.devices.kernels import CardKernels, CpuKernels, cpu_kernels
from kerasmem.devices.machine import find_device
from kerasmem.units import MIB

_FIRST_REGION = 2 * MIB  # of TensorFlow's allocator if it grows
NO_RESERVED = (
    "reserved_bytes: TensorFlow does not tell Python what its allocator has reserved beyond what is in use; "
    "driver_used_bytes, where there is a driver, includes it"
)
_HOST_ONLY = "host memory is logged"
_NO_CPU_STATS = (
    "start Python with TF_CPU_ALLOCATOR_USE_BFC=true in the environment to have the allocator that "
    "TensorFlow uses on GPUs, and its statistics"
)


def tracked_devices() -> tuple[list[TrackedDevice], list[str]]:
    """List the devices that training uses, each with its allocator, and notes on missing figures.

    Every GPU that TensorFlow sees; the CPU if there is no GPU. TensorFlow initialises its devices. On JAX every GPU
    of this process; a device without a name if there is none.

    Returns:
        The devices, at least one, and sentences on what cannot be read and why.
    """
    import keras

    backend = keras.config.backend()
    if backend == "jax":
        return devices_of_jax()
    if backend != "tensorflow":
        notes = [f"allocator: Keras runs on {backend}, which has no allocator to ask; {_HOST_ONLY}"]
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
        except Exception as error:  # ValueError as a rule; whatever it is, training goes on without
            hint = f"; {_NO_CPU_STATS}" if name == "CPU:0" and name in logical else ""
            notes.append(f"allocator: {name}: {error}{hint}")
        devices.append(TrackedDevice(name, allocator, *cards.get(name, (None, None))))
    if not devices:
        notes.append(f"allocator: TensorFlow shows this process no GPU and no CPU:0, only {logical}; {_HOST_ONLY}")
    if any(device.allocator for device in devices):
        notes.append(NO_RESERVED)
    if any(device.name == "CPU:0" and device.allocator for device in devices) and not cpu_uses_bfc():
        notes.append(
            "allocator: CPU:0 is read from oneDNN's allocator, which counts blocks of 256 KiB and more; "
            f"{_NO_CPU_STATS}"
        )
    return devices or [TrackedDevice(None)], notes


def _local_devices(tf: Any) -> list[str]:
    """Return this process's logical devices, such as "CPU:0", without those of other workers."""
    names = [device.name for device in tf.config.list_logical_devices()]
    worker = ""
    if any(name.startswith("/job:") for name in names):
        worker = tf.constant(0).device.partition("/device:")[0]
    return [name.rpartition("/device:")[2] for name in names if name.startswith(f"{worker}/device:")]


def devices_of_jax() -> tuple[list[TrackedDevice], list[str]]:
    """List this process's GPUs as JAX sees them, as `tracked_devices` does for TensorFlow."""
    devices, notes = [], []
    try:
        local = [each for each in importlib.import_module("jax").local_devices() if each.platform != "cpu"]
    except Exception as error:  # a broken driver, as a rule, or no JAX
        return [TrackedDevice(None)], [f"allocator: JAX could not be asked for its devices: {error}; {_HOST_ONLY}"]
    for device in local:
        is_gpu = device.platform in ("gpu", "cuda", "rocm")
        name = f"{'GPU' if is_gpu else device.platform.upper()}:{device.local_hardware_id}"
        allocator = None
        try:
            allocator = jax_allocator(name, device)
        except Exception as error:  # a plug-in may raise anything
            notes.append(f"allocator: {name}: {error}")
        card = (device.local_hardware_id, device.device_kind) if is_gpu else (None, None)
        devices.append(TrackedDevice(name, allocator, *card))
    if not devices:
        notes.append(f"allocator: JAX keeps no statistics of its allocator on a CPU; {_HOST_ONLY}")
    return devices or [TrackedDevice(None)], notes


def cpu_uses_bfc() -> bool:
    """Return whether the environment asks TensorFlow for the GPU's kind of allocator (BFC) on the CPU."""
    return os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("true", "1")


def cards_behind(tf: Any) -> dict[str, tuple[int, str | None]]:
    """Return, for each logical GPU, the CUDA ordinal behind it and the card's name."""
    cards: dict[str, tuple[int, str | None]] = {}
    physical = tf.config.list_physical_devices("GPU")
    logical = 0
    for gpu in tf.config.get_visible_devices("GPU"):
        try:
            name = tf.config.experimental.get_device_details(gpu).get("device_name")
        except Exception:  # the name only helps to find the card in NVML
            name = None
        for _ in tf.config.get_logical_device_configuration(gpu) or [None]:
            cards[f"GPU:{logical}"] = (physical.index(gpu), name)
            logical += 1
    return cards


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
