"""State and settings of TensorFlow's runtime, without starting it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

_TF = "tensorflow.python"
_CONTEXT = Borrowed(f"{_TF}.eager.context:context_safe", feature="the peak of a function run by kerasmem.run_isolated")
_DETERMINISM = Borrowed(
    f"{_TF}.framework.config:is_op_determinism_enabled",
    feature="kerasmem.fit(isolated=True) with deterministic operations",
)
_ONEDNN = Borrowed(f"{_TF}.util._pywrap_util_port:IsMklEnabled", feature="asking TensorFlow which CPU kernels it uses")
_FAST = "readings of the allocator on the shortest way"
_CURRENT = Borrowed(f"{_TF}.eager.context:_context", feature=_FAST)
_MEMORY_INFO = Borrowed(f"{_TF}.pywrap_tfe:TFE_GetMemoryInfo", feature=_FAST)
_RESET_STATS = Borrowed(f"{_TF}.pywrap_tfe:TFE_ResetMemoryStats", feature=_FAST)


def devices_are_started() -> bool:
    """Return whether TensorFlow has started its devices (False if unknown)."""
    if "tensorflow" not in sys.modules:
        return False
    try:
        context = _CONTEXT.get()()
    except NotAvailableError:
        return False
    return bool(getattr(context, "_initialized", False))


def operations_are_deterministic() -> bool:
    """Return whether `tf.config.experimental.enable_op_determinism()` was called.

    Raises:
        NotAvailableError: If TensorFlow does not tell.
    """
    return bool(_DETERMINISM.get()())


def onednn_is_on() -> bool:
    """Return whether oneDNN's kernels stand in for TensorFlow's own on the CPU.

    Raises:
        NotAvailableError: If TensorFlow does not tell.
    """
    return bool(_ONEDNN.get()())


def allocator_statistics(device: str, kind: type) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Return functions that read and reset the statistics of a device's allocator, on the shortest way.

    They are what `tf.config.experimental.get_memory_info` and `reset_memory_stats` call in the end, whose way there
    takes longer after a training step.

    Args:
        device: a logical device, such as "GPU:0", started.
        kind: a named tuple of the bytes in use, the peak, and a third value, which is None.

    Raises:
        NotAvailableError: If this TensorFlow has none of them; the public functions do the same.
    """
    tell, forget = _MEMORY_INFO.get(), _RESET_STATS.get()
    _CURRENT.get()
    module: Any = sys.modules[_CURRENT.module]  # TensorFlow may put another context there later
    make = tuple.__new__  # a named tuple's own way is a Python function more

    def read() -> Any:
        told = tell(module._context._context_handle, device)
        return make(kind, (told["current"], told["peak"], None))

    def reset() -> None:
        forget(module._context._context_handle, device)

    return read, reset
