"""Variables of Keras that were made without a value."""

from __future__ import annotations

from typing import Any

from kerasmem.compat.borrowing import Borrowed

INITIALIZE = Borrowed("keras", "Variable._deferred_initialize", feature="real steps of a model")


def has_value(variable: Any) -> bool:
    """Return whether the variable has a value; a canary test holds the attribute's name."""
    return variable._value is not None


def give_value(variable: Any) -> None:
    """Initialise the variable where it has no value yet."""
    if not has_value(variable):
        INITIALIZE.get()(variable)
