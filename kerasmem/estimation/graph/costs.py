"""How long an operation takes, roughly: it decides only which of two threads is free first. Pure arithmetic.

The rates are round figures for one core of a server of the 2020s, not measurements of this machine: the peak depends
on which operation ends first, not on when.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kerasmem.estimation.graph.program import Node, Tensor
from kerasmem.estimation.graph.rules import ALIASES, NOTHING

OVERHEAD_SECONDS = 1e-6
BYTES_PER_SECOND = 8e9
OPERATIONS_PER_SECOND = 50e9


def seconds(node: Node, inputs: Sequence[Tensor]) -> float:
    """Return the time that a node takes, by its arithmetic and the bytes it moves."""
    if node.type in NOTHING or node.type in ALIASES:
        return OVERHEAD_SECONDS / 2
    moved = sum(each.bytes or 0 for each in inputs) + sum(each.bytes or 0 for each in node.outputs)
    return OVERHEAD_SECONDS + moved / BYTES_PER_SECOND + _operations(node, inputs) / OPERATIONS_PER_SECOND


def _operations(node: Node, inputs: Sequence[Tensor]) -> float:
    shapes = [each.shape for each in inputs]
    if "MatMul" in node.type and len(shapes) > 1 and node.outputs and all(
        shape is not None for shape in (shapes[0], shapes[1], node.outputs[0].shape)
    ):  # fmt: skip
        # The geometric mean of the three faces of the product, which needs no account of transposition.
        faces = [math.prod(shape or ()) for shape in (shapes[0], shapes[1], node.outputs[0].shape)]
        return 2 * math.sqrt(math.prod(faces))
    if "Conv" in node.type and len(shapes) > 1:
        backward_filter, backward_input = "BackpropFilter" in node.type, "BackpropInput" in node.type
        kernel = node.outputs[0].shape if backward_filter else shapes[1]
        result = shapes[2] if (backward_filter or backward_input) and len(shapes) > 2 else node.outputs[0].shape
        if kernel is not None and result is not None and len(kernel) > 2:
            per_element = math.prod(kernel[:-2]) * (1 if "Depthwise" in node.type else kernel[-2])
            return 2 * math.prod(result) * per_element
    return 0.0
