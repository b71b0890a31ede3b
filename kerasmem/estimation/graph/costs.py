"""How long an operation takes, roughly: it decides only which of two threads is free first. Pure arithmetic.

The rates were read off real steps of a convnet, a transformer and a MobileNet, and off single products, on two idle
cores of a server (`scripts/bench/op_costs.py` prints them for any machine). The peak depends on which operation ends
first, not on when, so ratios count and another machine's are much the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kerasmem.estimation.graph.program import Node, Tensor
from kerasmem.estimation.graph.rules import ALIASES, KINDS, NOTHING, OPERATIONS, UPDATES, Rates

OVERHEAD_SECONDS = 1e-6
BYTES_PER_SECOND = 40e9  # of operations that work element by element
PRODUCT_BYTES_PER_SECOND = 16e9  # of matrix products with few rows, which wait for the weights
# Of operations that gather many values into one or put them here and there.
SLOWER_BYTES_PER_SECOND = {name: float(rate) for rate, names in OPERATIONS["slower"].items() for name in names}
PRODUCT = 400e9  # floating-point operations per second; those of convolutions are the kernels' (`data/kernels.json`)
USUAL = Rates(**KINDS["onednn"]["rates"])
# A second factor that is read across its rows, as in the gradient of a dense layer's input, is put in order first:
# with few rows not quite, with many it is lost in the arithmetic.
TRANSPOSED_BYTES_PER_SECOND, FEW_ROWS, MANY_ROWS = 4.2e9, 16, 512

# Identical operations vary about this much from step to step: standard deviation of the logarithm of their time.
VARIATION = 0.2


def seconds(node: Node, inputs: Sequence[Tensor], rates: Rates = USUAL) -> float:
    """Return the time that a node takes alone: by its arithmetic or the bytes it moves, whichever holds it up."""
    if node.type in UPDATES:
        return OVERHEAD_SECONDS + 3 * sum(each.bytes or 0 for each in inputs) / BYTES_PER_SECOND
    if node.type in NOTHING or node.type in ALIASES:
        return OVERHEAD_SECONDS / 3
    is_product = "MatMul" in node.type
    moved = sum(each.bytes or 0 for each in inputs) + sum(each.bytes or 0 for each in node.outputs)
    usual = PRODUCT_BYTES_PER_SECOND if is_product else BYTES_PER_SECOND
    moving = moved / SLOWER_BYTES_PER_SECOND.get(node.type, usual)
    took = OVERHEAD_SECONDS + max(moving, operations(node, inputs) / _rate(node, rates))
    rows = inputs[0].shape[0] if inputs and inputs[0].shape else 0
    if is_product and node.attributes.get("transpose_b") and len(inputs) > 1 and rows <= MANY_ROWS:
        share = 1.0 if rows >= FEW_ROWS else rows / (2 * FEW_ROWS)
        took += share * (inputs[1].bytes or 0) / TRANSPOSED_BYTES_PER_SECOND
    took += _patch_bytes(node, inputs) / rates.patches if rates.patches else 0.0
    return took * rates.filter if "BackpropFilter" in node.type and "Depthwise" not in node.type else took


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


def _patch_bytes(node: Node, inputs: Sequence[Tensor]) -> float:
    """Return the bytes of the patches that the gradient of a convolution over two dimensions copies."""
    if node.type not in ("Conv2DBackpropInput", "Conv2DBackpropFilter") or len(inputs) < 3 or not node.outputs:
        return 0.0
    result = inputs[2].shape
    kernel = node.outputs[0].shape if node.type == "Conv2DBackpropFilter" else inputs[1].shape
    if not result or not kernel:
        return 0.0
    return float(math.prod(result[:-1]) * math.prod(kernel[:-1]) * (inputs[2].bytes or 0) // max(math.prod(result), 1))


def _rate(node: Node, rates: Rates) -> float:
    if "Depthwise" in node.type:
        return rates.depthwise
    if "Conv" in node.type:
        return rates.backward if "Backprop" in node.type else rates.forward
    return PRODUCT
