"""What TensorFlow's operations do with memory: tables of data, one for each kind of device.

An operation *aliases* (its output is its input's buffer), *forwards* (its output takes an input's buffer over where
nobody else holds it and the sizes agree), *allocates*, or makes nothing. Some need scratch while they run. Sources:
the kernels' calls of `forward_input_or_allocate_output` and `allocate_temp` in tensorflow/core/kernels, and
allocator events recorded from real steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kerasmem.estimation.graph.program import Node, Tensor
from kerasmem.estimation.tables import table

# Names of operations by what they do; `data/operations.json` is where one is added.
_OPERATIONS = table("operations")

# The output is a view of an input's buffer (the number of the input).
ALIASES = frozenset(_OPERATIONS["views"])

# Nothing is allocated while a step runs: handles, persistent values, control.
NOTHING = frozenset(_OPERATIONS["nothing"])

# The tensor that comes out of a list is the one that went in: its place among the inputs (see `lists`).
TAKEN_FROM_LIST = {"TensorListPopBack": 2, "TensorListGetItem": 3}

# A variable is changed in place: value and change are read, the value is written.
UPDATES = frozenset(_OPERATIONS["updates"])

# The output may take over the buffer of one of these inputs: `None` for any.
FORWARDS: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(_OPERATIONS["unary"], (0,)),
    **dict.fromkeys(_OPERATIONS["binary"], (0, 1)),
    **{name: None if places is None else tuple(places) for name, places in _OPERATIONS["forwards"].items()},
}

# Each output is new memory.
ALLOCATES = frozenset(_OPERATIONS["allocates"])

# Done at once on the thread that made it ready: the kernels that call themselves inexpensive.
INEXPENSIVE = frozenset(_OPERATIONS["inexpensive"])

# Under oneDNN these keep a note of where each maximum was, for their gradient: a second, hidden output.
HIDDEN_OUTPUT = {"MaxPool": "MaxPoolGrad", "MaxPool3D": "MaxPool3DGrad"}

Scratch = Callable[[Node, tuple[Tensor, ...]], int]


@dataclass(frozen=True)
class DeviceRules:
    """One kind of device.

    Attributes:
        name: "cpu" or "gpu".
        scratch: operation → bytes of scratch for a node and its inputs.
        workers: threads that execute operations at once; 1 where the device's kernels are only launched.
    """

    name: str
    scratch: dict[str, Scratch] = field(default_factory=dict)
    workers: int = 2


def is_known(type_name: str) -> bool:
    """Return whether the tables say what the operation does."""
    return type_name in ALIASES or type_name in NOTHING or type_name in FORWARDS or type_name in ALLOCATES


def _reduction_scratch(node: Node, inputs: tuple[Tensor, ...]) -> int:
    """A reduction over axes that do not lie together is done on a transposed copy."""
    shape, axes = inputs[0].shape, node.attributes.get("axes")
    if shape is None or axes is None:
        return 0
    groups: list[bool] = []
    for axis, size in enumerate(shape):
        reduced = axis in axes
        if size != 1 and (not groups or groups[-1] != reduced):
            groups.append(reduced)
    simple = len(groups) <= 2 or len(groups) == 3
    return 0 if simple else int(inputs[0].bytes or 0)


def _depthwise_filter_scratch(node: Node, inputs: tuple[Tensor, ...]) -> int:
    """Every sample's filter gradient is kept before they are summed."""
    if not inputs or inputs[0].shape is None:
        return 0
    return inputs[0].shape[0] * (node.outputs[0].bytes or 0)


# float16 goes past oneDNN on a CPU, to kernels of TensorFlow's own.
def _is_half(node: Node) -> bool:
    return bool(node.outputs) and node.outputs[0].dtype == "float16"


def _product_scratch(node: Node, inputs: tuple[Tensor, ...]) -> int:
    """A product of float16 is computed on float32 copies of both factors, into a float32 result."""
    if not _is_half(node):
        return 0
    return 2 * (sum(each.bytes or 0 for each in inputs[:2]) + (node.outputs[0].bytes or 0))


_CONVOLUTION_TARGET = 30 << 20  # bytes that a convolution's gradient works on at a time


def _convolution_gradient_scratch(node: Node, inputs: tuple[Tensor, ...]) -> int:
    """Patches of as many samples as keep patches, filter and result together within a cache, whatever the batch."""
    result = inputs[2].shape if len(inputs) > 2 else None
    filters = node.outputs[0].shape if "BackpropFilter" in node.type else inputs[1].shape
    if not _is_half(node) or result is None or filters is None or len(result) != 4 or len(filters) != 4:
        return 0
    places, outputs, patch = math.prod(result[1:3]), filters[3], math.prod(filters[:3])
    together = places * patch + patch * outputs + places * outputs
    return math.ceil(_CONVOLUTION_TARGET / (2 * together)) * places * patch * 2


def _pooling_gradient_scratch(node: Node, inputs: tuple[Tensor, ...]) -> int:
    """Where each maximum was is found again: the pooled values, and a 64-bit number for each."""
    if not _is_half(node) or len(inputs) < 2 or inputs[1].shape is None:
        return 0
    return (inputs[1].bytes or 0) + 8 * math.prod(inputs[1].shape)


REPLICAS = "replicas"  # how many take part in an exchange


def _exchange_scratch(node: Node, inputs: tuple[Tensor, ...]) -> int:
    """A ring of replicas sends its pieces on; a piece arrives beside the one that it is added to, all but one's own."""
    replicas = node.attributes.get(REPLICAS, 1)
    return (inputs[0].bytes or 0) * (replicas - 1) // replicas if inputs else 0


def _labels_scratch(node: Node, inputs: tuple[Tensor, ...]) -> int:
    return 4 * inputs[0].shape[0] if inputs and inputs[0].shape else 0


_REDUCTIONS = ("Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm")
CPU_RULES = DeviceRules(
    "cpu",
    {
        **dict.fromkeys(_REDUCTIONS, _reduction_scratch),
        "DepthwiseConv2dNativeBackpropFilter": _depthwise_filter_scratch,
        "SparseSoftmaxCrossEntropyWithLogits": _labels_scratch,
        **dict.fromkeys(("MatMul", "_FusedMatMul"), _product_scratch),
        **dict.fromkeys(("Conv2DBackpropInput", "Conv2DBackpropFilter"), _convolution_gradient_scratch),
        "MaxPoolGrad": _pooling_gradient_scratch,
        "CollectiveReduceV2": _exchange_scratch,
    },
)
