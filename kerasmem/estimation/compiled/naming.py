"""From the name that JAX gives an operation to the Keras layer and the phase of the step. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from kerasmem.models.op_names import Instant, Origin

_FUNCTION = re.compile(r"\bp?jit\([^()]*\)")
_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|remat)\(")


@dataclass(frozen=True)
class JaxNames:
    """Looks up the origin of operations by their names.

    JAX wraps the scope of a layer's call in what is done to it: `jvp(conv1)` going forward, `transpose(jvp(conv1))`
    going back. The last part is the operation itself, and `jit(relu)` a function of JAX's: neither is a layer.

    Attributes:
        layers: the names of the model's layers.
        optimizer: the optimizer's name; None for inference.
        rows: the names of the layers in the report; without any, a layer's whole path is its row.

    Examples:
        >>> names = JaxNames({"encoder", "dense"}, "adam")
        >>> names.origin("jit(train_step)/transpose(jvp(encoder))/dense/dot_general")
        Origin(layer='encoder/dense', phase='backward')
    """

    layers: Collection[str]
    optimizer: str | None = None
    rows: Collection[str] = ()

    def origin(self, name: str) -> Origin:
        """Return the origin of the operation of this name."""
        scopes = _FUNCTION.sub("", name.rpartition("/")[0])
        pieces = _WRAPPER.sub("", scopes).replace(")", "").split("/")
        if self.optimizer is not None:
            update = re.compile(rf"{re.escape(self.optimizer)}(_\d+)?")
            if any(map(update.fullmatch, pieces)):
                return Origin(None, "optimizer")
        path = [piece for piece in pieces if piece in self.layers]
        return Origin(self._row(path), "backward" if "transpose(" in name else "forward")

    def _row(self, path: list[str]) -> str | None:
        """Return the deepest row that a path of layers leads through."""
        prefixes = ["/".join(path[:end]) for end in range(len(path), 0, -1)]
        return next((prefix for prefix in prefixes if not self.rows or prefix in self.rows), None)

    def instant(self, name: str) -> Instant:
        """Describe the moment at which an operation runs."""
        origin = self.origin(name)
        what = origin.layer or name.rpartition("/")[2]
        text = f"while computing the gradient of {what}" if origin.phase == "backward" else f"while computing {what}"
        if origin.phase == "optimizer":
            text = "while the optimizer updates the weights"
        return Instant(text, name, origin.layer, origin.phase)
