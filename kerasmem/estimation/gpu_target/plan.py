"""XLA's plan of a step for a card, asked for from a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kerasmem.devices.cards import Card
from kerasmem.errors import MissingExtraError
from kerasmem.estimation.compiled.hlo import LiveBuffer
from kerasmem.estimation.compiled.planned import DEFAULT_MEMORY_LIMIT, DEFAULT_TIMEOUT, ENVIRONMENT
from kerasmem.estimation.gpu_target.targets import check_target, target_text
from kerasmem.estimation.gpu_target.worker import EXTRA, FEATURE, missing_parts
from kerasmem.models.op_names import Instant
from kerasmem.models.request import ModelRequest
from kerasmem.processes.task import run_child
from kerasmem.records import Record

WORKER = "kerasmem.estimation.gpu_target.worker"
# XLA writes matrix products with Triton from Ampere on; before, there is nothing to choose.
_TRITON_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Variant:
    """One compilation of the step.

    Attributes:
        limited: XLA planned for the card's memory; where not, for as much as it wants.
        triton: XLA might use Triton for matrix products, as it does unless told otherwise.
        argument: bytes of the step's arguments: weights, optimizer, the batch.
        output: bytes of what it returns, the new weights included.
        alias: bytes of outputs that take the place of arguments.
        temp: bytes of everything in between.
        recomputed: XLA computes values a second time to save memory.
        seconds: how long it took to compile.
    """

    limited: bool
    triton: bool
    argument: int
    output: int
    alias: int
    temp: int
    recomputed: bool = False
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Bytes that the step needs by this plan."""
        return self.argument + self.output - self.alias + self.temp


@dataclass(frozen=True)
class GpuPlan(Record, what="GPU plan"):
    """What XLA plans for a step on a card.

    Attributes:
        card: the card's key in the catalogue.
        memory_bytes: the memory that XLA was told of.
        variants: the compilations; the first is the one that XLA makes by itself on that card.
        arguments: sizes in bytes of the step's arguments, by group: "trainable", "non_trainable", "optimizer",
            "metrics", "inputs".
        live: what has memory at the peak of the first variant, the largest first; empty where XLA does not say.
        instant: when that is.
        convolutions: for each convolution that cuDNN runs the bytes of its inputs and outputs, and its operation.
        notes: what was assumed of the model's training.
        seconds: how long the whole took.
        host_bytes: the most memory that the process had.
    """

    card: str
    memory_bytes: int
    variants: tuple[Variant, ...]
    arguments: Mapping[str, tuple[int, ...]]
    live: tuple[LiveBuffer, ...] = ()
    instant: Instant | None = None
    convolutions: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    host_bytes: int = 0

    @property
    def likely(self) -> Variant:
        """The plan that XLA makes by itself for this card."""
        return self.variants[0]


def gpu_target_plan(
    request: ModelRequest,
    card: Card,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    memory_limit: int | None = DEFAULT_MEMORY_LIMIT,
    memory_bytes: int | None = None,
) -> GpuPlan:
    """Have XLA plan the step of a model for a card; no GPU is needed and none is touched.

    The step is compiled with Triton for matrix products and without, as on the card the faster of the two is taken
    at run time; and where XLA recomputes to keep within the card's memory, also without that limit.

    Args:
        request: the model and its training.
        card: a card of the catalogue, from compute capability 7.0 on.
        timeout: seconds for all of it.
        memory_limit: bytes of this machine's memory that the process may take.
        memory_bytes: the memory to plan for, in place of the card's own.

    Raises:
        UsageError: the card's hardware figures are not known, or the model's step is written for TensorFlow alone.
        MissingExtraError: JAX and its compiler for NVIDIA's GPUs are not installed.
        ChildFailure: it took too long or too much memory, or XLA refused; the reason says which.
    """
    check_target(card)
    if missing_parts():
        raise MissingExtraError(FEATURE, EXTRA)
    memory = card.memory_bytes if memory_bytes is None else memory_bytes
    data = {
        "model": request.to_dict(),
        "target": target_text(card, memory),
        "has_triton": card.compute_capability >= _TRITON_CAPABILITY,
    }
    answer = run_child(WORKER, data, timeout=timeout, memory_limit=memory_limit, env=ENVIRONMENT)
    return GpuPlan.from_dict({"card": card.key, "memory_bytes": memory, **answer})
