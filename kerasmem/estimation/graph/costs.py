"""The time that an operation takes, roughly. It decides only which of two threads is free first.

The rates were read off real steps of a convnet, a transformer and a MobileNet, and off single products, on two idle
cores of a server. The peak depends on which operation ends first, so only ratios count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kerasmem.devices.kernels import ONEDNN
from kerasmem.estimation.graph.program import Node, Tensor
from kerasmem.estimation.graph.rules import ALIASES, NOTHING, OPERATIONS, UPDATES, Rates, rates_of
from kerasmem.estimation.graph.scratch import patches_of

OVERHEAD_SECONDS = 1e-6
# Of operations that gather many values into one or put them here and there.
SLOWER_BYTES_PER_SECOND = {name: float(rate) for rate, names in OPERATIONS["slower"].items() for name in names}
USUAL = rates_of(ONEDNN)
# With oneDNN, a second factor that is read across its rows, as in the gradient of a dense layer's input, is put in
# order first: with few rows not quite, with many the time is lost in the arithmetic.
TRANSPOSED_BYTES_PER_SECOND, FEW_ROWS, MANY_ROWS = 4.2e9, 16, 512
# Rows whole pages apart lie in the same few places of the cache. For many rows of the first factor, Eigen gathers the
# second one again and again.
PAGE, BLOCK_ROWS = 4096, 256

# Identical operations vary about this much from step to step: standard deviation of the logarithm of their time.
VARIATION = 0.2


def seconds(node: Node, inputs: Sequence[Tensor], rates: Rates = USUAL) -> float:
    """Return the time that a node takes alone: the longer of its arithmetic and its transfers."""
    if node.type in UPDATES:
        return OVERHEAD_SECONDS + 3 * sum(tensor.bytes or 0 for tensor in inputs) / rates.elements
    if (node.type in NOTHING or node.type in ALIASES) and node.type not in rates.others:
        return OVERHEAD_SECONDS / 3
    is_product = "MatMul" in node.type
    moved = sum(tensor.bytes or 0 for tensor in (*inputs, *node.outputs))
    usual = rates.factors if is_product else rates.elements
    moving = moved / rates.others.get(node.type, SLOWER_BYTES_PER_SECOND.get(node.type, usual))
    took = OVERHEAD_SECONDS + max(moving, operations(node, inputs) / _rate(node, rates))
    if is_product and node.attributes.get("transpose_b") and len(inputs) > 1:
        took += _ordering(inputs[0], inputs[1], rates)
    return took + _copying(node, inputs, rates)


def _ordering(first: Tensor, second: Tensor, rates: Rates) -> float:
    """Return the time in which a second factor is put in order that is read across its rows."""
    if not first.shape or not second.shape:
        return 0.0
    rows, size = first.shape[0], second.bytes or 0
    if rates.gathered is not None:
        usual, far, many = rates.gathered
        return size / (many if rows > BLOCK_ROWS else far if size // second.shape[0] % PAGE == 0 else usual)
    share = 1.0 if rows >= FEW_ROWS else rows / (2 * FEW_ROWS)
    return share * size / TRANSPOSED_BYTES_PER_SECOND if rows <= MANY_ROWS else 0.0


def operations(node: Node, inputs: Sequence[Tensor]) -> float:
    """Return the floating-point operations of a matrix product or a convolution; 0 for others."""
    shapes = [tensor.shape for tensor in inputs]
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


def _copying(node: Node, inputs: Sequence[Tensor], rates: Rates) -> float:
    """Return the time in which a convolution's gradient copies patches, and the filter for each single sample."""
    if node.type not in rates.patches or len(inputs) < 3 or not node.outputs:
        return 0.0
    patches = patches_of(node, tuple(inputs), 4)
    if patches is None or inputs[2].shape is None:
        return 0.0
    samples = inputs[2].shape[0]
    took = samples * patches.bytes / rates.patches[node.type]
    if node.type == "Conv2DBackpropInput" and patches.is_divided(2):
        took += samples * (inputs[1].bytes or 0) / rates.filters
    return took


def _rate(node: Node, rates: Rates) -> float:
    if "Depthwise" in node.type:
        return rates.depthwise
    if "Conv" in node.type:
        return rates.backward if "Backprop" in node.type else rates.forward
    return rates.product
