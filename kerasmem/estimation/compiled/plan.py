"""XLA's plan of a step, and its memory by category and layer. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kerasmem.estimation.allocator import BFCAllocator
from kerasmem.estimation.report import Outcome, Shares
from kerasmem.models.op_names import CATEGORIES, Attribution, Origin
from kerasmem.units import MIB

_FUNCTION = re.compile(r"\bp?jit\([^()]*\)")
_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|remat)\(")
HOPPER = (9, 0)  # compute capability
_HOPPER_WORKSPACE, _CUBLAS_WORKSPACE = 32 * MIB, 4 * MIB

Weights = Mapping[str, Sequence[tuple[int, str | None]]]  # by group: each weight's bytes and the row that counts it
Held = Iterable[tuple[int, str, str | None]]  # bytes, category and layer of what a step holds from beginning to end


class JaxNames(Attribution):
    """Looks up the origin of operations by the names that JAX gives them.

    JAX wraps the scope of a layer's call in what is done to it: `jvp(conv1)` going forward, `transpose(jvp(conv1))`
    going back. The last part is the operation itself, and `jit(relu)` a function of JAX's: neither is a layer.

    Args:
        layers: the names of the model's layers.
        optimizer: the optimizer's name; None for inference.
        rows: the names of the layers in the report; without any, a layer's whole path is its row.

    Examples:
        >>> names = JaxNames({"encoder", "dense"}, "adam")
        >>> names.origin("jit(train_step)/transpose(jvp(encoder))/dense/dot_general")
        Origin(layer='encoder/dense', phase='backward')
    """

    def __init__(self, layers: Collection[str], optimizer: str | None = None, rows: Collection[str] = ()) -> None:
        super().__init__({}, rows, () if optimizer is None else (optimizer,))
        self.layers = frozenset(layers)

    def origin(self, name: str) -> Origin:
        """Return the origin of the operation of this name."""
        scopes = _FUNCTION.sub("", name.rpartition("/")[0])
        pieces = _WRAPPER.sub("", scopes).replace(")", "").split("/")
        if any(map(self._is_optimizer, pieces)):
            return Origin(None, "optimizer")
        layers = [piece for piece in pieces if piece in self.layers]
        paths = ("/".join(layers[:end]) for end in range(len(layers), 0, -1))
        row = next((path for path in paths if not self._rows or path in self._rows), None)
        return Origin(row, "backward" if "transpose(" in name else "forward")

    def short_name(self, name: str) -> str:
        """Return the operation itself, the last part of the name."""
        return name.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class XlaPlan:
    """XLA's plan of one compilation.

    Attributes:
        argument: bytes of the arguments.
        results: bytes of each buffer that the step returns and that no argument lends.
        temporary: bytes of the buffers in between.
        live: the temporary buffers when most of them are in use: (bytes, the operation that made it), in no order.
        at: the operation that runs then.
        convolutions: for each of cuDNN's convolutions without workspace in the plan the bytes of its inputs and
            outputs, and its operation.
        products: for each matrix product the bytes of buffers that it has in cuBLAS and not in a kernel of Triton's.
        is_recomputed: whether XLA computes values a second time to save memory.
    """

    argument: int
    results: tuple[int, ...]
    temporary: int
    live: tuple[tuple[int, str], ...] = ()
    at: str | None = None
    convolutions: tuple[tuple[int, str], ...] = ()
    products: tuple[int, ...] = ()
    is_recomputed: bool = False

    @property
    def requested(self) -> int:
        """The bytes that the step asks its allocator for, beside the arguments."""
        return self.temporary + sum(self.results)

    @property
    def total(self) -> int:
        """The bytes of the step by this plan."""
        return self.argument + self.requested

    def divided(self, outcome: Outcome, held: Held, names: Attribution) -> Outcome:
        """Return the outcome of this plan with its peak divided by category and by layer.

        Args:
            outcome: the outcome.
            held: the arguments.
            names: origins of the operations in the plan.
        """
        shares = Shares()
        for size, category, layer in held:
            shares.add(size, category, layer)
        for size, name in self.live:
            origin = names.origin(name)
            shares.add(size, CATEGORIES[origin.phase], origin.layer)
        shares.add(self.requested - sum(size for size, _ in self.live), "workspace")
        shares.fill(outcome.total)
        instant = None if self.at is None else names.instant(self.at)
        return replace(outcome, **shares.categories, layers=shares.layers, instant=instant)


def product_bytes(plans: Iterable[XlaPlan], capability: tuple[int, int]) -> int:
    """Return the most bytes that a matrix product may take beside the plans if XLA chooses the fastest kernel.

    One that is planned for Triton may run in cuBLAS, with buffers for operands and results that the kernel kept to
    itself. cuBLAS has a workspace: 32 MiB from Hopper on (`GemmConfig::kHopperWorkspace`), where plans without the card
    have 4 MiB (`CublasLtBackend::GetDefaultConfig`), as everywhere before. Products run one after another.
    """
    products = [size for plan in plans for size in plan.products]
    workspace = _HOPPER_WORKSPACE if capability >= HOPPER else _CUBLAS_WORKSPACE
    return max(products) + workspace if products else 0


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A step that was compiled on JAX, once or in variants.

    Attributes:
        arguments: sizes in bytes of the step's arguments on a device, by group: "trainable", "non_trainable",
            "optimizer", "metrics", "inputs".
        plans: the compilations within the device's memory; the first is the one that XLA makes by itself.
        unlimited: the same without that limit, if it changes them.
        layers: the names of the model's layers.
        optimizer: the optimizer's name; None for inference.
        notes: assumptions about the training.
    """

    arguments: Mapping[str, tuple[int, ...]]
    plans: tuple[XlaPlan, ...]
    unlimited: tuple[XlaPlan, ...] = ()
    layers: tuple[str, ...] = ()
    optimizer: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def likely(self) -> XlaPlan:
        """The plan that XLA makes by itself."""
        return self.plans[0]

    def requests(self, plan: XlaPlan) -> list[tuple[int, int]]:
        """Return a plan's requests to the allocator, one after another: a number and bytes."""
        groups = ("trainable", "non_trainable", "metrics", "optimizer", "inputs")
        sizes = [size for group in groups for size in self.arguments.get(group, ())]
        sizes += [size for size in (sum(plan.results), plan.temporary) if size > 0]
        return list(enumerate(sizes))

    def allocated(self, plan: XlaPlan) -> BFCAllocator:
        """Return the allocator after all requests of a plan."""
        allocator = BFCAllocator()
        for _, size in self.requests(plan):
            allocator.allocate(size)
        return allocator

    def held(self, weights: Weights) -> Held:
        """Yield the arguments: bytes, category, and the row that counts them.

        Args:
            weights: of the model, in its order; a group that the step has otherwise belongs to no row.
        """
        for group, sizes in self.arguments.items():
            category = group if group in ("optimizer", "inputs") else "weights"
            of_model = weights.get(group, ())
            is_same = [size for size, _ in of_model] == list(sizes)
            rows = [row for _, row in of_model] if is_same else [None] * len(sizes)
            for size, row in zip(sizes, rows, strict=True):
                yield size, category, row
