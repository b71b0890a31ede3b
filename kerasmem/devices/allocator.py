"""What TensorFlow's allocator has handed out, device by device (JAX's and PyTorch's: `other_allocators`).

TensorFlow tells Python two numbers for a device: the bytes in use now, and the largest that was in use
since the last reset (`tf.config.experimental.get_memory_info`). Bytes are counted as the allocator hands
them out: rounded up to 256, and whole chunks where a chunk is not split. What the allocator keeps
reserved beyond that is not told to Python anywhere, so it is None here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kerasmem.compat.tensorflow_runtime import allocator_statistics

NO_RESERVED = (
    "reserved_bytes: TensorFlow does not tell Python what its allocator has reserved beyond what is in use; "
    "driver_used_bytes, where there is a driver, includes it"
)
_NO_CPU_STATS = (
    "start Python with TF_CPU_ALLOCATOR_USE_BFC=true in the environment to have the allocator that "
    "TensorFlow uses on GPUs, and its statistics"
)


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


class Allocator(Protocol):
    """The allocator of one device. Objects that read the same statistics are equal."""

    device: str

    def read(self) -> AllocatorReading:
        """Return what is in use, and the peak since the last reset."""

    def reset(self) -> None:
        """Start a new peak from what is in use now."""


class TensorFlowAllocator:
    """TensorFlow's allocator on one logical device.

    Args:
        device: a logical device, such as "GPU:0" or "CPU:0".

    Raises:
        ValueError: TensorFlow has no such device, or no statistics of it.

    Example:
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorFlowAllocator) and self.device == other.device

    def __hash__(self) -> int:
        return hash(self.device)


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


def tracked_devices(names: Sequence[str] | None = None) -> tuple[list[TrackedDevice], list[str]]:
    """Return the devices that training uses, each with its allocator, and notes on what is missing.

    Every GPU that TensorFlow sees; the CPU where there is no GPU. TensorFlow initialises its devices. On JAX every GPU
    of this process, on PyTorch the one that is current; a device without a name where there is none.

    Args:
        names: the logical devices to report on in place of those, such as ["GPU:0", "CPU:0"].

    Returns:
        The devices, at least one, and sentences on what cannot be read and why.
    """
    backend = _keras_backend()
    if backend != "tensorflow":
        return _of_other_backend(backend, names)
    import tensorflow as tf

    logical = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices()]
    if names is None:
        gpus = [name for name in logical if name.startswith("GPU:")]
        names = gpus or [name for name in logical if name == "CPU:0"]
    cards = _cards(tf)
    devices, notes = [], []
    for name in names:
        allocator: TensorFlowAllocator | None = None
        try:
            allocator = TensorFlowAllocator(name)
        except Exception as error:  # ValueError as a rule; whatever it is, training goes on without
            hint = f"; {_NO_CPU_STATS}" if name == "CPU:0" and name in logical else ""
            notes.append(f"allocator: {name}: {error}{hint}")
        devices.append(TrackedDevice(name, allocator, *cards.get(name, (None, None))))
    if any(device.allocator for device in devices):
        notes.append(NO_RESERVED)
    if any(device.name == "CPU:0" and device.allocator for device in devices) and not cpu_uses_bfc():
        notes.append(
            "allocator: CPU:0 is read from oneDNN's allocator, which counts blocks of 256 KiB and more; "
            f"{_NO_CPU_STATS}"
        )
    return devices or [TrackedDevice(None)], notes


def _of_other_backend(backend: str, names: Sequence[str] | None) -> tuple[list[TrackedDevice], list[str]]:
    """Return what `tracked_devices` does where Keras does not run on TensorFlow."""
    from kerasmem.devices.other_allocators import jax_devices, torch_devices

    ways = {"jax": jax_devices, "torch": torch_devices}
    if backend not in ways:
        notes = [f"allocator: Keras runs on {backend}, which has no allocator to ask; host memory is logged"]
        return [TrackedDevice(None)], notes
    try:
        found, notes = ways[backend](importlib.import_module(backend))
    except Exception as error:  # a broken driver, as a rule; it is the backend's to complain about
        found, notes = [], [f"allocator: {backend} could not be asked for its devices: {error}; host memory is logged"]
    if names is not None:
        there = {device.name: device for device in found}
        notes += [f"allocator: {name}: {backend} has no such device to ask" for name in names if name not in there]
        found = [there.get(name, TrackedDevice(name)) for name in names]
    return found or [TrackedDevice(None)], notes


def cpu_uses_bfc() -> bool:
    """Return whether the environment asks TensorFlow for the GPU's kind of allocator (BFC) on the CPU."""
    return os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("true", "1")


def _cards(tf: Any) -> dict[str, tuple[int, str | None]]:
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


def _keras_backend() -> str:
    import keras

    return str(keras.config.backend())
