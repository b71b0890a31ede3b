"""The model with a change made to it: the same calls of Keras that the code to paste has.

Each takes a Keras model, with or without weights, and returns the changed model: a new one where Keras must rebuild
it (another input, other layers), otherwise the same.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from kerasmem.compat.keras_compile import compute_loss
from kerasmem.compat.keras_functional import functional_class
from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.compat.keras_variables import give_value, has_value
from kerasmem.errors import ModelError, UsageError
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.inputs import input_name
from kerasmem.models.own_step import has_own_step
from kerasmem.recovery.changes import Change

# What a user need not read of a function whose source stands in a script.
_OURS = (": Any", " -> Any", " -> bool", "    keras = import_keras()\n", "  # fmt: skip")


def transformed(model: Any, change: Change) -> Any:
    """Return the model with a change; the model itself where the change is one of the step alone.

    Raises:
        UsageError: the change cannot be made to this model.
        ModelError: Keras refuses.
    """
    make = _TRANSFORMS.get(change.kind)
    if make is None:
        return model
    try:
        return make(model, change.value)
    except (UsageError, ModelError):
        raise
    except Exception as error:
        raise ModelError(f"{change.name}: Keras cannot make this change ({keras_reason(error)})") from error


def with_policy(model: Any, policy: str) -> Any:
    """Let every layer that computes in float32 compute by another policy; weights stay float32."""
    for layer in flatten_layers(model):
        if layer.dtype_policy.name == "float32":
            layer.dtype_policy = policy
    return model


def with_float32(model: Any, value: Any = None) -> Any:
    """Rebuild a model of float64 inputs or layers in float32."""
    return _cloned(model, clone_function=single, input_tensors=new_inputs(model, import_keras().Input, is_single=True))


def single(layer: Any) -> Any:
    """Return the layer in float32 where it computes in float64, else as it is."""
    config = layer.get_config()
    if layer.dtype_policy.name == "float64":
        config["dtype"] = "float32"
    return layer.__class__.from_config(config)


def with_separable(model: Any, value: Any = None) -> Any:
    """Rebuild the model with separable convolutions in place of those that mix space and channels."""
    return _cloned(model, clone_function=separable)


def separable(layer: Any) -> Any:
    """Return a separable convolution in place of one that mixes space and channels, another layer as it is."""
    keras = import_keras()
    config = layer.get_config()
    if not is_mixing(layer):
        return layer.__class__.from_config(config)
    kept = ("name", "filters", "kernel_size", "strides", "padding", "data_format", "dilation_rate", "activation",
            "use_bias", "dtype")  # fmt: skip
    made = getattr(keras.layers, f"Separable{type(layer).__name__}")
    return made.from_config({key: config[key] for key in kept})


def with_input_size(model: Any, shapes: Sequence[Sequence[int]]) -> Any:
    """Rebuild the model for inputs of other sizes, one shape an input; its weights keep their shapes.

    Raises:
        UsageError: they do not: the model is bound to its input's size.
    """
    smaller = _cloned(model, input_tensors=new_inputs(model, import_keras().Input, shapes))
    if [tuple(each.shape) for each in smaller.weights] != [tuple(each.shape) for each in model.weights]:
        raise UsageError("the model's weights depend on its input's size")
    return smaller


def with_frozen_backbone(model: Any, value: Any = None) -> Any:
    """Freeze every layer before the head."""
    for layer in model.layers[: head_start(model)]:
        layer.trainable = False
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
    """Return the place in `model.layers` where the head begins; what is before it is the backbone.

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


def is_mixing(layer: Any) -> bool:
    """Return whether a layer is a convolution that a separable one can stand in for."""
    keras = import_keras()
    return (
        type(layer) in (keras.layers.Conv1D, keras.layers.Conv2D)
        and layer.groups == 1
        and max(layer.kernel_size) > 1
        and layer.padding != "causal"
    )


def is_rebuilt(model: Any) -> bool:
    """Return whether `clone_model` gives the same model: a graph of layers without code of its own."""
    keras = import_keras()
    kinds = (keras.Sequential, keras.Model, functional_class())
    return type(model) in kinds and bool(getattr(model, "inputs", None))


def _cloned(model: Any, **options: Any) -> Any:
    keras = import_keras()
    if not is_rebuilt(model):
        raise UsageError("the model is not a graph of layers that Keras can rebuild (Sequential or functional)")
    recursive = {"recursive": True} if "clone_function" in options else {}
    return keras.models.clone_model(model, **options, **recursive)


def new_inputs(
    model: Any, make: Callable[..., Any], shapes: Sequence[Sequence[int | None]] | None = None, is_single: bool = False
) -> Any:
    """Return new inputs in the structure in which the model takes them.

    Args:
        model: whose inputs they replace.
        make: makes one from its shape without the batch, `dtype` and `name`, as `keras.Input` does.
        shapes: for each input; None: its own.
        is_single: float32 in place of float64.
    """
    made = []
    for each, shape in zip(model.inputs, shapes or [each.shape[1:] for each in model.inputs], strict=True):
        dtype = "float32" if is_single and each.dtype == "float64" else str(each.dtype)
        made.append(make(tuple(shape), dtype=dtype, name=input_name(each)))
    is_graph = isinstance(model, functional_class())  # a Sequential model takes one
    return import_keras().tree.pack_sequence_as(model.input, made) if is_graph else made[0]


def source_lines(function: Callable[..., Any]) -> list[str]:
    """Return the source of a function of this module, for a script that imports `keras`."""
    text = inspect.getsource(function)
    for each in _OURS:
        text = text.replace(each, "")
    return text.splitlines()


_TRANSFORMS: dict[str, Any] = {
    "float32": with_float32, "dtype_policy": with_policy, "separable": with_separable, "input_size": with_input_size,
    "freeze": with_frozen_backbone, "lora": with_lora,
}  # fmt: skip
