"""Memory growth: allocation of GPU memory on demand, instead of the whole card."""

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
        state: "on" (enabled by this call), "already on", "too late" (TensorFlow has initialized its devices),
            "set differently" (by this program or its environment), "no gpu", "other backend" (Keras does not run on
            TensorFlow), "no tensorflow" or "failed".
        devices: TensorFlow's names of the visible GPUs.
        message: the outcome, and a fix if there is one.
    """

    state: GrowthState
    devices: tuple[str, ...]
    message: str

    @property
    def on(self) -> bool:
        """Whether memory growth is on."""
        return self.state in ("on", "already on")

    @property
    def refused(self) -> bool:
        """Whether there are GPUs, and memory growth could not be enabled."""
        return self.state in ("too late", "set differently", "failed")


def enable_memory_growth() -> GrowthStatus:
    """Enable memory growth on all visible GPUs, so that TensorFlow allocates memory on demand.

    By default, TensorFlow allocates nearly the whole card on first use. The setting cannot change after TensorFlow has
    initialized its devices, so call this function first. It does not raise errors. Either all visible GPUs change or
    none, because TensorFlow does not start if their settings differ.

    Returns:
        A `GrowthStatus` with the state, the GPUs and a message.

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
    except Exception as error:  # a broken driver must not stop the program
        return GrowthStatus("failed", (), f"TensorFlow could not list its GPUs: {error}")
    if not gpus:
        return GrowthStatus("no gpu", (), "TensorFlow sees no GPU.")
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
    """Enable growth on all GPUs or none, and return the state and a message."""
    names = _listing(gpus)
    if limited := [gpu for gpu in gpus if config.get_logical_device_configuration(gpu)]:
        return "set differently", (
            f"{_listing(limited)} has logical devices with a fixed memory limit, which TensorFlow does not combine "
            "with memory growth. Remove set_logical_device_configuration()."
        )
    before = {gpu: config.experimental.get_memory_growth(gpu) for gpu in gpus}
    if all(before.values()):
        return "already on", f"Memory growth was already on for {names}."
    if refused := [gpu for gpu in gpus if before[gpu] is False]:
        return "set differently", (
            f"This program turned memory growth off for {_listing(refused)} by set_memory_growth(…, False). "
            "Remove that call, or pass True."
        )
    try:
        for gpu in gpus:  # TensorFlow refuses either the first change or none
            config.experimental.set_memory_growth(gpu, True)
    except ValueError as error:
        return "failed", f"TensorFlow refused memory growth: {error}"
    except RuntimeError as error:
        return "too late", (
            f"Too late for memory growth: TensorFlow has already initialized its devices ({error}), and allocates "
            f"nearly all the memory of {names}. Call kerasmem.enable_memory_growth() before the first model, tensor or "
            f"dataset, or set {_FORCE}=true in the environment."
        )
    return "on", f"Memory growth is on for {names}."


def _listing(gpus: list[Any]) -> str:
    return ", ".join(gpu.name.removeprefix("/physical_device:") for gpu in gpus)


def jax_grows(environ: Mapping[str, str]) -> bool:
    """Return whether JAX allocates GPU memory on demand. By default, it allocates three quarters of the card."""
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
    hint = " Set XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment for JAX." if backend == "jax" else ""
    return f"Memory growth is a setting of TensorFlow, and Keras runs on {backend}.{hint}"
