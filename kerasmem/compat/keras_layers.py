"""Layers and models of Keras: the layers inside, whether a model is a graph, the build of a step by shapes alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from kerasmem.compat.borrowing import Borrowed

FLATTEN = Borrowed(
    "keras", "Layer._flatten_layers", feature="the layers inside a model", parameters=("include_self", "recursive")
)
FUNCTIONAL = Borrowed("keras.src.models.functional", "Functional", feature="telling graphs of layers from other models")
SYMBOLIC_BUILD = Borrowed(
    "keras", "Model._symbolic_build", feature="building a step by shapes alone", parameters=("data_batch",)
)
SUPPORTS_JIT = Borrowed(
    "keras.src.trainers.trainer", "model_supports_jit", feature="jit_compile='auto'", parameters=("model",)
)
OPEN_NAME_SCOPE = Borrowed("keras", "Layer._open_name_scope", feature="names of layers that TensorFlow refuses")


def flatten_layers(layer: Any, include_self: bool = True) -> list[Any]:
    """Return a layer and all layers inside it, at any depth."""
    return list(FLATTEN.get()(layer, include_self=include_self))


def is_functional(model: Any) -> bool:
    """Return whether a model was made of inputs and outputs, so that it does nothing but call its layers."""
    return isinstance(model, FUNCTIONAL.get())


def symbolic_build(model: Any, batch: Any) -> None:
    """Build a compiled model with its optimizer and metrics for a batch of shapes; nothing is computed."""
    SYMBOLIC_BUILD.get()(model, data_batch=batch)


def supports_jit(model: Any) -> bool:
    """Return whether Keras compiles the model with XLA under `jit_compile="auto"`."""
    return bool(SUPPORTS_JIT.get()(model))


@contextlib.contextmanager
def without_name_scopes(applies: Callable[[], bool]) -> Iterator[None]:
    """Have layers open no name scope where `applies` says so.

    TensorFlow's graphs refuse scopes such as "my layer (v2)", which are names like any other to Keras.
    """
    import keras

    own = OPEN_NAME_SCOPE.get()

    def name_scope(layer: Any) -> Any:
        return contextlib.nullcontext() if applies() else own(layer)

    with mock.patch.object(keras.Layer, "_open_name_scope", name_scope):
        yield
