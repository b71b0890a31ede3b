"""What a method finds: one frozen result for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kerasmem.estimation.report import XLA_SPREAD, Bytes, Pool, Unmodelled
from kerasmem.models.op_names import Instant

# How far from a total real steps are said to lie at least, as a share of it. In graph mode processes that train the
# same model differ in their medians, and steps within one by up to 15 %, as threads race; what the simulation varies is
# part of that. XLA's plan is exact; what chunks the variables lie in is not, as it depends on all that was done before.
SPREAD = {"graph": 0.09, "xla": XLA_SPREAD}


@dataclass(frozen=True)
class Outcome:
    """The peak of a step.

    Attributes:
        method: "xla", "graph", "gpu-target", "probe" or "formula".
        execution: "xla" or "graph"; "none" of the formula.
        total: bytes in use at the peak.
        low: the least that the method claims; None where it claims nothing.
        high: the most.
        pool: requested, in use, reserved, smallest limit.
        categories: bytes at the peak by category of `Bytes`, as far as the method divides.
        layers: bytes at the peak by layer, weights included; None where the method does not know the peak's.
        instant: when the peak is reached, where known.
        unmodelled: what costs memory and is not in the total.
        notes: how it was obtained.
    """

    method: str
    execution: str
    total: int
    low: int | None
    high: int | None
    pool: Pool | None = None
    categories: Mapping[str, int | None] = field(default_factory=dict)
    layers: Mapping[str, int] | None = field(default_factory=dict)
    instant: Instant | None = None
    unmodelled: tuple[Unmodelled, ...] = ()
    notes: tuple[str, ...] = ()


class Shares:
    """The bytes at a peak by category and by layer, counted one by one.

    Attributes:
        categories: bytes by category of `Bytes`.
        layers: bytes by layer.
    """

    def __init__(self) -> None:
        self.categories = dict.fromkeys(Bytes.CATEGORIES, 0)
        self.layers: Counter[str] = Counter()

    def add(self, size: int, category: str, layer: str | None = None) -> None:
        """Count bytes in, for a layer where they belong to one."""
        self.categories[category] += size
        if layer is not None:
            self.layers[layer] += size

    def fill(self, total: int) -> None:
        """Count what is missing from a total as the allocator's."""
        self.categories["allocator"] += total - sum(self.categories.values())
