"""Calls of Keras's `fit`, `evaluate` and `predict` around a callback's hook.

Keras tells a callback neither which call a hook comes from nor that a call raised. A traceback that somebody keeps
holds everything that the call made, so that no object's end tells it either. The stack of the thread that asks does:
a call is under way exactly if its frame is on that stack. Only that thread's own frames are read. Frames of another
thread change while they are read, and CPython crashes then (python/cpython#99110, #111363, #118680, #152355).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def calls_under_way(method: str) -> Iterator[dict[str, Any]]:
    """Yield the local variables of a Keras method's calls in this thread, the innermost first.

    Args:
        method: "fit", "evaluate" or "predict".

    Yields:
        Each call's local variables: its arguments, with the `CallbackList` that Keras made in place of `callbacks`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == method:
            variables = frame.f_locals
            # A CallbackList, and not the plain list in a user's own function `fit` around it.
            if hasattr(variables.get("callbacks"), "on_train_batch_begin"):
                yield dict(variables)
        frame = frame.f_back  # type: ignore[assignment]
