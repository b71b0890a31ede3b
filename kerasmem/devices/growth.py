"""Memory growth: let TensorFlow take GPU memory as it needs it, instead of the whole card at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kerasmem.records import Record

GrowthState = Literal[
    "on", "already on", "too late", "set differently", "no gpu", "other backend", "no tensorflow", "failed"
]

_FORCE = "TF_FORCE_GPU_ALLOW_GROWTH"


@dataclass(frozen=True)
class GrowthStatus(Record, what="memory growth"):
    """Result of `enable_memory_growth`.

    Attributes:
        state: "on" (switched on by this call), "already on", "too late" (TensorFlow has initialised its
            devices without it), "set differently" (this program or its environment chose otherwise),
            "no gpu", "other backend" (Keras does not run on TensorFlow), "no tensorflow" or "failed".
        devices: the visible GPUs asked about, as TensorFlow names them.
        message: the outcome and the fix, in a sentence or two.
    """

    state: GrowthState
    devices: tuple[str, ...]
    message: str

    @property
    def on(self) -> bool:
        """Whether GPU memory is taken as needed."""
        return self.state in ("on", "already on")

    @property
    def refused(self) -> bool:
        """Whether there are GPUs and TensorFlow takes (or may take) all of their memory at once."""
        return self.state in ("too late", "set differently", "failed")


def enable_memory_growth() -> GrowthStatus:
    """Let TensorFlow take GPU memory as it needs it, on every visible GPU.

    By default TensorFlow takes nearly the whole card when it first touches it, and the setting is fixed once it has
    initialised its devices. So call this first. It never raises; the result says what could not be done. Either all
    visible GPUs are switched or none, as TensorFlow refuses to start with GPUs that differ.

    Returns:
        A `GrowthStatus`: the state, the GPUs, and a message.

    Examples:
        >>> import kerasmem
        >>> status = kerasmem.enable_memory_growth()
        >>> status.state in ("on", "already on", "no gpu", "too late", "set differently", "other backend")
        True
    """
    if (message := _other_backend()) is not None:
        return GrowthStatus("other backend", (), message)
    try:
        import tensorflow as tf

        config = tf.config
        gpus = list(config.get_visible_devices("GPU"))
    except ImportError as error:
        return GrowthStatus("no tensorflow", (), f"TensorFlow cannot be imported: {error}")
    except Exception as error:  # a broken driver must not stop a program that only asked for growth
        return GrowthStatus("failed", (), f"TensorFlow could not list its GPUs: {error}")
    if not gpus:
        return GrowthStatus("no gpu", (), "TensorFlow sees no GPU, so there is nothing to switch.")
    forced = os.environ.get(_FORCE)
    state: GrowthState = "already on"
    if forced == "true":
        message = f"Memory growth is on: {_FORCE}=true is in the environment."
    elif forced == "false":
        state = "set differently"
        message = f"Memory growth is off: {_FORCE}=false in the environment overrides the program. Unset it."
    else:
        state, message = _switch_on(config, gpus)
    return GrowthStatus(state, tuple(gpu.name for gpu in gpus), message)


def _switch_on(config: Any, gpus: list[Any]) -> tuple[GrowthState, str]:
    """Turn growth on for all of `gpus`, or leave them as they were and say why."""
    names = _listing(gpus)
    if limited := [gpu for gpu in gpus if config.get_logical_device_configuration(gpu)]:
        return "set differently", (
            f"{_listing(limited)} has logical devices with a fixed memory limit, which TensorFlow does not combine "
            "with memory growth. Remove set_logical_device_configuration() to have growth."
        )
    before = {gpu: config.experimental.get_memory_growth(gpu) for gpu in gpus}
    if all(before.values()):
        return "already on", f"Memory growth was on already for {names}."
    if refused := [gpu for gpu in gpus if before[gpu] is False]:
        return "set differently", (
            f"This program turned memory growth off for {_listing(refused)} by set_memory_growth(…, False). "
            "Remove that call, or pass True, to have growth."
        )
    try:
        for gpu in gpus:  # if TensorFlow refuses, it refuses the first whose setting would change
            config.experimental.set_memory_growth(gpu, True)
    except ValueError as error:
        return "failed", f"TensorFlow refused memory growth: {error}"
    except RuntimeError as error:
        return "too late", (
            f"Too late for memory growth: TensorFlow has initialised its devices already ({error}), and takes nearly "
            f"all the memory of {names} at once. Call kerasmem.enable_memory_growth() before any model, tensor or "
            f"data set is made, or start the program with {_FORCE}=true in the environment."
        )
    return "on", f"Memory growth is on for {names}."


def _listing(gpus: list[Any]) -> str:
    return ", ".join(gpu.name.removeprefix("/physical_device:") for gpu in gpus)


def jax_grows(environ: Mapping[str, str]) -> bool:
    """Return whether JAX takes a card's memory in regions as it needs it; by default three quarters at once."""
    return environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0")


def _other_backend() -> str | None:
    """Return a message if Keras does not run on TensorFlow."""
    try:
        import keras
    except ImportError:
        return None
    backend = keras.config.backend()
    if backend == "tensorflow":
        return None
    hint = " XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment does the same for JAX." if backend == "jax" else ""
    return f"Keras runs on {backend}, and memory growth is TensorFlow's.{hint}"
