"""What TensorFlow's runtime has been set to and whether it has begun, without beginning it."""

from __future__ import annotations

import sys

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

_CONTEXT = Borrowed(
    "tensorflow.python.eager.context", "context_safe", feature="the peak of a function run by kerasmem.run_isolated"
)
_DETERMINISM = Borrowed(
    "tensorflow.python.framework.config",
    "is_op_determinism_enabled",
    feature="kerasmem.fit(isolated=True) with deterministic operations",
)


def devices_are_started() -> bool:
    """Return whether TensorFlow has started its devices; False where that cannot be known."""
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
        NotAvailableError: TensorFlow does not tell.
    """
    return bool(_DETERMINISM.get()())
