"""Layers of Keras: inner layers, calls and their name scopes, added losses, the graph of a Functional model."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kerasmem.compat.borrowing import Borrowed
from kerasmem.compat.patching import patched

FLATTEN = Borrowed("keras:Layer._flatten_layers", feature="layers kept in dictionaries and nested lists of a layer")
OPEN_NAME_SCOPE = Borrowed("keras:Layer._open_name_scope", feature="memory by layer in estimates and profiles")
CALL_LAYER = Borrowed("keras:Layer.__call__", feature="estimates")
CALL_OPERATION = Borrowed("keras:Operation.__call__", feature="estimates")
# Builds a compiled model's weights, metrics and optimizer slots by the shapes of `train_step`'s argument.
symbolic_build = Borrowed("keras:Model._symbolic_build", feature="estimates that trace the model, kerasmem.fit")
# Whether Keras compiles the model with XLA under `jit_compile="auto"`.
supports_jit = Borrowed("keras.src.trainers.trainer:model_supports_jit", feature="jit_compile='auto'")
_RNN, _CUDNN = "keras.src.backend.tensorflow.rnn", "recurrent layers in method 'graph' for a card"
CUDNN_OK = Borrowed(f"{_RNN}:cudnn_ok", feature=_CUDNN)
SEES_GPU = Borrowed(f"{_RNN}:_is_gpu_available", feature=_CUDNN)
_LARGE_CONSTANT = 2**20  # elements
_FUNCTIONAL = "keras.src.models.functional"
_RECOMPUTE = "kerasmem.recompute"
_RUN = Borrowed(f"{_FUNCTIONAL}:Functional._run_through_graph", feature=_RECOMPUTE)
_FILL_IN = Borrowed("keras.src.ops.symbolic_arguments:SymbolicArguments.fill_in", feature=_RECOMPUTE)
LEGACY_LAYERS = Borrowed(
    "keras.src.legacy.layers:ThresholdedReLU", feature="model files with ThresholdedReLU, RandomHeight or RandomWidth"
)


def gpu_assumed() -> contextlib.AbstractContextManager[None]:
    """Let Keras's recurrent layers take cuDNN's kernels in this thread, as if it had a GPU.

    They do so if their settings allow it. Nothing changes if Keras asks for a GPU in another way.
    """
    return patched(*SEES_GPU.owner(), lambda sees_gpu: True) if SEES_GPU.exists() else contextlib.nullcontext()


def takes_cudnn(layer: Any) -> bool:
    """Return whether Keras runs a layer with cuDNN, and so without XLA, on a GPU."""
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
    """Return the layers inside a layer, at any depth, each once.

    Args:
        layer: a Keras layer or model.
        include_self: begin with the layer itself.
    """
    return list(layer._flatten_layers(include_self=include_self))


def name_scopes_replaced(
    scope_of: Callable[[Any, Callable[[Any], Any]], Any],
) -> contextlib.AbstractContextManager[None]:
    """Open other name scopes around the calls of layers in this thread.

    Args:
        scope_of: from a layer, and the function that returns the scope Keras opens for one, to the scope to open.

    Raises:
        NotAvailableError: If Keras opens them in another way.
    """
    return patched(*OPEN_NAME_SCOPE.owner(), lambda open_scope, layer: scope_of(layer, open_scope))


def without_name_scopes() -> contextlib.AbstractContextManager[None]:
    """Have layers open no name scope in this thread.

    TensorFlow's graphs refuse scopes such as "my layer (v2)", which are names like any other to Keras. If Keras
    opens them in another way, it goes on doing so.
    """
    if not OPEN_NAME_SCOPE.exists():
        return contextlib.nullcontext()
    return name_scopes_replaced(lambda layer, open_scope: contextlib.nullcontext())


@contextlib.contextmanager
def calls_noted(function: Callable[..., Any]) -> Iterator[None]:
    """Have a function make the calls of layers and operations in this thread.

    Args:
        function: called with Keras's own function, the layer or operation, and the call's arguments. The call of a
            layer is noted once, before Keras casts its arguments.
    """
    import keras

    def call_operation(call: Callable[..., Any], operation: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(operation, keras.Layer):
            return call(operation, *args, **kwargs)
        return function(call, operation, *args, **kwargs)

    with patched(*CALL_LAYER.owner(), function), patched(*CALL_OPERATION.owner(), call_operation):
        yield


def normalizations_untouched() -> contextlib.AbstractContextManager[None]:
    """Keep the constants of large `Normalization` layers that this thread builds in memory that is never touched.

    They are copies of the layer's variables, so that Keras would allocate those with them.
    """
    import keras

    def finalize(finalize_state: Callable[[Any], None], layer: Any) -> None:
        shape = getattr(layer, "_broadcast_shape", ())
        is_adapted = layer.built and layer.input_mean is None
        if keras.backend.backend() != "tensorflow" or not is_adapted or math.prod(shape) < _LARGE_CONSTANT:
            finalize_state(layer)
        else:
            layer.mean, layer.variance = untouched(shape, layer.compute_dtype), untouched(shape, layer.compute_dtype)

    return patched(keras.layers.Normalization, "finalize_state", finalize)


def untouched(shape: Sequence[int], dtype: Any) -> Any:
    """Return a tensor in reserved memory that is never written, and so takes no pages."""
    import tensorflow as tf

    with tf.init_scope(), tf.device("/device:CPU:0"):
        return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False)


def loss_owner(loss: Any, layers: list[Any]) -> Any:
    """Return the layer that added a loss, or None."""
    return next((each for each in layers if id(loss) in each._loss_ids), None)


def replace_losses(layer: Any, loss: Any) -> None:
    """Make a loss the only one that a layer has added in this call."""
    import keras

    layer._loss_ids.clear()
    keras.Layer.add_loss(layer, loss)  # a model's own refuses


def weights_added_to_train(layer: Any) -> list[Any]:
    """Return the weights of a layer's own that were added to be trained, frozen since or not."""
    return list(getattr(layer, "_trainable_variables", ()))


def draws_numbers(layer: Any) -> bool:
    """Return whether a layer has its own random generator."""
    return bool(getattr(layer, "_seed_generators", None))


@functools.cache
def functional_class() -> Any:
    """Return the class that `keras.Model(inputs, outputs)` makes. A public way: Keras exports it under no name."""
    import keras

    # Keras 3.12 asks for a layer between the two. Names of their own leave Keras's numbering of other layers alone.
    tensor = keras.Input((1,), name="kerasmem_input")
    outputs = keras.layers.Identity(name="kerasmem_identity")(tensor)
    return type(keras.Model(tensor, outputs, name="kerasmem_functional"))


def graph_of(model: Any) -> Any:
    """Return the Functional model inside a Sequential one (None if not built), or the model itself."""
    import keras

    return model._functional if isinstance(model, keras.Sequential) else model


def calls_of(model: Any) -> list[Any]:
    """Return the calls of a Functional model in execution order.

    Each has `operation`, `arguments`, `outputs` and `input_tensors`.
    """
    nodes = model._nodes_by_depth
    return [
        each for depth in sorted(nodes, reverse=True) for each in nodes[depth] if each.operation and not each.is_input
    ]


def check_recomputable() -> None:
    """Check that Keras runs a Functional model as `kerasmem.recompute` expects.

    Raises:
        NotAvailableError: If Keras runs one in another way.
    """
    for each in (_RUN, _FILL_IN):
        each.get()
