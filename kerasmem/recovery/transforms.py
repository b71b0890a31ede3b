"""Changes to a Keras model, with or without weights, that the code of remedies makes too.

Each function changes the model it is given, and returns it.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.compat.keras_state import give_value, has_value
from kerasmem.compat.keras_training import compute_loss
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


def with_micro_batches(model: Any) -> Any:
    """Let a compiled model's `train_step` take a micro-batch as `kerasmem.fit` does, add up its gradients, and update.

    `kerasmem.fit` runs the update after the last piece in a function of its own. Here it follows in the same step,
    when everything else of it is done, so that one estimate covers the larger of the two.

    Raises:
        UsageError: the model has a step of its own.
    """
    if has_own_step(model):
        raise UsageError("the model has a train_step of its own, whose gradients cannot be divided")
    keras = import_keras()
    accumulators = [
        keras.Variable("zeros", shape=tuple(each.shape), dtype=each.dtype, trainable=False, name=f"gradient_{place}")
        for place, each in enumerate(model.trainable_variables)
    ]

    def train_step(data: Any) -> Any:
        import tensorflow as tf

        for each in accumulators:
            if not has_value(each):  # a step that really runs
                with tf.init_scope():
                    give_value(each)
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            takes_training = "training" in inspect.signature(model.call).parameters
            predicted = model(x, training=True) if takes_training else model(x)
            loss = compute_loss(model, x=x, y=y, y_pred=predicted, sample_weight=weight, training=True)
            scaled = model.optimizer.scale_loss(loss)
        trainable = model.trainable_variables
        gradients = tape.gradient(scaled, [each.value for each in trainable])
        done = [_add(each.value, gradient) for each, gradient in zip(accumulators, gradients, strict=True)]
        logs = model.compute_metrics(x, y, predicted, sample_weight=weight)
        finished = [each for each in (*done, *keras.tree.flatten(logs)) if each is not None]
        with tf.control_dependencies(finished):
            whole = [
                None if gradient is None else each.value.read_value()
                for each, gradient in zip(accumulators, gradients, strict=True)
            ]
            if trainable:
                model.optimizer.apply_gradients(zip(whole, trainable, strict=True))
        return logs

    model.train_step = train_step
    return model


def _add(accumulator: Any, gradient: Any) -> Any:
    import tensorflow as tf

    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return accumulator.scatter_add(gradient)
    return accumulator.assign_add(tf.cast(gradient, accumulator.dtype))


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
