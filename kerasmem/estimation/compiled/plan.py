"""XLA's plan of a step, and its memory by category and layer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kerasmem.estimation.allocator import BFCAllocator
from kerasmem.estimation.report import Shares
from kerasmem.models.op_names import CATEGORIES, Instant, Origin
from kerasmem.records import Record
from kerasmem.units import MIB

HOPPER = (9, 0)  # compute capability
_HOPPER_WORKSPACE, _CUBLAS_WORKSPACE = 32 * MIB, 4 * MIB

Weights = Mapping[str, Sequence[tuple[int, str | None]]]  # by group: each weight's bytes and the row that counts it
Held = Iterable[tuple[int, str, str | None]]  # bytes, category and layer of what a step holds from beginning to end


class Names(Protocol):
    """Looks up the origin of operations by their names."""

    def origin(self, name: str) -> Origin:
        """Return the origin of the operation of this name."""

    def instant(self, name: str) -> Instant:
        """Describe the moment at which an operation runs."""


@dataclass(frozen=True, kw_only=True)
class XlaPlan(Record, what="XLA plan"):
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
        cpu_scratch: bytes that one call of a library's kernel on a CPU copies beside the plan, and takes at most.
    """

    argument: int
    results: tuple[int, ...]
    temporary: int
    live: tuple[tuple[int, str], ...] = ()
    at: str | None = None
    convolutions: tuple[tuple[int, str], ...] = ()
    products: tuple[int, ...] = ()
    is_recomputed: bool = False
    cpu_scratch: tuple[int, int] = (0, 0)

    @property
    def requested(self) -> int:
        """The bytes that the step asks its allocator for, beside the arguments."""
        return self.temporary + sum(self.results)

    @property
    def total(self) -> int:
        """The bytes of the step by this plan."""
        return self.argument + self.requested

    def instant(self, names: Names) -> Instant | None:
        """Return when most of the temporary buffers are in use."""
        return None if self.at is None else names.instant(self.at)

    def divided(self, total: int, held: Held, names: Names) -> Shares:
        """Divide the bytes at the peak by category and by layer.

        Args:
            total: bytes in use at the peak.
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
        shares.fill(total)
        return shares


def product_bytes(plans: Iterable[XlaPlan], capability: tuple[int, int]) -> int:
    """Return the most that a matrix product may take beside the plans on a card, where XLA takes the fastest kernel.

    One that is planned for Triton may run in cuBLAS, with buffers for operands and results that the kernel kept to
    itself. cuBLAS has a workspace: 32 MiB from Hopper on (`GemmConfig::kHopperWorkspace`), where plans without the card
    have 4 MiB (`CublasLtBackend::GetDefaultConfig`), as everywhere before. Products run one after another.
    """
    products = [size for plan in plans for size in plan.products]
    workspace = _HOPPER_WORKSPACE if capability >= HOPPER else _CUBLAS_WORKSPACE
    return max(products) + workspace if products else 0


@dataclass(frozen=True, kw_only=True)
class CompiledStep(Record, what="compiled step"):
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
