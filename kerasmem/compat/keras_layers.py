"""Layers of Keras: inner layers, calls, name scopes, added losses, graphs of Functional models."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kerasmem.compat.borrowing import Borrowed
from kerasmem.compat.patching import patch

FLATTEN = Borrowed("keras:Layer._flatten_layers", feature="layers kept in dictionaries and nested lists of a layer")
OPEN_NAME_SCOPE = Borrowed("keras:Layer._open_name_scope", feature="memory by layer in estimates and profiles")
CALL_LAYER = Borrowed("keras:Layer.__call__", feature="estimates")
CALL_OPERATION = Borrowed("keras:Operation.__call__", feature="estimates")
# Builds a compiled model's weights, metrics and optimizer slots from the shapes of `train_step`'s argument.
symbolic_build = Borrowed("keras:Model._symbolic_build", feature="estimates that trace the model, kerasmem.fit")
# Returns whether Keras compiles the model with XLA if `jit_compile="auto"`.
supports_jit = Borrowed("keras.src.trainers.trainer:model_supports_jit", feature="jit_compile='auto'")
_RNN, _CUDNN = "keras.src.backend.tensorflow.rnn", "recurrent layers in method 'graph' for a card"
CUDNN_OK = Borrowed(f"{_RNN}:cudnn_ok", feature=_CUDNN)
SEES_GPU = Borrowed(f"{_RNN}:_is_gpu_available", feature=_CUDNN)
BROADCAST = Borrowed("keras.src.ops:broadcast_to", feature="estimates of huge Normalization layers in little memory")
_LARGE_CONSTANT = 2**20  # elements
_FUNCTIONAL = "keras.src.models.functional"
_RECOMPUTE = "kerasmem.recompute"
_RUN = Borrowed(f"{_FUNCTIONAL}:Functional._run_through_graph", feature=_RECOMPUTE)
_FILL_IN = Borrowed("keras.src.ops.symbolic_arguments:SymbolicArguments.fill_in", feature=_RECOMPUTE)
LEGACY_LAYERS = Borrowed(
    "keras.src.legacy.layers:ThresholdedReLU", feature="model files with ThresholdedReLU, RandomHeight or RandomWidth"
)


def gpu_assumed() -> contextlib.AbstractContextManager[None]:
    """Make Keras's recurrent layers use cuDNN in this thread if their settings allow it, as with a GPU.

    If Keras detects GPUs by another function, nothing changes.
    """
    return patch(*SEES_GPU.owner(), lambda sees_gpu: True) if SEES_GPU.exists() else contextlib.nullcontext()


def takes_cudnn(layer: Any) -> bool:
    """Return whether Keras runs a layer with cuDNN on a GPU, and therefore without XLA."""
    import keras

    if not CUDNN_OK.exists() or not isinstance(layer, (keras.layers.LSTM, keras.layers.GRU)):
        return False
    if getattr(layer, "use_cudnn", False) not in ("auto", True):
        return False
    settings = (layer.activation, layer.recurrent_activation, layer.unroll, layer.use_bias)
    reset_after = {"reset_after": layer.reset_after} if isinstance(layer, keras.layers.GRU) else {}
    with gpu_assumed():
        return bool(CUDNN_OK(*settings, **reset_after))


def flatten_layers(layer: Any, include_self: bool = True) -> list[Any]:
    """Return the unique layers inside a layer, at any depth.

    Args:
        layer: a Keras layer or model.
        include_self: whether to start with the layer itself. Defaults to True.
    """
    return list(layer._flatten_layers(include_self=include_self))


def name_scopes_replaced(
    scope_of: Callable[[Any, Callable[[Any], Any]], Any],
) -> contextlib.AbstractContextManager[None]:
    """Replace the name scopes of calls of layers in this thread.

    Args:
        scope_of: function that returns the scope, from a layer and the function that returns Keras's scope.

    Raises:
        NotAvailableError: If Keras opens name scopes by another method.
    """
    return patch(*OPEN_NAME_SCOPE.owner(), lambda open_scope, layer: scope_of(layer, open_scope))


def without_name_scopes() -> contextlib.AbstractContextManager[None]:
    """Skip the name scopes of layers in this thread.

    TensorFlow's graphs refuse scopes such as "my layer (v2)", which Keras allows as names. If Keras opens scopes by
    another method, nothing changes.
    """
    if not OPEN_NAME_SCOPE.exists():
        return contextlib.nullcontext()
    return name_scopes_replaced(lambda layer, open_scope: contextlib.nullcontext())


@contextlib.contextmanager
def calls_replaced(function: Callable[..., Any]) -> Iterator[None]:
    """Route the calls of layers and operations in this thread through a function.

    Args:
        function: function to call with Keras's function, the layer or operation, and the arguments of the call. For a
            layer, it is called once, before Keras casts the arguments.
    """
    import keras

    def call_operation(call: Callable[..., Any], operation: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(operation, keras.Layer):
            return call(operation, *args, **kwargs)
        return function(call, operation, *args, **kwargs)

    with patch(*CALL_LAYER.owner(), function), patch(*CALL_OPERATION.owner(), call_operation):
        yield


@contextlib.contextmanager
def normalizations_untouched() -> Iterator[None]:
    """Reserve the constants of large `Normalization` layers in this thread without touching their memory.

    The constants are copies of variables, which Keras would allocate for them, or a given mean and variance for each
    input.
    """
    import keras

    def is_large(shape: Sequence[int]) -> bool:
        return keras.backend.backend() == "tensorflow" and math.prod(shape) >= _LARGE_CONSTANT

    def reserve(layer: Any) -> None:
        layer.mean = unwritten_tensor(layer._broadcast_shape, layer.compute_dtype)
        layer.variance = unwritten_tensor(layer._broadcast_shape, layer.compute_dtype)

    def finalize(finalize_state: Callable[[Any], None], layer: Any) -> None:
        is_adapted = layer.built and layer.input_mean is None
        if is_adapted and is_large(getattr(layer, "_broadcast_shape", ())):
            reserve(layer)
        else:
            finalize_state(layer)

    def broadcast(broadcast_to: Callable[..., Any], x: Any, shape: Sequence[int]) -> Any:
        fits = all(size in (1, whole) for size, whole in zip(x.shape, shape, strict=False))  # scalar or same rank
        return x if fits and is_large(shape) else broadcast_to(x, shape)

    def build(build_layer: Callable[[Any, Any], None], layer: Any, input_shape: Any) -> None:
        with patch(*BROADCAST.owner(), broadcast) if BROADCAST.exists() else contextlib.nullcontext():
            build_layer(layer, input_shape)
        if layer.built and layer.input_mean is not None and is_large(layer._broadcast_shape):
            reserve(layer)

    layer_class = keras.layers.Normalization
    with patch(layer_class, "finalize_state", finalize), patch(layer_class, "build", build):
        yield


def unwritten_tensor(shape: Sequence[int], dtype: Any) -> Any:
    """Create a tensor in reserved memory that is never written, and so occupies no pages."""
    import tensorflow as tf

    with tf.init_scope(), tf.device("/device:CPU:0"):
        return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False)


def loss_owner(loss: Any, layers: list[Any]) -> Any:
    """Return the layer that added a loss, or None."""
    return next((layer for layer in layers if id(loss) in layer._loss_ids), None)


def replace_losses(layer: Any, loss: Any) -> None:
    """Replace the losses that a layer has added in this call by one loss."""
    import keras

    layer._loss_ids.clear()
    keras.Layer.add_loss(layer, loss)  # models refuse `add_loss`


def weights_added_to_train(layer: Any) -> list[Any]:
    """Return the weights that a layer itself added as trainable, also if they are frozen."""
    return list(getattr(layer, "_trainable_variables", ()))


def draws_numbers(layer: Any) -> bool:
    """Return whether a layer has a random generator."""
    return bool(getattr(layer, "_seed_generators", None))


@functools.cache
def functional_class() -> Any:
    """Return the class of `keras.Model(inputs, outputs)`, which Keras does not export."""
    import keras

    # Keras 3.12 requires a layer between them. Explicit names do not affect the numbers of other layers.
    tensor = keras.Input((1,), name="kerasmem_input")
    outputs = keras.layers.Identity(name="kerasmem_identity")(tensor)
    return type(keras.Model(tensor, outputs, name="kerasmem_functional"))


def graph_of(model: Any) -> Any:
    """Return the Functional model inside a Sequential one (None if it is not built), or the model itself."""
    import keras

    return model._functional if isinstance(model, keras.Sequential) else model


def calls_of(model: Any) -> list[Any]:
    """Return the calls of a Functional model in execution order.

    A call has `operation`, `arguments`, `outputs` and `input_tensors`.
    """
    nodes = model._nodes_by_depth
    return [
        node for depth in sorted(nodes, reverse=True) for node in nodes[depth] if node.operation and not node.is_input
    ]


def check_recomputable() -> None:
    """Check that Keras runs a Functional model as `kerasmem.recompute` expects.

    Raises:
        NotAvailableError: If Keras lacks the methods for it.
    """
    for borrowed in (_RUN, _FILL_IN):
        borrowed.get()
