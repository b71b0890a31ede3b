"""A step as plain data: its operations, tensors and variables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kerasmem.errors import KerasmemError
from kerasmem.models.sizes import element_bytes


class NotModelled(KerasmemError):
    """The simulation has no rule for a part of the step. Method `probe` needs none."""


COPY = "_Recv"  # the operation that copies a tensor between a card's memory and the host's
ON_HOST = "on_host"  # the attribute of an operation on the CPU in a step on a card


@dataclass(frozen=True, slots=True)
class Tensor:
    """An output of an operation.

    Attributes:
        shape: shape, or None if it depends on the data.
        dtype: Keras's name of the dtype.
        bytes: size, or None if the shape is unknown.
        on_host: whether the tensor of a step on a card is in the host's memory.
    """

    shape: tuple[int, ...] | None
    dtype: str
    bytes: int | None
    on_host: bool = False


def tensor_of(tensor: Any) -> Tensor:
    """Return a symbolic tensor as plain data. Handles (resource and variant) have 0 bytes."""
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
        name: TensorFlow's name, which contains the names of Keras's layers.
        type: "Conv2D", "ReadVariableOp", …
        inputs: (node, output) of each input.
        controls: nodes that must run before. In unrolled loops also those that passed its inputs on.
        outputs: its tensors.
        attributes: attributes that rules read (strides, padding, constants).
        variable: index in `Program.variables` of the variable that it works on, or None.
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
        path: Keras's path.
        bytes: size of its value.
        kind: "weights", "optimizer" or "metrics".
        initial: "random" (drawn, scaled and shifted, in a buffer each) or "filled" (with one number).
        shape: shape of its value.
        dtype: dtype of its value.
    """

    path: str
    bytes: int
    kind: str
    initial: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """A step as plain data, without TensorFlow.

    Attributes:
        nodes: the operations. A node's number is its index.
        variables: the step's variables.
        arguments: numbers of the batch's placeholders. The caller holds their tensors.
        results: (node, output) of the step's results.
        has_loops: whether loops were unrolled.
        passes: number of runs of control-flow operations, which are not nodes.
        shape_constants: number of small constants that TensorFlow keeps for shape functions.
        is_usual: whether most steps may take its branches. False if most steps surely take others.
        alternatives: the same step with other branches, which depend on the data.
    """

    nodes: tuple[Node, ...]
    variables: tuple[Variable, ...]
    arguments: tuple[int, ...]
    results: tuple[tuple[int, int], ...]
    has_loops: bool = False
    passes: int = 0
    shape_constants: int = 0
    is_usual: bool = True
    alternatives: tuple[Program, ...] = ()
