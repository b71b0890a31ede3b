"""Checks of a model: whether it is supported, whether its batches can be divided, and whether results then differ."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kerasmem.compat.keras_layers import draws_numbers, flatten_layers
from kerasmem.compat.keras_training import has_added_losses, is_under_strategy
from kerasmem.devices.training_device import allocator_limit, free_cpu_allocator_bytes
from kerasmem.errors import ModelError, UsageError
from kerasmem.models.own_step import has_own_step
from kerasmem.units import format_size

_SHARES = ("rate", "dropout", "recurrent_dropout")
_HALF = ("float16", "bfloat16")
INEXACT = "inexact"  # `micro_batches`: pieces are batches of their own if the step cannot be divided
MEAN, SUM = "mean", "sum"  # `loss_reduction`
_STEPS = {"train": ("train_step", "make_train_function"), "test": ("test_step", "make_test_function")}


def check_fit(model: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse a model with steps that can neither be undone nor divided, and arrays that are too large.

    Raises:
        UsageError: If the model is not supported; the message has the fix.
        ModelError: If the arrays do not fit into TensorFlow's allocator for the CPU.
    """
    if keras.backend.backend() != "tensorflow":
        raise UsageError(
            "fit: only the TensorFlow backend is supported; use model.fit, with kerasmem.ResumeTraining to resume"
        )
    if not isinstance(model, keras.Model):
        raise UsageError(f"model: give a compiled Keras model, not {type(model).__name__}")
    if not getattr(model, "compiled", False) or (model.optimizer is None and not has_own_step(model)):
        raise UsageError("model: call model.compile(optimizer, loss) first")
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
    _check_arrays(arguments)


def _check_arrays(arguments: Mapping[str, Any]) -> None:
    """Refuse arrays too large for TensorFlow's CPU allocator, which would end the process."""
    parts = keras.tree.flatten([arguments.get(name) for name in ("x", "y", "sample_weight", "validation_data")])
    floats = np.dtype(keras.config.floatx()).itemsize
    size = sum(
        each.size * (floats if each.dtype.kind == "f" else each.itemsize)
        for each in parts
        if isinstance(each, np.ndarray) and each.dtype.kind != "O"
    )
    free = free_cpu_allocator_bytes()
    if free is not None and size > free:
        raise ModelError(
            f"the arrays take {format_size(size)}, and TF_CPU_BFC_MEM_LIMIT_IN_MB leaves "
            f"{format_size(allocator_limit() or 0)} for them and the model; use a PyDataset or H5ChunkSequence"
        )


def uneven_layers(model: Any) -> str | None:
    """Return a warning about layers for which micro-batches differ from the batch, or None."""
    layers = flatten_layers(model, include_self=False)
    statistics, random, added, half = [], [], [], [layer.name for layer in layers if _sums_in_half(layer)]
    penalised = [layer.name for layer in layers if layer.activity_regularizer is not None]
    for layer in layers:
        if isinstance(layer, (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)):
            if layer.trainable:
                statistics.append(layer.name)
        elif draws_numbers(layer):
            shares = [getattr(layer, name) for name in _SHARES if hasattr(layer, name)]
            if any(shares) or not shares:  # a GRU has a generator also if it drops nothing
                random.append(layer.name)
        elif has_added_losses(layer) and layer.activity_regularizer is None:
            added.append(layer.name)
    reasons = (
        (statistics, "statistics are those of each micro-batch (not so if frozen, or with LayerNormalization)"),
        (random, "random numbers are drawn for each micro-batch, others than for the whole"),
        (added, "what add_loss was given is taken for a mean over the rows"),
        ([] if _averages_activity_penalties() else penalised, "activity penalties are taken for means over the rows"),
        # TensorFlow's kernels add up rows in bfloat16 itself: pieces are nearer to float32 than the whole is
        (half, "gradients are sums over the rows in half precision, rounded otherwise in micro-batches"),
    )
    parts = [f"{_list(names)}: {why}" for names, why in reasons if names]
    return "micro-batches are not the same as the whole batch for " + "; ".join(parts) if parts else None


@functools.cache
def _averages_activity_penalties() -> bool:
    """Return whether Keras divides activity penalties by the batch, as versions from 3.13 on do."""
    layer = keras.layers.Identity(activity_regularizer=keras.regularizers.L1(1.0))
    layer(keras.ops.ones((2, 1)))
    return float(layer.losses[0]) == 1.0


def _sums_in_half(layer: Any) -> bool:
    """Return whether a layer's gradients are sums in half precision, and not those of a layer inside it."""

    def sums(each: Any) -> bool:
        return bool(each.compute_dtype in _HALF and each.trainable_variables)

    return sums(layer) and not any(map(sums, flatten_layers(layer, include_self=False)))


def _list(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def division_obstacle(model: Any, kind: str, loss_reduction: str | None) -> str | None:
    """Return the reason why a batch cannot be divided with the same result, or None.

    Args:
        model: compiled.
        kind: "train" or "test".
        loss_reduction: "mean" or "sum" if the user states how the model's own `compute_loss` reduces over rows.
    """
    if is_under_strategy(model):
        return f"it was made under {type(model.distribute_strategy).__name__}, which divides batches itself"
    for name in _STEPS[kind]:
        if not _is_keras_own(type(model), name):
            return f"{type(model).__name__} has its own {name}(), whose gradients and updates are not known"
    if loss_reduction is None and has_own_loss(model):
        return f'{type(model).__name__} has its own compute_loss(); state its reduction, loss_reduction="mean" or "sum"'
    return None


def has_own_loss(model: Any) -> bool:
    """Return whether the model's class computes its loss in its own way."""
    return not _is_keras_own(type(model), "compute_loss")


def _is_keras_own(cls: type, name: str) -> bool:
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return owner is None or owner.__module__.split(".")[0] == "keras"
