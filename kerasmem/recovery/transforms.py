"""Changes to a Keras model, with or without weights, which the code of remedies makes too.

Each function changes the model in place and returns it.
"""

from __future__ import annotations

import math
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras
from kerasmem.models.own_step import has_own_step


def with_policy(model: Any, policy: str) -> Any:
    """Set another dtype policy for every float32 layer. Weights stay float32."""
    for layer in flatten_layers(model):
        if layer.dtype_policy.name == "float32":
            layer.dtype_policy = policy
    return model


def with_lora(model: Any, rank: int) -> Any:
    """Train low-rank factors instead of the kernels of the backbone, and the head as before."""
    for layer in model.layers[: head_start(model)]:
        for inner in flatten_layers(layer):
            if takes_lora(inner, rank):
                inner.enable_lora(rank)
            elif not flatten_layers(inner, include_self=False):
                inner.trainable = False
    return model


def with_micro_batches(model: Any, pieces: int) -> Any:
    """Replace `train_step` of a compiled model by one micro-batch and the update of `kerasmem.fit`.

    `kerasmem.fit` runs the update after the last piece in another function. Here the update follows the piece in the
    same step, so that one estimate covers the larger of the two.

    Args:
        model: compiled.
        pieces: micro-batches of a batch; the update needs the gradient slices of all of them.

    Raises:
        UsageError: If the model has a custom step.
    """
    if has_own_step(model):
        raise UsageError("micro_batches: the model overrides train_step, so its batches cannot be divided")
    from kerasmem.training.steps.engine import MicroStep

    step = MicroStep(model)

    def train_step(data: Any) -> Any:
        import tensorflow as tf

        logs, slices = step.accumulate(data, tf.constant(1.0 / pieces), None)
        sums = [accumulator.read_value() for accumulator in step.accumulators if accumulator is not None]
        with tf.control_dependencies(tf.nest.flatten([logs, slices, sums])):
            step.apply([[tf.concat([part] * pieces, 0) for part in pair] for pair in slices])
        return logs

    model.train_step = train_step
    return model


def takes_lora(layer: Any, rank: int) -> bool:
    """Return whether a layer can train factors of a rank instead of its kernel, with fewer parameters."""
    if not hasattr(layer, "enable_lora") or not layer.built or getattr(layer, "lora_enabled", False):
        return False
    kernel = getattr(layer, "kernel", None) if hasattr(layer, "kernel") else getattr(layer, "embeddings", None)
    shape = tuple(getattr(kernel, "shape", ()))
    if len(shape) < 2:
        return False
    parameters = math.prod(shape)
    return rank * (parameters // shape[-1] + shape[-1]) < parameters


def head_start(model: Any) -> int:
    """Return the index in `model.layers` of the first layer of the head, after the backbone.

    If the model contains another model, as in transfer learning, the head follows the last of these. Otherwise the
    head is the dense layers at the end, or only the last layer with weights if all layers are dense.
    """
    keras = import_keras()
    layers = list(model.layers)
    nested = [index for index, layer in enumerate(layers) if isinstance(layer, keras.Model) and layer.weights]
    if nested and nested[-1] + 1 < len(layers):
        return nested[-1] + 1
    with_weights = [index for index, layer in enumerate(layers) if layer.weights]
    other = [index for index in with_weights if not isinstance(layers[index], keras.layers.Dense)]
    if other and other[-1] != with_weights[-1]:
        return other[-1] + 1
    return with_weights[-1] if with_weights else 0
