"""The name scopes that the calls of layers open while a step is traced.

TensorFlow numbers scopes as it meets them, so that "dense_1" may be the second call of the layer `dense`: only who saw
the calls can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers, name_scopes_replaced
from kerasmem.models.backend import import_keras

Path = tuple[str, ...]


@dataclass
class NotedScopes:
    """Scopes and layers of the calls that were seen.

    Attributes:
        scopes: name scope → names of the layers whose calls opened it, the outermost first.
        layers: those names → the layer, in the order of the calls.
        graphs: the graphs into which the outermost of them were traced, by id.
    """

    scopes: dict[str, Path] = field(default_factory=dict)
    layers: dict[Path, Any] = field(default_factory=dict)
    graphs: dict[int, Any] = field(default_factory=dict)

    def operations(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the operations of those graphs as they were made, each with the names of those it takes from."""
        return [
            (operation.name, tuple(tensor.op.name for tensor in operation.inputs))
            for graph in self.graphs.values()
            for operation in graph.get_operations()
        ]

    def owners(self) -> dict[int, Path]:
        """Return for each variable that a layer made itself, by its id, the names of that layer."""
        found: dict[int, Path] = {}
        for path, layer in self.layers.items():
            for variable in own_variables(layer):
                found.setdefault(id(variable), path)
        return found


def own_variables(layer: Any) -> list[Any]:
    """Return the variables of a layer without those of the layers inside it."""
    inner = {id(each) for one in flatten_layers(layer, include_self=False) for each in one.variables}
    return [each for each in layer.variables if id(each) not in inner]


def is_container(layer: Any) -> bool:
    """Return whether the layers inside get rows of their own: models, and layers of the user's made of layers."""
    keras = import_keras()
    if isinstance(layer, keras.Model):
        return True
    of_keras = type(layer).__module__.split(".")[0] == "keras"
    return not of_keras and bool(flatten_layers(layer, include_self=False))


@contextmanager
def scopes_noted() -> Iterator[NotedScopes]:
    """Note the name scopes that calls of layers open in this thread."""
    import tensorflow as tf

    found = NotedScopes()
    path: list[str] = []

    @contextmanager
    def noted(layer: Any, open_scope: Callable[[Any], Any]) -> Iterator[Any]:
        with open_scope(layer) as scope:
            if not path and not tf.executing_eagerly():
                graph = tf.compat.v1.get_default_graph()
                found.graphs[id(graph)] = graph
            path.append(layer.name)
            found.scopes.setdefault(tf.get_current_name_scope(), tuple(path))
            found.layers.setdefault(tuple(path), layer)
            try:
                yield scope
            finally:
                path.pop()

    with name_scopes_replaced(noted):
        yield found
