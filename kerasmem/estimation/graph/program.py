"""The step as plain data: its operations, the bytes of every tensor, its variables. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kerasmem.errors import KerasmemError
from kerasmem.models.sizes import element_bytes


class NotModelled(KerasmemError):
    """The step holds something that the simulation has no rule for; `probe` runs it for real."""


COPY = "_Recv"  # the operation that copies a tensor between a card's memory and the host's
ON_HOST = "on_host"  # the attribute of an operation that runs on the CPU beside a card


@dataclass(frozen=True, slots=True)
class Tensor:
    """What comes out of an operation.

    Attributes:
        shape: None where it depends on the data.
        dtype: as Keras names it.
        bytes: None as the shape.
        on_host: whether it lies in the host's memory beside that of the card that the step runs on.
    """

    shape: tuple[int, ...] | None
    dtype: str
    bytes: int | None
    on_host: bool = False


def tensor_of(tensor: Any) -> Tensor:
    """Return a symbolic tensor as plain data; what only names a value elsewhere takes nothing."""
    dtype = tensor.dtype.base_dtype.name
    if dtype in ("resource", "variant"):
        return Tensor(None, dtype, 0)
    shape = tensor.shape
    if shape.rank is None or not shape.is_fully_defined():
        return Tensor(None, dtype, None)
    sizes = tuple(shape.as_list())
    return Tensor(sizes, dtype, math.prod(sizes) * element_bytes(dtype))


@dataclass(frozen=True, slots=True)
class Node:
    """An operation of the executed graph.

    Attributes:
        name: as TensorFlow names it; it holds the names of Keras's layers.
        type: "Conv2D", "ReadVariableOp", …
        inputs: for each input the number of the node that makes it, and which of its outputs it is.
        controls: the nodes that must have run before; where loops were spelled out, also those that hand on its inputs.
        outputs: what it makes.
        attributes: the few that rules look at (strides, padding, constants).
        variable: for operations on a variable, its number in `Program.variables`.
    """

    name: str
    type: str
    inputs: tuple[tuple[int, int], ...]
    controls: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    attributes: dict[str, Any]
    variable: int | None = None


@dataclass(frozen=True)
class Variable:
    """A variable of the model, its optimizer or its metrics.

    Attributes:
        path: in Keras.
        bytes: of its value.
        kind: "weights", "optimizer" or "metrics".
        initial: how it gets its first value: "random" (drawn, scaled and shifted, each in a buffer of its own) or
            "filled" (with one number).
        shape: of its value; with the dtype it says which fillings are the same.
        dtype: of its value.
    """

    path: str
    bytes: int
    kind: str
    initial: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """All that the simulation needs, without TensorFlow.

    Attributes:
        nodes: the operations; an index in it is a node's number.
        variables: those that the step touches.
        arguments: numbers of the nodes that stand for the batch, held by the caller.
        results: (node, output) of what the step returns.
        folded: where loops were spelled out, the step with them.
        origins: where they were, for each node the number of that in `folded` which it is an execution of.
    """

    nodes: tuple[Node, ...]
    variables: tuple[Variable, ...]
    arguments: tuple[int, ...]
    results: tuple[tuple[int, int], ...]
    folded: Program | None = field(default=None, compare=False)
    origins: tuple[int, ...] = ()

    @property
    def has_loops(self) -> bool:
        """Whether loops were spelled out."""
        return any(node.type == "NextIteration" for node in self.nodes)

    def awaited(self, number: int) -> Iterable[int]:
        """Return the nodes that the executor has run before it runs one, as often as they hand it something."""
        node = self.nodes[number]
        sources = (source for source, _ in node.inputs)
        if self.folded is None or number >= len(self.origins):
            return (*sources, *node.controls)
        return (*(source for source in sources if source >= len(self.origins)), *node.controls)
