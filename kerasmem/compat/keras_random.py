"""The random generator that Keras uses for layers and functions that are given none."""

from __future__ import annotations

from typing import Any

from kerasmem.compat.borrowing import Borrowed

GLOBAL_ATTRIBUTE = Borrowed(
    "keras.src.backend.common.global_state",
    "get_global_attribute",
    feature="restoring Keras's own random generator",
    parameters=("name",),
)


def global_generator() -> Any:
    """Return Keras's `SeedGenerator` for those who name none; None before its first use."""
    return GLOBAL_ATTRIBUTE.get()("global_seed_generator")


def draws_numbers(layer: Any) -> bool:
    """Return whether a layer has a random generator of its own."""
    return bool(getattr(layer, "_seed_generators", None))
