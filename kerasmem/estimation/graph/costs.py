"""How long an operation takes, roughly: it decides only which of two threads is free first. Pure arithmetic.

The rates were read off real steps of a convnet, a transformer and a MobileNet on two cores of a server
(`scripts/bench/op_costs.py` prints them for any machine). The peak depends on which operation ends first, not on when,
so ratios count and another machine's are much the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kerasmem.estimation.graph.program import Node, Tensor
from kerasmem.estimation.graph.rules import ALIASES, NOTHING, UPDATES

OVERHEAD_SECONDS = 0.3e-6
BYTES_PER_SECOND = 12e9  # of operations that work element by element
FORWARD, BACKWARD, PRODUCT, DEPTHWISE = 100e9, 50e9, 100e9, 10e9  # floating-point operations per second
# A matrix that is read or written across its rows, as the gradients of a dense layer do.
TRANSPOSED_READ, TRANSPOSED_WRITE = 0.85e9, 2.4e9  # bytes per second

# Identical operations vary about this much from step to step: standard deviation of the logarithm of their time.
VARIATION = 0.35


def seconds(node: Node, inputs: Sequence[Tensor]) -> float:
    """Return the time that a node takes, by its arithmetic and the bytes it moves."""
    if node.type in UPDATES:
        return OVERHEAD_SECONDS + 3 * sum(each.bytes or 0 for each in inputs) / BYTES_PER_SECOND
    if node.type in NOTHING or node.type in ALIASES:
        return OVERHEAD_SECONDS / 2
    moved = sum(each.bytes or 0 for each in inputs) + sum(each.bytes or 0 for each in node.outputs)
    took = OVERHEAD_SECONDS + moved / BYTES_PER_SECOND + operations(node, inputs) / _rate(node)
    if node.attributes.get("transpose_b") and len(inputs) > 1:
        took += (inputs[1].bytes or 0) / TRANSPOSED_READ
    elif node.attributes.get("transpose_a"):
        took += (node.outputs[0].bytes or 0) / TRANSPOSED_WRITE
    return took


def operations(node: Node, inputs: Sequence[Tensor]) -> float:
    """Return the floating-point operations of a matrix product or a convolution; 0 for others."""
    shapes = [each.shape for each in inputs]
    result = node.outputs[0].shape if node.outputs else None
    if len(shapes) < 2 or result is None or shapes[0] is None or shapes[1] is None:
        return 0.0
    if "MatMul" in node.type:
        # The geometric mean of the three faces of the product, which needs no account of transposition.
        batch = math.prod(result[:-2]) or 1
        return 2 * math.sqrt(math.prod(shapes[0]) * math.prod(shapes[1]) * math.prod(result) / batch)
    if "Conv" in node.type:
        kernel = result if "BackpropFilter" in node.type else shapes[1]
        places = shapes[2] if "Backprop" in node.type and len(shapes) > 2 and shapes[2] is not None else result
        if len(kernel) > 2:
            return 2 * math.prod(places) * math.prod(kernel[:-2] if "Depthwise" in node.type else kernel[:-1])
    return 0.0


def _rate(node: Node) -> float:
    if "Depthwise" in node.type:
        return DEPTHWISE
    if "Conv" in node.type:
        return BACKWARD if "Backprop" in node.type else FORWARD
    return PRODUCT
