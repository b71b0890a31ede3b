"""Keras's state around and inside a segment that runs more than once, for both backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import keras

from kerasmem.compat.keras_state import STATELESS_SCOPE, attribute, autocast, global_seed_state

# Makes a call, given what it takes and which layer's or operation's it is, and returns what comes out of it, flat.
MakeCall = Callable[[Callable[[], Any], list[Any], Any], list[Any]]


class SegmentFunction(Protocol):
    """Maps the tensors that enter a segment to those that leave it. It may be called more than once."""

    def __call__(self, entering: list[Any], make_call: MakeCall = ...) -> list[Any]:
        """Run the segment, each call of a layer made by `make_call`."""


def call_at_once(call: Callable[[], Any], _taken: list[Any], _layer: Any) -> list[Any]:
    """Return the outputs of a call, flat."""
    outputs: list[Any] = keras.tree.flatten(call())
    return outputs


class SegmentScope(keras.StatelessScope):
    """A stateless scope that starts from given values and knows the assigned variables.

    Args:
        held: variables and their values.
    """

    def __init__(self, held: Iterable[tuple[Any, Any]]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        outer = attribute(STATELESS_SCOPE)
        if outer is not None:
            self.state_mapping.update(outer.state_mapping)
        self.state_mapping.update((id(variable), value) for variable, value in held)
        self._assigned: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Note a variable that is assigned, and its value."""
        self._assigned[id(update[0])] = update[0]
        super().add_update(update)

    def updates(self) -> list[tuple[Any, Any]]:
        """Return the variables that were assigned, and their last values."""
        return [(each, self.state_mapping[key]) for key, each in self._assigned.items()]


def variables_now(layers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return all variables of the layers, the states of seed generators among them, and their values now."""
    found = {id(each): each for layer in layers for each in layer.variables}
    common = global_seed_state()
    if common is not None:
        found.setdefault(id(common), common)
    with autocast(None):
        values = {key: each.value for key, each in found.items() if each.dtype != "string"}
        return [found[key] for key in values], list(values.values())
