"""Keras's state inside a segment that runs more than once, and such a segment on JAX.

`jax.checkpoint` repeats the computation that it traced, with the values at that time. So every variable that the
segment reads is an argument, and the function returns assigned values (statistics, states of seed generators), added
losses and Keras's masks. Each is then assigned or added once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import keras

from kerasmem.compat.keras_layers import flatten_layers, loss_owner, replace_losses
from kerasmem.compat.keras_state import (
    STATELESS_SCOPE,
    attribute,
    autocast,
    global_seed_state,
    in_symbolic_scope,
    mask_of,
    set_mask,
)

# From a call, its input tensors and its layer or operation to the flat list of outputs.
MakeCall = Callable[[Callable[[], Any], list[Any], Any], list[Any]]


class SegmentFunction(Protocol):
    """Maps the tensors that enter a segment to those that leave it. It may be called more than once."""

    def __call__(self, entering: list[Any], make_call: MakeCall = ...) -> list[Any]:
        """Run the segment. `make_call` makes each call of a layer."""


def call_at_once(call: Callable[[], Any], _inputs: list[Any], _layer: Any) -> list[Any]:
    """Return the outputs of a call, flat."""
    outputs: list[Any] = keras.tree.flatten(call())
    return outputs


class SegmentScope(keras.StatelessScope):
    """A stateless scope that starts from values and records the assigned variables.

    Args:
        values: variables and their values.
    """

    def __init__(self, values: Iterable[tuple[Any, Any]]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        outer = attribute(STATELESS_SCOPE)
        if outer is not None:
            self.state_mapping.update(outer.state_mapping)
        self.state_mapping.update((id(variable), value) for variable, value in values)
        self._assigned: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Record an assigned variable, and its value."""
        self._assigned[id(update[0])] = update[0]
        super().add_update(update)

    def updates(self) -> list[tuple[Any, Any]]:
        """Return the assigned variables with their last values."""
        return [(variable, self.state_mapping[key]) for key, variable in self._assigned.items()]


def variables_now(layers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return all variables of the layers, including states of seed generators, and their values now."""
    variables = {id(variable): variable for layer in layers for variable in layer.variables}
    common = global_seed_state()
    if common is not None:
        variables.setdefault(id(common), common)
    with autocast(None):
        values = {key: variable.value for key, variable in variables.items() if variable.dtype != "string"}
        return [variables[key] for key in values], list(values.values())


def jax_gradients_wanted() -> bool:
    """Return whether a gradient may follow. On JAX this is unknown, and recomputation is free without one."""
    return not in_symbolic_scope()


def run_jax_segment(run: SegmentFunction, inputs: Sequence[Any], layers: Sequence[Any], again: bool) -> list[Any]:
    """Run a segment on JAX.

    Args:
        run: function from the entering to the leaving tensors; called once.
        inputs: tensors with Keras's masks, or None for a missing optional input.
        layers: Keras layers of the segment, with its variables and losses.
        again: whether the gradient keeps only the inputs and runs the segment again.

    Returns:
        The leaving tensors, with their masks.
    """
    import jax

    if not again:
        return run(list(inputs))
    variables, values = variables_now(layers)
    inner = [part for layer in layers for part in flatten_layers(layer)]
    assigned: list[Any] = []
    owners: list[Any] = []

    def pure(values: Any, inputs: Any, masks: Any) -> Any:
        for tensor, mask in zip(inputs, masks, strict=True):
            set_mask(tensor, mask)
        with SegmentScope(zip(variables, values, strict=True)) as scope:
            outputs = run(inputs)
        updates = scope.updates()
        assigned[:] = [variable for variable, _ in updates]
        owners[:] = [loss_owner(loss, inner) or layers[0] for loss in scope.losses]
        return outputs, [mask_of(tensor) for tensor in outputs], [value for _, value in updates], list(scope.losses)

    outputs, masks, updates, losses = jax.checkpoint(pure)(values, list(inputs), [mask_of(tensor) for tensor in inputs])
    for variable, value in zip(assigned, updates, strict=True):
        variable.assign(value)
    for owner, loss in zip(owners, losses, strict=True):
        replace_losses(owner, loss)
    for tensor, mask in zip(outputs, masks, strict=True):
        set_mask(tensor, mask)
    return list(outputs)
