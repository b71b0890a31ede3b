"""The allocators of JAX and PyTorch, for Keras on those backends.

Both count what the host has asked for; a device that still works on the batch before does not change that. On a CPU
neither keeps statistics.
"""

from __future__ import annotations

import functools
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


def torch_allocator(ordinal: int, cuda: Any) -> Allocator:
    """Return PyTorch's caching allocator on one CUDA device.

    Args:
        ordinal: the device's number in this process.
        cuda: `torch.cuda`, or what stands in for it.

    Raises:
        ValueError: PyTorch keeps no statistics of it.
    """

    def read() -> AllocatorReading:
        # The nested form is what PyTorch's allocator gives; `memory_stats` takes ten times as long to flatten it.
        told = cuda.memory_stats_as_nested_dict(ordinal)
        in_use = told["allocated_bytes"]["all"]
        return AllocatorReading(in_use["current"], in_use["peak"], told["reserved_bytes"]["all"]["current"])

    try:
        read()
    except KeyError as error:
        raise ValueError(f"PyTorch's statistics of it have no {error}") from error
    return Allocator(f"GPU:{ordinal}", read, functools.partial(cuda.reset_peak_memory_stats, ordinal), "torch")


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


def torch_devices(torch: Any) -> tuple[list[TrackedDevice], list[str]]:
    """Return the GPU that Keras uses on PyTorch, with its allocator, and notes on what is missing.

    Args:
        torch: the module, or what stands in for it.
    """
    cuda = torch.cuda
    if not cuda.is_available():
        why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch sees no CUDA device"
        return [], [f"allocator: {why} and keeps no statistics of its allocator on a CPU; host memory is logged"]
    ordinal = cuda.current_device()
    try:
        return [
            TrackedDevice(f"GPU:{ordinal}", torch_allocator(ordinal, cuda), ordinal, cuda.get_device_name(ordinal))
        ], []
    except Exception as error:  # such as a device that another process has to itself
        return [TrackedDevice(f"GPU:{ordinal}", None, ordinal)], [f"allocator: GPU:{ordinal}: {error}"]
