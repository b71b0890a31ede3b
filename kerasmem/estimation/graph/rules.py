"""Tables of what TensorFlow's operations do with memory, one for each kind of kernels: oneDNN, Eigen, CUDA.

An operation *aliases* (its output is its input's buffer), *forwards* (its output reuses an input's buffer if nothing
else holds it and the sizes agree), *allocates*, or makes nothing. Some need scratch while they run. Add an operation in
`data/operations.json`, and its scratch in `data/kernels.json`. Sources: the kernels' calls of
`forward_input_or_allocate_output` and `allocate_temp` in tensorflow/core/kernels, and allocator events recorded from
real steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kerasmem.devices.kernels import CUDA, EIGEN, ONEDNN, TITLES, CardKernels
from kerasmem.estimation.graph.cuda import CUDA_FUNCTIONS
from kerasmem.estimation.graph.program import ON_HOST, Node
from kerasmem.estimation.graph.scratch import FUNCTIONS, Inputs, Kernels, Need, Scratch
from kerasmem.files import package_data

OPERATIONS = package_data("kerasmem.estimation", "operations")

# The output is a view of an input's buffer (the number of the input).
ALIASES = frozenset(OPERATIONS["views"])

# Nothing is allocated while a step runs: handles, persistent values, control.
NOTHING = frozenset(OPERATIONS["nothing"])

# Number of the input that is the list's item and becomes the output (see `lists`).
TAKEN_FROM_LIST = {"TensorListPopBack": 2, "TensorListGetItem": 3}

# A variable is changed in place: value and change are read, the value is written.
UPDATES = frozenset(OPERATIONS["updates"])

# The output may reuse the buffer of one of these inputs; None: of any.
FORWARDS: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(OPERATIONS["unary"], (0,)),
    **dict.fromkeys(OPERATIONS["binary"], (0, 1)),
    **{name: None if inputs is None else tuple(inputs) for name, inputs in OPERATIONS["forwards"].items()},
}

# Each output is new memory.
ALLOCATES = frozenset(OPERATIONS["allocates"])

# Kernels that declare themselves inexpensive run at once on the thread that made them ready.
INEXPENSIVE = frozenset(OPERATIONS["inexpensive"])

KINDS = package_data("kerasmem.estimation", "kernels")


@dataclass(frozen=True)
class Rates:
    """How fast kernels are, in floating-point operations or bytes a second.

    Attributes:
        elements: bytes of what works element by element.
        forward: of convolutions.
        backward: of their gradients.
        depthwise: of depthwise convolutions and their gradients.
        product: of matrix products.
        factors: bytes of those with few rows, which wait for the weights.
        gathered: bytes of a second factor that Eigen gathers number by number: as a rule, for rows in the same places
            of the cache, and for many rows. None if it is not gathered.
        patches: gradient of a convolution → bytes of the patches that it copies.
        filters: bytes of the filter that it copies for each sample.
        others: bytes of single operations, and of views that are written to.
    """

    elements: float
    forward: float
    backward: float
    depthwise: float
    product: float
    factors: float
    gathered: tuple[float, float, float] | None = None
    patches: Mapping[str, float] = field(default_factory=dict)
    filters: float = math.inf
    others: Mapping[str, float] = field(default_factory=dict)


def rates_of(kind: str) -> Rates:
    """Return the rates of a kind of kernels; on a card they do not matter."""
    row = KINDS[kind].get("rates", KINDS[ONEDNN]["rates"])
    return Rates(**{**row, "others": {**KINDS["both"]["others"], **row.get("others", {})}})


@dataclass(frozen=True)
class KernelTable:
    """What one kind of kernels does with memory.

    Attributes:
        title: name for people.
        scratch: operation → function that returns the buffers it needs while it runs.
        forwards: operation → inputs whose buffer its output may reuse, if these kernels differ from `FORWARDS`.
        hidden_outputs: pooling → its gradient, which takes a second, hidden output of it.
        rewritten: operations that oneDNN replaces, which changes the order of their consumers.
        lacks: dtype → operations without a kernel in that dtype.
        rates: how fast they are.
    """

    title: str
    scratch: Mapping[str, Scratch]
    forwards: Mapping[str, tuple[int, ...]]
    hidden_outputs: Mapping[str, str]
    rewritten: frozenset[str]
    lacks: Mapping[str, Sequence[str]]
    rates: Rates


def _table(kind: str) -> KernelTable:
    row = KINDS[kind]
    functions = CUDA_FUNCTIONS if kind == CUDA else FUNCTIONS
    scratch = {name: FUNCTIONS[function] for name, function in KINDS["both"]["scratch"].items()}
    scratch |= {name: functions[function] for name, function in row["scratch"].items()}
    return KernelTable(
        TITLES[kind],
        scratch,
        {name: tuple(inputs) for name, inputs in row["forwards"].items()},
        row["hidden_outputs"],
        frozenset(row.get("rewritten", ())),
        row.get("lacks", {}),
        rates_of(kind),
    )


TABLES = {kind: _table(kind) for kind in (ONEDNN, EIGEN, CUDA)}
# Of operations on the CPU beside a card: their buffers are in the host's memory.
_HOST = replace(TABLES[EIGEN], scratch={}, forwards={}, hidden_outputs={})


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
    """Return how many threads start operations: a single one on a card, where every operation is inexpensive."""
    return 1 if isinstance(kernels, CardKernels) else kernels.inter_op_threads


def title_of(kernels: Kernels) -> str:
    """Return the kernels' name for people."""
    return TITLES[CUDA if isinstance(kernels, CardKernels) else kernels.kind]


def reusable_inputs(node: Node, kernels: Kernels) -> tuple[int, ...] | None:
    """Return the inputs whose buffer an operation's output may reuse: none, some, or all (None)."""
    return table_of(node, kernels).forwards.get(node.type, FORWARDS.get(node.type, ()))


def needs(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[Need, ...]:
    """Return the buffers that an operation needs while it runs."""
    scratch, compiled = table_of(node, kernels).scratch.get(node.type), node.attributes.get("scratch", 0)
    if scratch is not None:
        return scratch(node, inputs, kernels)
    return (Need(compiled),) if compiled else ()


def is_known(type_name: str) -> bool:
    """Return whether an operation is in the tables."""
    return type_name in ALIASES or type_name in NOTHING or type_name in FORWARDS or type_name in ALLOCATES
