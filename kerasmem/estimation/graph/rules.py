"""What TensorFlow's operations do with memory: tables of data, one for each kind of kernel.

An operation *aliases* (its output is its input's buffer), *forwards* (its output takes an input's buffer over where
nobody else holds it and the sizes agree), *allocates*, or makes nothing. Some need scratch while they run. Sources:
the kernels' calls of `forward_input_or_allocate_output` and `allocate_temp` in tensorflow/core/kernels, and
allocator events recorded from real steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kerasmem.devices.kernels import CUDA, EIGEN, ONEDNN, TITLES, CardKernels, CpuKernels
from kerasmem.estimation.graph.cuda import CUDA_FUNCTIONS, WORKSPACE_LIMIT, channels_last
from kerasmem.estimation.graph.program import ON_HOST, Node
from kerasmem.estimation.graph.scratch import FUNCTIONS, ONEDNN_FUNCTIONS, Chosen, Cores, Inputs, Need, Scratch
from kerasmem.files import package_data

# Names of operations by what they do; `data/operations.json` is where one is added.
OPERATIONS = package_data("kerasmem.estimation", "operations")

# The output is a view of an input's buffer (the number of the input).
ALIASES = frozenset(OPERATIONS["views"])

# Nothing is allocated while a step runs: handles, persistent values, control.
NOTHING = frozenset(OPERATIONS["nothing"])

# The tensor that comes out of a list is the one that went in: its place among the inputs (see `lists`).
TAKEN_FROM_LIST = {"TensorListPopBack": 2, "TensorListGetItem": 3}

# A variable is changed in place: value and change are read, the value is written.
UPDATES = frozenset(OPERATIONS["updates"])

# The output may take over the buffer of one of these inputs: `None` for any.
FORWARDS: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(OPERATIONS["unary"], (0,)),
    **dict.fromkeys(OPERATIONS["binary"], (0, 1)),
    **{name: None if places is None else tuple(places) for name, places in OPERATIONS["forwards"].items()},
}

# Each output is new memory.
ALLOCATES = frozenset(OPERATIONS["allocates"])

# Done at once on the thread that made it ready: the kernels that call themselves inexpensive.
INEXPENSIVE = frozenset(OPERATIONS["inexpensive"])

# What depends on whose kernels they are; `data/kernels.json` is where a kind is described.
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
        gathered: bytes of a second factor that is put in order number by number: as a rule, where rows lie in the same
            places of the cache, and for many rows; None where it is not.
        patches: gradient of a convolution → bytes of the patches that it copies.
        filters: bytes of the filter that it copies for each sample.
        others: bytes of other operations that do not work element by element, and of views that are written to.
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
    """Return how fast a kind of kernels is; TensorFlow's own operations take the same time beside oneDNN's."""
    row = KINDS[kind].get("rates", KINDS[ONEDNN]["rates"])  # on a card each takes its launch
    return Rates(**{**row, "others": {**KINDS["both"]["others"], **row.get("others", {})}})


@dataclass(frozen=True)
class KernelRules:
    """The kernels of one kind.

    Attributes:
        title: what a reader calls them.
        scratch: operation → the buffers that it needs while it runs.
        workers: threads that execute operations at once.
        cores: what an operation's work is divided by.
        forwards: operation → inputs whose buffer its output may take over, where these kernels differ.
        hidden_outputs: pooling → its gradient, to which it hands a second, hidden output.
        rewritten: operations that become others before they run, which changes the order of their consumers.
        absorbing: gradients of filters that take over that of the bias.
        rates: how fast they are.
        dtypes: what they compute in; None for all.
        lacks: dtype → operations that they have in the others of these, not in it.
        copied: of these, in which products and convolutions copy blocks of their operands, of unknown sizes.
        others: the kernels that compute the other dtypes; beside a card, those on the CPU.
        card: the card that they run on; None for a CPU.
        launch: seconds to start an operation on a card; all take as long and none is expensive. None on a CPU.
        upper: the same kernels where cuDNN takes as much to work in as it may; None on a CPU.
    """

    title: str = ""
    scratch: Mapping[str, Scratch] = field(default_factory=dict)
    workers: int = 2
    cores: Cores = field(default_factory=Cores)
    forwards: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    hidden_outputs: Mapping[str, str] = field(default_factory=dict)
    rewritten: frozenset[str] = frozenset()
    absorbing: frozenset[str] = frozenset()
    rates: Rates = field(default_factory=lambda: rates_of(ONEDNN))
    dtypes: tuple[str, ...] | None = None
    lacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    copied: tuple[str, ...] = ()
    others: KernelRules | None = None
    card: CardKernels | None = None
    launch: float | None = None
    upper: KernelRules | None = None

    def of(self, node: Node) -> KernelRules:
        """Return the kernels that run an operation: by where it runs, or the dtype of its first output."""
        if self.card is not None and self.others is not None:
            return self.others if ON_HOST in node.attributes else self
        if self.others is None or not node.outputs:
            return self
        dtype = node.outputs[0].dtype
        is_here = dtype in (self.dtypes or ()) and node.type not in self.lacks.get(dtype, ())
        return self if is_here else self.others

    def candidates(self, node: Node) -> tuple[int, ...] | None:
        """Return the inputs whose buffer an operation's output may take over: none, some, or all (None)."""
        return self.of(node).forwards.get(node.type, FORWARDS.get(node.type, ()))

    def needs(self, node: Node, inputs: Inputs) -> tuple[Need, ...]:
        """Return the buffers that an operation needs while it runs, given what it takes."""
        rules = self.of(node)
        scratch, compiled = rules.scratch.get(node.type), node.attributes.get("scratch", 0)
        if scratch is None:
            return (Need(compiled),) if compiled else ()
        return scratch(node, inputs, rules.cores)


