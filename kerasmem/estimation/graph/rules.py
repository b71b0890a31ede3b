"""Memory and time of TensorFlow's operations with oneDNN, Eigen and CUDA.

An operation *aliases* (its output is its input's buffer), *forwards* (its output reuses an input's buffer of the same
size without other holders), *allocates*, or makes nothing. Some need scratch while they run. Add an operation in
`data/operations.json`, and its scratch in `data/kernels.json`. Sources: the kernels' calls of
`forward_input_or_allocate_output` and `allocate_temp` in tensorflow/core/kernels, and allocator events of real steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kerasmem.devices.kernels import CUDA, EIGEN, ONEDNN, CardKernels
from kerasmem.estimation.graph.cuda import CUDA_FUNCTIONS
from kerasmem.estimation.graph.program import ON_HOST, Node, Tensor
from kerasmem.estimation.graph.scratch import FUNCTIONS, Inputs, Kernels, Scratch
from kerasmem.files import package_data

OPERATIONS = package_data("kerasmem.estimation", "operations")

# The output is a view of an input's buffer.
ALIASES = frozenset(OPERATIONS["views"])

# Nothing is allocated during a step: handles, persistent values, control flow.
NOTHING = frozenset(OPERATIONS["nothing"])

# Number of the input that is the list's item and the output (see `lists`).
TAKEN_FROM_LIST = {"TensorListPopBack": 2, "TensorListGetItem": 3}

# A variable is changed in place.
UPDATES = frozenset(OPERATIONS["updates"])

# Inputs that the output may reuse the buffer of; None for all.
FORWARDS: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(OPERATIONS["unary"], (0,)),
    **dict.fromkeys(OPERATIONS["binary"], (0, 1)),
    **{name: None if inputs is None else tuple(inputs) for name, inputs in OPERATIONS["forwards"].items()},
}

# Each output gets a new buffer.
ALLOCATES = frozenset(OPERATIONS["allocates"])

# Kernels that declare themselves inexpensive run at once on the thread that made them ready.
INEXPENSIVE = frozenset(OPERATIONS["inexpensive"])

KINDS = package_data("kerasmem.estimation", "kernels")


@dataclass(frozen=True)
class Rates:
    """Speed of kernels, in floating-point operations or bytes per second.

    Attributes:
        elements: bytes of elementwise operations.
        forward: operations of convolutions.
        backward: operations of their gradients.
        depthwise: operations of depthwise convolutions and their gradients.
        product: operations of matrix products.
        factors: bytes of matrix products with few rows, which are limited by reading the weights.
        others: bytes of the operations in this mapping.
        gathered: bytes of a second factor that Eigen gathers element by element: usually, if its rows share cache sets,
            and if the first factor has many rows. None if it is not gathered.
    """

    elements: float
    forward: float
    backward: float
    depthwise: float
    product: float
    factors: float
    others: Mapping[str, float]
    gathered: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class KernelTable:
    """Memory and speed of one kind of kernels.

    Attributes:
        scratch: function by operation that returns the bytes of its scratch buffers.
        forwards: by operation, the inputs that its output may reuse, if different from `FORWARDS`.
        rewritten: operations that oneDNN replaces, which changes the order of their consumers.
        lacks: operations without a kernel, by dtype.
        rates: speed.
    """

    scratch: Mapping[str, Scratch]
    forwards: Mapping[str, tuple[int, ...]]
    rewritten: frozenset[str]
    lacks: Mapping[str, Sequence[str]]
    rates: Rates


def _table(kind: str) -> KernelTable:
    row = KINDS[kind]
    functions = CUDA_FUNCTIONS if kind == CUDA else FUNCTIONS
    scratch = {name: FUNCTIONS[function] for name, function in KINDS["both"]["scratch"].items()}
    scratch |= {name: functions[function] for name, function in row["scratch"].items()}
    rates = row.get("rates", KINDS[ONEDNN]["rates"])  # on a card they do not matter
    return KernelTable(
        scratch,
        {name: tuple(inputs) for name, inputs in row["forwards"].items()},
        frozenset(row.get("rewritten", ())),
        row.get("lacks", {}),
        Rates(**{**rates, "others": {**KINDS["both"]["others"], **rates.get("others", {})}}),
    )


TABLES = {kind: _table(kind) for kind in (ONEDNN, EIGEN, CUDA)}
# For operations that run on the CPU in a step on a card. Their buffers are in the host's memory.
_HOST = replace(TABLES[EIGEN], scratch={}, forwards={})


def table_of(node: Node, kernels: Kernels) -> KernelTable:
    """Return the table of the kernel that runs an operation."""
    if isinstance(kernels, CardKernels):
        return _HOST if ON_HOST in node.attributes else TABLES[CUDA]
    if kernels.kind == EIGEN or not node.outputs:
        return TABLES[kernels.kind]
    dtype = node.outputs[0].dtype
    has_kernel = dtype in kernels.dtypes and node.type not in TABLES[ONEDNN].lacks.get(dtype, ())
    return TABLES[ONEDNN if has_kernel else EIGEN]


def threads_of(kernels: Kernels) -> int:
    """Return the number of threads that start operations: one on a card."""
    return 1 if isinstance(kernels, CardKernels) else kernels.inter_op_threads


def reusable_inputs(node: Node, kernels: Kernels) -> tuple[int, ...] | None:
    """Return the inputs that an operation's output may reuse, or None for all."""
    return table_of(node, kernels).forwards.get(node.type, FORWARDS.get(node.type, ()))


