"""Changes to a Keras model, with or without weights, that the code of remedies makes too.

Each function changes the model it is given, and returns it.
"""

from __future__ import annotations

import math
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras
from kerasmem.models.own_step import has_own_step


def with_policy(model: Any, policy: str) -> Any:
    """Let every layer that computes in float32 compute by another policy; weights stay float32."""
    for layer in flatten_layers(model):
        if layer.dtype_policy.name == "float32":
            layer.dtype_policy = policy
    return model


def with_lora(model: Any, rank: int) -> Any:
    """Train thin factors beside the kernels of the backbone, and the head as it was."""
    for layer in model.layers[: head_start(model)]:
        for inner in flatten_layers(layer):
            if takes_lora(inner, rank):
                inner.enable_lora(rank)
            elif not flatten_layers(inner, include_self=False):
                inner.trainable = False
    return model


def with_micro_batches(model: Any, pieces: int) -> Any:
    """Let a compiled model's `train_step` take one micro-batch and the update, by the step of `kerasmem.fit`.

    `kerasmem.fit` runs the update after the last piece in a function of its own. Here it follows in the same step, when
    everything else of it is done, so that one estimate covers the larger of the two.

    Args:
        model: compiled.
        pieces: micro-batches of a batch, whose slices of gradients the update takes together.

    Raises:
        UsageError: If the model has a step of its own.
    """
    if has_own_step(model):
        raise UsageError("the model has a train_step of its own, whose gradients cannot be divided")
    from kerasmem.training.steps.engine import MicroStep

    step = MicroStep(model)

    def train_step(data: Any) -> Any:
        import tensorflow as tf

        logs, slices = step.accumulate(data, tf.constant(1.0 / pieces), None)
        sums = [each.read_value() for each in step.accumulators if each is not None]
        with tf.control_dependencies(tf.nest.flatten([logs, slices, sums])):
            step.apply([[tf.concat([part] * pieces, 0) for part in each] for each in slices])
        return logs

    model.train_step = train_step
    return model


def takes_lora(layer: Any, rank: int) -> bool:
    """Return whether a layer can train factors of a rank in place of its kernel, and would train fewer numbers."""
    if not hasattr(layer, "enable_lora") or not layer.built or getattr(layer, "lora_enabled", False):
        return False
    kernel = getattr(layer, "kernel", None) if hasattr(layer, "kernel") else getattr(layer, "embeddings", None)
    shape = tuple(getattr(kernel, "shape", ()))
    if len(shape) < 2:
        return False
    numbers = math.prod(shape)
    return rank * (numbers // shape[-1] + shape[-1]) < numbers


def head_start(model: Any) -> int:
    """Return the index in `model.layers` of the first layer of the head; the backbone is before it.

    Where the model holds another model, as in transfer learning, the head is what comes after the last of these.
    Otherwise it is the dense layers at the end, but the last layer with weights alone where all of them are dense.
    """
    keras = import_keras()
    layers = list(model.layers)
    nested = [place for place, layer in enumerate(layers) if isinstance(layer, keras.Model) and layer.weights]
    if nested and nested[-1] + 1 < len(layers):
        return nested[-1] + 1
    with_weights = [place for place, layer in enumerate(layers) if layer.weights]
    other = [place for place in with_weights if not isinstance(layers[place], keras.layers.Dense)]
    return other[-1] + 1 if other and other[-1] != with_weights[-1] else with_weights[-1] if with_weights else 0
