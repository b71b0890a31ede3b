"""What a method that looks at the step itself finds: one frozen result for xla, graph, gpu-target and probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kerasmem.estimation.report import Pool, Unmodelled
from kerasmem.models.op_names import Instant

# How far from a total real steps are said to lie at least, as a share of it. In graph mode processes that train the
# same model differ in their medians, and steps within one by up to 15 %, as threads race; what the simulation varies is
# part of that. XLA's plan is exact; what chunks the variables lie in is not, as it depends on all that was done before.
SPREAD = {"graph": 0.09, "xla": 0.01}


@dataclass(frozen=True)
class Outcome:
    """The peak of a step.

    Attributes:
        method: "xla", "graph", "gpu-target", "probe" or "measure".
        execution: "xla" or "graph".
        total: bytes in use at the peak.
        low: the least that the method claims.
        high: the most.
        pool: requested, in use, reserved, smallest limit.
        categories: bytes at the peak by category of `Bytes`; None where the method does not divide.
        layers: bytes at the peak by layer, weights included.
        instant: when the peak is reached, where known.
        unmodelled: what costs memory and is not in the total.
        notes: how it was obtained.
    """

    method: str
    execution: str
    total: int
    low: int
    high: int
    pool: Pool
    categories: Mapping[str, int] | None = None
    layers: Mapping[str, int] = field(default_factory=dict)
    instant: Instant | None = None
    unmodelled: tuple[Unmodelled, ...] = ()
    notes: tuple[str, ...] = ()
