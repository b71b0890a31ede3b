"""Layer and phase of an operation, by its name.

Names contain name scopes: "gradient_tape/resnet_1/conv1_conv_1/Conv2DBackpropFilter" is in the backward pass of the
layer with the scope "resnet_1/conv1_conv_1". TensorFlow numbers scopes in order of their creation, so "dense_1" may be
the second call of the layer `dense`. Therefore the scopes of calls are recorded while a step is traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers, name_scopes_replaced
from kerasmem.models.backend import import_keras
from kerasmem.models.user_code import is_of_a_library

BACKWARD = "gradient_tape"
EXCHANGE = f"{BACKWARD}/gradient_exchange"  # between replicas
_SUM = re.compile(r"AddN(_\d+)?")
# phase → category of its results in the report
CATEGORIES = {"forward": "activations", "backward": "gradients", "optimizer": "workspace"}


@dataclass(frozen=True)
class Instant:
    """Moment of the peak.

    Attributes:
        text: description, such as "while computing the gradient of block1_conv2".
        operation: TensorFlow's or XLA's name of the running operation.
        layer: the operation's Keras layer, or None.
        phase: "forward", "backward", "optimizer" or None.
    """

    text: str
    operation: str
    layer: str | None
    phase: str | None


@dataclass(frozen=True)
class Origin:
    """Origin of an operation: its layer in the report, or None, and "forward", "backward" or "optimizer"."""

    layer: str | None
    phase: str


@dataclass
class Attribution:
    """Looks up the origin of operations.

    Args:
        scopes: name scope → names of its layer's enclosing models and layers, the outermost first, and of the layer.
        rows: names of the layers in the report.
        optimizers: name scopes of the optimizer and its inner optimizers, without TensorFlow's numbers.
    """

    scopes: Mapping[str, tuple[str, ...]]
    rows: Iterable[str]
    optimizers: tuple[str, ...] = ()
    _known: dict[str, Origin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows = frozenset(self.rows)
        self._layers = {scope: self.row(path) for scope, path in self.scopes.items()}

    def row(self, path: tuple[str, ...]) -> str | None:
        """Return the innermost layer of a path that has a row in the report."""
        for end in range(len(path), 0, -1):
            for begin in (1, 0):  # the outermost model has no row
                if "/".join(path[begin:end]) in self._rows:
                    return "/".join(path[begin:end])
        return None

    def origin(self, name: str) -> Origin:
        """Return the origin of an operation."""
        if name not in self._known:
            parts = name.split("/")
            begin, scope = self._scope(parts)
            layer = self._layers[scope] if scope else None
            # The tape sums the gradients of a value with several uses outside of any scope.
            if BACKWARD in parts or any(_SUM.fullmatch(part) for part in parts):
                self._known[name] = Origin(layer, "backward")
            elif any(self._is_optimizer(part) for part in parts[: begin + 1]):
                self._known[name] = Origin(None, "optimizer")
            else:
                self._known[name] = Origin(layer, "forward")
        return self._known[name]

    def path(self, name: str) -> tuple[str, ...]:
        """Return the names of an operation's enclosing models and layers, () if there are none."""
        _, scope = self._scope(name.split("/"))
        return self.scopes[scope] if scope else ()

    def _scope(self, parts: list[str]) -> tuple[int, str]:
        """Return the position of a layer's first scope in a name, and the longest scope from there, or ""."""
        for begin in range(len(parts)):
            for end in range(len(parts), begin, -1):
                if (scope := "/".join(parts[begin:end])) in self.scopes:
                    return begin, scope
        return len(parts), ""

    def _is_optimizer(self, part: str) -> bool:
        stem, _, number = part.rpartition("_")
        return part in self.optimizers or (stem in self.optimizers and number.isdigit())

    def instant(self, name: str) -> Instant:
        """Describe the moment when an operation runs."""
        origin = self.origin(name)
        subject = origin.layer or self.short_name(name)
        if name.startswith(EXCHANGE):
            text = "while the gradients of all replicas are exchanged"
        elif origin.phase == "optimizer":
            text = f"while {self.optimizers[0]} updates the weights"
        elif origin.phase == "backward":
            text = f"while computing the gradient of {subject}"
        else:
            text = f"while computing {subject}"
        return Instant(text, name, origin.layer, origin.phase)

    def short_name(self, name: str) -> str:
        """Return the descriptive part of an operation's name, for one without a layer."""
        return name.removeprefix(f"{BACKWARD}/").partition("/")[0]


Path = tuple[str, ...]


@dataclass
class RecordedScopes:
    """Name scopes and layers of recorded calls.

    Attributes:
        scopes: name scope → names of its enclosing models and layers, the outermost first, and of its layer.
        layers: those names → the layer, in the order of the calls.
    """

    scopes: dict[str, Path] = field(default_factory=dict)
    layers: dict[Path, Any] = field(default_factory=dict)

    def owners(self) -> dict[int, Path]:
        """Map the id of each variable to the path of the innermost layer that has it."""
        owners: dict[int, Path] = {}
        for path, layer in self.layers.items():
            inner = {id(variable) for part in flatten_layers(layer, include_self=False) for variable in part.variables}
            for variable in layer.variables:
                if id(variable) not in inner:
                    owners.setdefault(id(variable), path)
        return owners


def is_container(layer: Any) -> bool:
    """Return whether inner layers have rows: those of a model, and of a user's layer that has layers."""
    keras = import_keras()
    if isinstance(layer, keras.Model):
        return True
    return not is_of_a_library(layer) and bool(flatten_layers(layer, include_self=False))


@contextmanager
def record_scopes() -> Iterator[RecordedScopes]:
    """Record the name scopes of calls of layers in this thread."""
    import tensorflow as tf

    calls = RecordedScopes()
    path: list[str] = []

    @contextmanager
    def open_recorded(layer: Any, open_scope: Callable[[Any], Any]) -> Iterator[Any]:
        with open_scope(layer) as scope:
            path.append(layer.name)
            calls.scopes.setdefault(tf.get_current_name_scope(), tuple(path))
            calls.layers.setdefault(tuple(path), layer)
            try:
                yield scope
            finally:
                path.pop()

    with name_scopes_replaced(open_recorded):
        yield calls