def needs(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Return the bytes of an operation's scratch buffers."""
    scratch, compiled = table_of(node, kernels).scratch.get(node.type), node.attributes.get("scratch", 0)
    if scratch is not None:
        return scratch(node, inputs, kernels)
    return (compiled,) if compiled else ()


def is_known(type_name: str) -> bool:
    """Return whether an operation is in the tables."""
    return type_name in ALIASES or type_name in NOTHING or type_name in FORWARDS or type_name in ALLOCATES


# Times of operations decide which of two threads is free first, so only their ratios matter. The rates were measured in
# steps of a convnet, a transformer and a MobileNet, and in single products, on two idle cores of a server. The overhead
# of an operation was measured in loops: an iteration of a GRU or LSTM of 8 units takes 0.15 to 0.29 ms on one thread.
OVERHEAD_SECONDS = 1.6e-6
PASSING_SECONDS = OVERHEAD_SECONDS / 3  # of an operation that only passes its input on
# oneDNN copies a transposed second factor, as in the gradient of a dense layer's input. With few rows the copy is
# partial, and with many its time is negligible.
TRANSPOSED_BYTES_PER_SECOND, FEW_ROWS, MANY_ROWS = 4.2e9, 16, 512
# Rows at distances of whole pages share a few cache sets. If the first factor has many rows, Eigen gathers the second
# one several times.
PAGE, BLOCK_ROWS = 4096, 256

VARIATION = 0.2  # of one operation from step to step: standard deviation of the logarithm of its time


def seconds(node: Node, inputs: Sequence[Tensor], rates: Rates) -> float:
    """Return a node's time: the longer of its arithmetic and its transfers."""
    if node.type in UPDATES:
        return OVERHEAD_SECONDS + 3 * sum(tensor.bytes or 0 for tensor in inputs) / rates.elements
    if (node.type in NOTHING or node.type in ALIASES) and node.type not in rates.others:
        return PASSING_SECONDS
    is_product = "MatMul" in node.type
    size = sum(tensor.bytes or 0 for tensor in (*inputs, *node.outputs))
    transfer = size / rates.others.get(node.type, rates.factors if is_product else rates.elements)
    total = OVERHEAD_SECONDS + max(transfer, operations(node, inputs) / _rate(node, rates))
    if is_product and node.attributes.get("transpose_b") and len(inputs) > 1:
        total += _transposition_seconds(inputs[0], inputs[1], rates)
    return total


def _transposition_seconds(first: Tensor, second: Tensor, rates: Rates) -> float:
    """Return the time to copy a transposed second factor."""
    if not first.shape or not second.shape:
        return 0.0
    rows, size = first.shape[0], second.bytes or 0
    if rates.gathered is not None:
        usual, page_apart, many_rows = rates.gathered
        if rows > BLOCK_ROWS:
            return size / many_rows
        return size / (page_apart if size // second.shape[0] % PAGE == 0 else usual)
    share = 1.0 if rows >= FEW_ROWS else rows / (2 * FEW_ROWS)
    return share * size / TRANSPOSED_BYTES_PER_SECOND if rows <= MANY_ROWS else 0.0


def operations(node: Node, inputs: Sequence[Tensor]) -> float:
    """Return the floating-point operations of a matrix product or convolution, else 0."""
    shapes = [tensor.shape for tensor in inputs]
    result = node.outputs[0].shape if node.outputs else None
    if len(shapes) < 2 or result is None or shapes[0] is None or shapes[1] is None:
        return 0.0
    if "MatMul" in node.type:
        # The geometric mean of the three sizes does not depend on transposition.
        batch = math.prod(result[:-2]) or 1
        return 2 * math.sqrt(math.prod(shapes[0]) * math.prod(shapes[1]) * math.prod(result) / batch)
    if "Conv" in node.type:
        kernel = result if "BackpropFilter" in node.type else shapes[1]
        places = shapes[2] if "Backprop" in node.type and len(shapes) > 2 and shapes[2] is not None else result
        if len(kernel) > 2:
            return 2 * math.prod(places) * math.prod(kernel[:-2] if "Depthwise" in node.type else kernel[:-1])
    return 0.0


def _rate(node: Node, rates: Rates) -> float:
    if "Depthwise" in node.type:
        return rates.depthwise
    if "Conv" in node.type:
        return rates.backward if "Backprop" in node.type else rates.forward
    return rates.product
