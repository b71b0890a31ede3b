"""The optimizers of a model: the one it was compiled with, and those that it keeps for a training step of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.models.backend import import_keras


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers in the attributes of a model and of the models inside it, each once.

    The one it was compiled with comes first, one inside another behind it.
    """
    kept = (value for each in flatten_layers(model) for attribute in vars(each).values() for value in _in(attribute))
    found: dict[int, Any] = {}
    for optimizer in (getattr(model, "optimizer", None), *kept):
        for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
            if isinstance(each, import_keras().Optimizer):
                found.setdefault(id(each), each)
    return list(found.values())


def optimizer_variables(model: Any) -> list[Any]:
    """Return the variables of all optimizers of a model, each once."""
    found = {id(variable): variable for optimizer in optimizers_of(model) for variable in optimizer.variables}
    return list(found.values())


def keeps_optimizers(model: Any) -> bool:
    """Return whether a model has optimizers beside the one that Keras's `compile` gave it."""
    own = getattr(model, "optimizer", None)
    known = (own, getattr(own, "inner_optimizer", None))
    return any(not any(each is one for one in known) for each in optimizers_of(model))


def _in(value: Any) -> Iterator[Any]:
    """Yield an attribute's value, or the values in it where it is a list or a dictionary."""
    yield from value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