def rules_of(kernels: CpuKernels | CardKernels) -> KernelRules:
    """Return the rules of the kernels that run on a machine, or on a card beside it."""
    if isinstance(kernels, CardKernels):
        return _on_card(kernels)
    own = _rules(EIGEN, kernels)
    if kernels.kind == EIGEN:
        return own
    return replace(_rules(ONEDNN, kernels), dtypes=kernels.dtypes, copied=kernels.copied, others=own)


def _on_card(kernels: CardKernels) -> KernelRules:
    beside = kernels.beside
    # What operations on the CPU work in is the host's memory.
    host = replace(_rules(beside.kind, beside), scratch={}, forwards={}, hidden_outputs={})
    chosen = Chosen(channels_last(kernels.capability))
    own = replace(
        _rules(CUDA, beside),
        cores=Cores(beside.intra_op_threads, card=chosen),
        others=host,
        card=kernels,
        launch=KINDS[CUDA]["launch"],
    )
    most = Cores(beside.intra_op_threads, card=replace(chosen, workspace=WORKSPACE_LIMIT))
    return replace(own, upper=replace(own, cores=most))


def _rules(kind: str, kernels: CpuKernels) -> KernelRules:
    row = KINDS[kind]
    known = {CUDA: CUDA_FUNCTIONS, ONEDNN: ONEDNN_FUNCTIONS}.get(kind, FUNCTIONS)
    scratch = {name: FUNCTIONS[which] for name, which in KINDS["both"]["scratch"].items()}
    scratch |= {name: known[which] for name, which in row["scratch"].items()}
    return KernelRules(
        TITLES[kind],
        scratch,
        workers=kernels.inter_op_threads,
        cores=Cores(kernels.intra_op_threads, private_cache=kernels.private_cache, vector=kernels.vector),
        forwards={name: tuple(places) for name, places in row["forwards"].items()},
        hidden_outputs=row["hidden_outputs"],
        rewritten=frozenset(row.get("rewritten", ())),
        absorbing=frozenset(row.get("absorbing", ())),
        lacks=row.get("lacks", {}),
        rates=rates_of(kind),
    )


def is_known(type_name: str) -> bool:
    """Return whether the tables say what the operation does."""
    return type_name in ALIASES or type_name in NOTHING or type_name in FORWARDS or type_name in ALLOCATES
