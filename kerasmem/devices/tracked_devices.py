"""The devices that training uses here, each with its allocator: TensorFlow's or JAX's."""

from __future__ import annotations

import importlib
import os
from typing import Any

from kerasmem.devices.allocator import TrackedDevice, jax_allocator, tensorflow_allocator

NO_RESERVED = (
    "reserved_bytes: TensorFlow does not tell Python what its allocator has reserved beyond what is in use; "
    "driver_used_bytes, where there is a driver, includes it"
)
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
    backend = _keras_backend()
    if backend == "jax":
        return devices_of_jax()
    if backend != "tensorflow":
        notes = [f"allocator: Keras runs on {backend}, which has no allocator to ask; host memory is logged"]
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
        notes.append(
            f"allocator: TensorFlow shows this process no GPU and no CPU:0, only {logical}; host memory is logged"
        )
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
    try:
        found, notes = _jax_devices(importlib.import_module("jax"))
    except Exception as error:  # a broken driver, as a rule, or no JAX
        found, notes = [], [f"allocator: JAX could not be asked for its devices: {error}; host memory is logged"]
    return found or [TrackedDevice(None)], notes


def _jax_devices(jax: Any) -> tuple[list[TrackedDevice], list[str]]:
    found, notes = [], []
    for device in jax.local_devices():
        if device.platform == "cpu":
            continue
        is_gpu = device.platform in ("gpu", "cuda", "rocm")
        name = f"{'GPU' if is_gpu else device.platform.upper()}:{device.local_hardware_id}"
        allocator = None
        try:
            allocator = jax_allocator(name, device)
        except Exception as error:  # a plug-in may raise anything
            notes.append(f"allocator: {name}: {error}")
        card = (device.local_hardware_id, device.device_kind) if is_gpu else (None, None)
        found.append(TrackedDevice(name, allocator, *card))
    if not found:
        notes.append("allocator: JAX keeps no statistics of its allocator on a CPU; host memory is logged")
    return found, notes


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


def _keras_backend() -> str:
    import keras

    return str(keras.config.backend())
