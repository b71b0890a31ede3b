"""From an operation's name to the Keras layer and the phase of the step that it belongs to.

Names hold the scopes in which layers were called: "gradient_tape/resnet_1/conv1_conv_1/Conv2DBackpropFilter" is the
backward pass of the layer whose call opened the scope "resnet_1/conv1_conv_1". TensorFlow numbers scopes as it meets
them, so that "dense_1" may be the second call of the layer `dense`: the calls are noted while a step is traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers, name_scopes_replaced
from kerasmem.models.backend import import_keras
from kerasmem.models.vocabulary import is_of_a_library

BACKWARD = "gradient_tape"
_SUM = re.compile(r"AddN(_\d+)?")
# phase → the category of the report that what it makes belongs to
CATEGORIES = {"forward": "activations", "backward": "gradients", "optimizer": "workspace"}


@dataclass(frozen=True)
class Instant:
    """When the peak is reached.

    Attributes:
        text: in words: "while computing the gradient of block1_conv2".
        operation: the operation that runs then, as TensorFlow or XLA names it.
        layer: the Keras layer that it belongs to, or None.
        phase: "forward", "backward", "optimizer" or None.
    """

    text: str
    operation: str
    layer: str | None
    phase: str | None


@dataclass(frozen=True)
class Origin:
    """Origin of an operation: the layer's row in the report (or None) and "forward", "backward", "optimizer"."""

    layer: str | None
    phase: str


@dataclass
class Attribution:
    """Looks up the origin of operations.

    Args:
        scopes: name scope → path of the layer that was called in it, its enclosing models and layers first.
        rows: names of the layers in the report.
        optimizers: the optimizer's name scope, without the number that TensorFlow may add, and those inside it.
    """

    scopes: Mapping[str, tuple[str, ...]]
    rows: Iterable[str]
    optimizers: tuple[str, ...] = ()
    _known: dict[str, Origin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows = frozenset(self.rows)
        self._layers = {scope: self.row(path) for scope, path in self.scopes.items()}

    def row(self, path: tuple[str, ...]) -> str | None:
        """Return the deepest row that the path leads through: layers inside a layer count as that layer."""
        for end in range(len(path), 0, -1):
            for begin in (1, 0):  # the outermost model has no row of its own
                if "/".join(path[begin:end]) in self._rows:
                    return "/".join(path[begin:end])
        return None

    def origin(self, name: str) -> Origin:
        """Return the origin of the operation of this name."""
        if name not in self._known:
            parts = name.split("/")
            begin, scope = self._scope(parts)
            layer = self._layers[scope] if scope else None
            # The tape adds up the gradients of a value that was used more than once outside any scope.
            if BACKWARD in parts or any(_SUM.fullmatch(part) for part in parts):
                self._known[name] = Origin(layer, "backward")
            elif any(self._is_optimizer(part) for part in parts[: begin + 1]):
                self._known[name] = Origin(None, "optimizer")
            else:
                self._known[name] = Origin(layer, "forward")
        return self._known[name]

    def path(self, name: str) -> tuple[str, ...]:
        """Return the names of the layers and models that the operation was made in, () for none."""
        _, scope = self._scope(name.split("/"))
        return self.scopes[scope] if scope else ()

    def _scope(self, parts: list[str]) -> tuple[int, str]:
        """Return the position of the first scope of a layer in a name, and the longest that begins there or ""."""
        for begin in range(len(parts)):
            for end in range(len(parts), begin, -1):
                if (scope := "/".join(parts[begin:end])) in self.scopes:
                    return begin, scope
        return len(parts), ""

    def _is_optimizer(self, part: str) -> bool:
        stem, _, number = part.rpartition("_")
        return part in self.optimizers or (stem in self.optimizers and number.isdigit())

    def instant(self, name: str) -> Instant:
        """Describe the moment of an operation."""
        origin = self.origin(name)
        what = origin.layer or self.short_name(name)
        if origin.phase == "optimizer":
            text = f"while {self.optimizers[0]} updates the weights"
        elif origin.phase == "backward":
            text = f"while computing the gradient of {what}"
        else:
            text = f"while computing {what}"
        return Instant(text, name, origin.layer, origin.phase)

    def short_name(self, name: str) -> str:
        """Return the part of an operation's name that says what it is, for an operation of no layer."""
        return name.removeprefix(f"{BACKWARD}/").partition("/")[0]


Path = tuple[str, ...]


@dataclass
class NotedScopes:
    """Scopes and layers of the calls that were seen.

    Attributes:
        scopes: name scope → names of the layers whose calls opened it, the outermost first.
        layers: those names → the layer, in the order of the calls.
    """

    scopes: dict[str, Path] = field(default_factory=dict)
    layers: dict[Path, Any] = field(default_factory=dict)

    def owners(self) -> dict[int, Path]:
        """Return for each variable that a layer made itself, by its id, the names of that layer."""
        owners: dict[int, Path] = {}
        for path, layer in self.layers.items():
            inner = {id(each) for one in flatten_layers(layer, include_self=False) for each in one.variables}
            for variable in layer.variables:
                if id(variable) not in inner:
                    owners.setdefault(id(variable), path)
        return owners


def is_container(layer: Any) -> bool:
    """Return whether the layers inside get rows of their own: models, and layers of the user's made of layers."""
    keras = import_keras()
    if isinstance(layer, keras.Model):
        return True
    return not is_of_a_library(layer) and bool(flatten_layers(layer, include_self=False))


@contextmanager
def scopes_noted() -> Iterator[NotedScopes]:
    """Note the name scopes that calls of layers open in this thread."""
    import tensorflow as tf

    calls = NotedScopes()
    path: list[str] = []

    @contextmanager
    def noted(layer: Any, open_scope: Callable[[Any], Any]) -> Iterator[Any]:
        with open_scope(layer) as scope:
            path.append(layer.name)
            calls.scopes.setdefault(tf.get_current_name_scope(), tuple(path))
            calls.layers.setdefault(tuple(path), layer)
            try:
                yield scope
            finally:
                path.pop()

    with name_scopes_replaced(noted):
        yield calls
