"""The step of one micro-batch as `kerasmem.fit` runs it: its gradients are added to a set of accumulators.

`kerasmem.fit` runs the update after the last piece in a function of its own. Here it follows in the same step, when
everything else of it is done, so that one estimate covers the larger of the two.
"""

from __future__ import annotations

import inspect
from typing import Any

from kerasmem.compat.keras_compile import compute_loss
from kerasmem.compat.keras_variables import give_value, has_value
from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras
from kerasmem.models.compiling import has_own_step


def with_micro_batches(model: Any) -> Any:
    """Let a compiled model's `train_step` take a micro-batch, add up its gradients, and then update.

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
