"""Checks of a model: whether it is supported, whether its batches can be divided, and whether results then differ."""

from __future__ import annotations

from typing import Any

import keras

from kerasmem.compat.keras_layers import draws_numbers, flatten_layers
from kerasmem.compat.keras_training import has_added_losses, is_under_strategy
from kerasmem.errors import UsageError
from kerasmem.models.own_step import has_own_step

_SHARES = ("rate", "dropout", "recurrent_dropout")
SUMS_PENALTIES = keras.__version__.startswith("3.12.")  # later versions divide activity penalties by the batch
_STEPS = {
    "train": ("train_step", "make_train_function", "compute_loss"),
    "test": ("test_step", "make_test_function", "compute_loss"),
}


def check_fit(model: Any) -> None:
    """Refuse a model with steps that can neither be undone nor divided.

    Raises:
        UsageError: If the model is not supported; the message has the fix.
    """
    if keras.backend.backend() != "tensorflow":
        raise UsageError(
            "fit: only the TensorFlow backend is supported; use model.fit, with kerasmem.ResumeTraining to resume"
        )
    if not isinstance(model, keras.Model):
        raise UsageError(f"model: give a compiled Keras model, not {type(model).__name__}")
    if not getattr(model, "compiled", False) or (model.optimizer is None and not has_own_step(model)):
        raise UsageError("model: call model.compile(optimizer, loss) first")
    if is_under_strategy(model):
        name = type(model.distribute_strategy).__name__
        raise UsageError(f"fit: {name} divides batches itself; use model.fit, with kerasmem.ResumeTraining to resume")
    stateful = [each.name for each in flatten_layers(model) if isinstance(each, keras.layers.RNN) and each.stateful]
    if stateful:
        raise UsageError(
            f"model: {', '.join(stateful)} carries its state from batch to batch; use stateful=False, or model.fit"
        )
    if any(getattr(variable, "overwrite_with_gradient", False) for variable in model.trainable_variables):
        raise UsageError("model: float8 training replaces its scales by their gradients, which do not add up")
    for each in keras.tree.flatten(model.loss):
        if isinstance(each, keras.losses.Loss) and each.reduction in (None, "none"):
            raise UsageError(f'loss: {each.name} has reduction=None; use reduction="sum" for the same gradients')


def uneven_layers(model: Any) -> str | None:
    """Return a warning about layers for which micro-batches differ from the batch, or None."""
    statistics, random, added = [], [], []
    for layer in flatten_layers(model, include_self=False):
        if isinstance(layer, (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)):
            if layer.trainable:
                statistics.append(layer.name)
        elif draws_numbers(layer):
            shares = [getattr(layer, name) for name in _SHARES if hasattr(layer, name)]
            if any(shares) or not shares:  # a GRU has a generator also if it drops nothing
                random.append(layer.name)
        elif SUMS_PENALTIES if layer.activity_regularizer is not None else has_added_losses(layer):
            added.append(layer.name)
    reasons = (
        (statistics, "statistics are those of each micro-batch (not so if frozen, or with LayerNormalization)"),
        (random, "random numbers are drawn for each micro-batch, others than for the whole"),
        (added, "penalties that a layer adds are taken for means over the rows"),
    )
    parts = [f"{_list(names)}: {why}" for names, why in reasons if names]
    return "micro-batches are not the same as the whole batch for " + "; ".join(parts) if parts else None


def _list(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def division_obstacle(model: Any, kind: str) -> str | None:
    """Return the reason why a batch cannot be divided with the same result, or None.

    Args:
        model: compiled.
        kind: "train" or "test".
    """
    for name in _STEPS[kind]:
        if not _is_keras_own(type(model), name):
            return f"{type(model).__name__} has its own {name}(), whose gradients and updates are not known"
    return None


def _is_keras_own(cls: type, name: str) -> bool:
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return owner is None or owner.__module__.split(".")[0] == "keras"
