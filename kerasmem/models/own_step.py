"""Overrides of a model: a training step, a `compile`, no `call`, optimizers beside the compiled one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.models.backend import import_keras


def takes_settings(model: Any) -> bool:
    """Return whether the model's `compile` can be given an optimizer, a loss and metrics as Keras's own can."""
    parameters = inspect.signature(model.compile).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes_any or {"optimizer", "loss", "metrics", "jit_compile"} <= set(parameters)


def has_own_step(model: Any) -> bool:
    """Return whether the model's class brings a training step of its own."""
    keras = import_keras()
    return type(model).train_step not in (keras.Model.train_step, keras.Sequential.train_step)


def has_call(model: Any) -> bool:
    """Return whether the model has a `call`, and not a `train_step` alone."""
    return type(model).call is not import_keras().Model.call


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers in the attributes of a model and of the models inside it, each once.

    The one it was compiled with comes first, one inside another behind it.
    """
    optimizer_class = import_keras().Optimizer
    kept = (value for each in flatten_layers(model) for attribute in vars(each).values() for value in _in(attribute))
    found: dict[int, Any] = {}
    for optimizer in (getattr(model, "optimizer", None), *kept):
        for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
            if isinstance(each, optimizer_class):
                found.setdefault(id(each), each)
    return list(found.values())


def optimizer_variables(model: Any) -> list[Any]:
    """Return the variables of all optimizers of a model, each once."""
    found = {id(variable): variable for optimizer in optimizers_of(model) for variable in optimizer.variables}
    return list(found.values())


def variables_of(model: Any, mode: str = "train") -> dict[int, tuple[Any, str]]:
    """Return the variables of a model, of its metrics and, if it trains, of its optimizers, by their ids.

    Each comes with its kind, "weights", "metrics" or "optimizer", in the order in which Keras makes them.
    """
    metrics = {id(each) for each in model.metrics_variables}
    found = {
        id(each): (each, "metrics" if id(each) in metrics else "weights")
        for each in (*model.variables, *model.metrics_variables)
    }
    for each in optimizer_variables(model) if mode == "train" else ():
        found.setdefault(id(each), (each, "optimizer"))
    return found


def keeps_optimizers(model: Any) -> bool:
    """Return whether a model has optimizers beside the one that Keras's `compile` gave it."""
    own = getattr(model, "optimizer", None)
    known = (own, getattr(own, "inner_optimizer", None))
    return any(not any(each is one for one in known) for each in optimizers_of(model))


def _in(value: Any) -> Iterator[Any]:
    """Yield an attribute's value, or the values in it if it is a list or a dictionary."""
    yield from value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
