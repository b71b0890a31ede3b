"""What a model brings of its own in place of what Keras does: a training step, a `compile`, no `call`."""

from __future__ import annotations

import inspect
from typing import Any

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
    """Return whether the model says what it computes from its inputs; without it only `train_step` does."""
    return type(model).call is not import_keras().Model.call
