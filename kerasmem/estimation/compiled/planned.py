"""A plan of XLA's as requests to the allocator, and what lives at its peak by category and layer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kerasmem.estimation.allocator import BFCAllocator
from kerasmem.estimation.compiled.hlo import BACKWARD, OPTIMIZER, LiveBuffer
from kerasmem.estimation.report import Shares
from kerasmem.models.op_names import CATEGORIES, Instant
from kerasmem.records import Record
from kerasmem.units import GIB

Weights = Mapping[str, Sequence[tuple[int, str | None]]]  # by group: each weight's bytes and the row that counts it

DEFAULT_TIMEOUT = 600.0
DEFAULT_MEMORY_LIMIT = 8 * GIB
# A process that compiles must reach no GPU, no other backend, and no settings meant for the program that the user
# trains with.
ENVIRONMENT = {
    "KERAS_BACKEND": "jax",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


@dataclass(frozen=True, kw_only=True)
class PlannedBytes:
    """What one compilation of the step takes on a device, in bytes.

    Attributes:
        argument: of the step's arguments: weights, optimizer, the batch.
        output: of what it returns, the new weights included.
        alias: of outputs that take the place of arguments.
        temp: of everything in between.
    """

    argument: int
    output: int
    alias: int
    temp: int

    @property
    def total(self) -> int:
        """Bytes that the step needs by this plan."""
        return self.argument + self.beside

    @property
    def beside(self) -> int:
        """Bytes of the plan beside the arguments."""
        return self.output - self.alias + self.temp


@dataclass(frozen=True, kw_only=True)
class CompiledPlan(Record, what="plan"):
    """What XLA says of a step that it compiled.

    Attributes:
        arguments: sizes in bytes of the step's arguments on a device, by group: "trainable", "non_trainable",
            "optimizer", "metrics", "inputs".
        live: what has memory at the peak, the largest first; empty where XLA does not say.
        instant: when that is.
        notes: what was assumed of the model's training.
    """

    arguments: Mapping[str, tuple[int, ...]]
    live: tuple[LiveBuffer, ...] = ()
    instant: Instant | None = None
    notes: tuple[str, ...] = ()

    def requests(self, planned: PlannedBytes) -> list[tuple[int, int]]:
        """Return what a compilation asks of the allocator, one after another: a number and bytes."""
        groups = ("trainable", "non_trainable", "metrics", "optimizer", "inputs")
        sizes = [size for group in groups for size in self.arguments.get(group, ())]
        sizes += [size for size in (planned.output - planned.alias, planned.temp) if size > 0]
        return list(enumerate(sizes))

    def allocated(self, planned: PlannedBytes) -> BFCAllocator:
        """Return the allocator after all of this was asked of it."""
        allocator = BFCAllocator()
        for _, size in self.requests(planned):
            allocator.allocate(size)
        return allocator

    def divided(
        self,
        planned: PlannedBytes,
        total: int,
        rows: frozenset[str],
        weights: Weights,
    ) -> Shares:
        """Return the bytes at the peak by category, and by layer.

        Args:
            planned: the compilation; what is not known of its bytes beside the arguments is workspace.
            total: bytes in use at the peak.
            rows: names of the layers in the report.
            weights: of the model, in its order; they are shared out where the plan has the same ones.
        """
        shares = Shares()
        for group, sizes in self.arguments.items():
            shares.add(sum(sizes), group if group in ("optimizer", "inputs") else "weights")
        left = planned.beside
        for each in self.live:
            if each.phase is None:  # an argument, counted above
                continue
            if each.bytes > left:
                break
            left -= each.bytes
            shares.add(each.bytes, CATEGORIES[each.phase], row_of(each.layer, rows))
        shares.add(left, "workspace")
        shares.fill(total)
        for group, of_model in weights.items():
            if [size for size, _ in of_model] == list(self.arguments.get(group, ())):
                for size, row in of_model:
                    if row is not None:
                        shares.layers[row] += size
        return shares


@dataclass(frozen=True, kw_only=True)
class OwnPlan(CompiledPlan, PlannedBytes, what="compiled plan"):
    """XLA's plan where the step was compiled once."""


def row_of(path: str | None, rows: frozenset[str]) -> str | None:
    """Return the deepest row that a path of layers leads through; the path itself where no rows are known."""
    if path is None or not rows:
        return path
    parts = path.split("/")
    return next((row for end in range(len(parts), 0, -1) if (row := "/".join(parts[:end])) in rows), None)


def with_row(instant: Instant | None, rows: frozenset[str]) -> Instant | None:
    """Return an instant whose layer is a row of the report."""
    if instant is None or row_of(instant.layer, rows) == instant.layer:
        return instant
    return instant_of(instant.operation, row_of(instant.layer, rows), instant.phase)


def instant_of(operation: str, layer: str | None, phase: str | None) -> Instant:
    """Return the moment at which an operation runs, with its words for people."""
    what = layer or operation.rpartition("/")[2]
    text = f"while computing the gradient of {what}" if phase == BACKWARD else f"while computing {what}"
    if phase == OPTIMIZER:
        text = "while the optimizer updates the weights"
    return Instant(text, operation, layer, phase)
