"""Memory growth: let TensorFlow take GPU memory as it needs it, instead of the whole card at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kerasmem.records import Record

GrowthState = Literal[
    "on", "already on", "too late", "set differently", "no gpu", "other backend", "no tensorflow", "failed"
]

_FORCE = "TF_FORCE_GPU_ALLOW_GROWTH"
_FIRST = (
    "Call kerasmem.enable_memory_growth() first thing in the script, before any model, tensor or data set "
    f"is made, or start the program with {_FORCE}=true in the environment."
)


@dataclass(frozen=True)
class GrowthStatus(Record, what="memory growth"):
    """What came of asking for memory growth.

    Attributes:
        state: "on" (switched on by this call), "already on", "too late" (TensorFlow has initialised its
            devices without it), "set differently" (this program or its environment chose otherwise),
            "no gpu", "other backend" (Keras does not run on TensorFlow), "no tensorflow" or "failed".
        devices: the visible GPUs asked about, as TensorFlow names them.
        message: what happened, and what to do about it, in a sentence or two.
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


def enable_memory_growth(config: Any | None = None, *, environ: Mapping[str, str] | None = None) -> GrowthStatus:
    """Ask TensorFlow to take GPU memory as it needs it, on every visible GPU.

    TensorFlow otherwise takes nearly the whole card when it first touches it. The choice is made when
    TensorFlow initialises its devices, so this is the call to make first. It never raises: what could
    not be done is said in the result. Either all visible GPUs are switched or none, since TensorFlow
    refuses to start with GPUs that differ.

    Args:
        config: an object like `tf.config` to ask; default: TensorFlow's own, when Keras runs on it.
        environ: environment variables to consult; default: this process's.

    Returns:
        The state, the GPUs it is about, and a message for people.

    Examples:
        >>> import kerasmem
        >>> status = kerasmem.enable_memory_growth()
        >>> status.state in ("on", "already on", "no gpu", "too late", "set differently", "other backend")
        True
    """
    if config is None:
        config, why_not = _tensorflow_config()
        if why_not is not None:
            return why_not
    try:
        gpus = list(config.get_visible_devices("GPU"))
    except Exception as error:  # a broken driver must not stop a program that only asked for growth
        return GrowthStatus("failed", (), f"TensorFlow could not list its GPUs: {error}")
    if not gpus:
        return GrowthStatus("no gpu", (), "TensorFlow sees no GPU, so there is nothing to switch.")
    forced = (os.environ if environ is None else environ).get(_FORCE)
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
    """Set growth on all of `gpus`, or leave them as they were and say why."""
    if limited := [gpu for gpu in gpus if config.get_logical_device_configuration(gpu)]:
        return "set differently", (
            f"{_listing(limited)} was divided into logical devices with a fixed memory limit, which "
            "TensorFlow does not combine with memory growth. The limit stands; remove "
            "set_logical_device_configuration() if you would rather have growth."
        )
    before = {gpu: config.experimental.get_memory_growth(gpu) for gpu in gpus}
    if all(before.values()):
        return "already on", f"Memory growth was on already for {_listing(gpus)}."
    if refused := [gpu for gpu in gpus if before[gpu] is False]:
        return "set differently", (
            f"This program switched memory growth off for {_listing(refused)} with "
            "set_memory_growth(…, False); that choice stands. Remove that call, or pass True, to have growth."
        )
    changed = []
    try:
        for gpu in gpus:
            config.experimental.set_memory_growth(gpu, True)
            changed.append(gpu)
    except (RuntimeError, ValueError) as error:
        with contextlib.suppress(RuntimeError, ValueError):
            for gpu in changed:  # GPUs that differ stop TensorFlow from starting at all
                config.experimental.set_memory_growth(gpu, before[gpu])
        if isinstance(error, ValueError):
            return "failed", f"TensorFlow refused memory growth: {error}"
        return "too late", (
            f"Too late for memory growth: TensorFlow has initialised its devices already ({error}), "
            f"and takes nearly all the memory of {_listing(gpus)} at once. {_FIRST}"
        )
    return "on", f"Memory growth is on for {_listing(gpus)}."


def _listing(gpus: list[Any]) -> str:
    return ", ".join(gpu.name.removeprefix("/physical_device:") for gpu in gpus)


def _tensorflow_config() -> tuple[Any, GrowthStatus | None]:
    """Return `tf.config`, or why it is not the thing to ask."""
    try:
        import keras

        backend = keras.config.backend()
    except ImportError:
        backend = "tensorflow"
    if backend != "tensorflow":
        message = f"Keras runs on {backend}, and memory growth is TensorFlow's."
        if backend == "jax":
            message += " XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment does the same for JAX."
        return None, GrowthStatus("other backend", (), message)
    try:
        import tensorflow as tf
    except ImportError as error:
        return None, GrowthStatus("no tensorflow", (), f"TensorFlow cannot be imported: {error}")
    return tf.config, None
