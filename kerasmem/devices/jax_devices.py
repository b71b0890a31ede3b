"""JAX's devices and their allocators.

JAX counts what the host has asked for; a device that still works on the batch before does not change that. On a CPU it
keeps no statistics.
"""

from __future__ import annotations

from typing import Any

from kerasmem.devices.allocator import Allocator, AllocatorReading, TrackedDevice


def jax_allocator(name: str, source: Any) -> Allocator:
    """Return JAX's allocator on one device. Its peak is that since the process began: JAX has no way to reset it.

    Args:
        name: what the device is called here, such as "GPU:0".
        source: a JAX device, whose `memory_stats()` is asked.

    Raises:
        ValueError: JAX keeps no statistics of it.

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


def jax_devices(jax: Any) -> tuple[list[TrackedDevice], list[str]]:
    """Return this process's GPUs as JAX sees them, each with its allocator, and notes on what is missing.

    Args:
        jax: the module, or what stands in for it.
    """
    found, notes = [], []
    for device in jax.local_devices():
        if device.platform == "cpu":
            continue
        is_gpu = device.platform in ("gpu", "cuda", "rocm")
        name = f"{'GPU' if is_gpu else device.platform.upper()}:{device.local_hardware_id}"
        allocator = None
        try:
            allocator = jax_allocator(name, device)
        except Exception as error:  # whatever a plug-in raises, training goes on without
            notes.append(f"allocator: {name}: {error}")
        card = (device.local_hardware_id, device.device_kind) if is_gpu else (None, None)
        found.append(TrackedDevice(name, allocator, *card))
    if not found:
        notes.append("allocator: JAX keeps no statistics of its allocator on a CPU; host memory is logged")
    return found, notes
