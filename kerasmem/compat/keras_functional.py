"""The graph of a Functional model: the calls in it, their order, and how they are made."""

from __future__ import annotations

import functools
from typing import Any

from kerasmem.compat.borrowing import Borrowed

_FUNCTIONAL = "keras.src.models.functional"
_RECOMPUTE = "kerasmem.recompute"
_RUN = Borrowed(f"{_FUNCTIONAL}:Functional._run_through_graph(inputs, operation_fn, call_fn)", feature=_RECOMPUTE)
_FILL_IN = Borrowed("keras.src.ops.symbolic_arguments:SymbolicArguments.fill_in", feature=_RECOMPUTE)
LEGACY_LAYERS = Borrowed(
    "keras.src.legacy.layers:ThresholdedReLU", feature="model files with ThresholdedReLU, RandomHeight or RandomWidth"
)


@functools.cache
def functional_class() -> Any:
    """Return the class that `keras.Model(inputs, outputs)` makes. A public way: Keras exports it under no name."""
    import keras

    # Keras 3.12 asks for a layer between the two. Names of their own leave Keras's numbering of other layers alone.
    tensor = keras.Input((1,), name="kerasmem_input")
    outputs = keras.layers.Identity(name="kerasmem_identity")(tensor)
    return type(keras.Model(tensor, outputs, name="kerasmem_functional"))


def is_functional(model: Any) -> bool:
    """Return whether a model was made of inputs and outputs, so that it does nothing but call its layers."""
    return isinstance(model, functional_class())


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
