"""From XLA's plan to what a step needs on the card: the plan, and an interval for each thing that it leaves out.

Nothing here was fitted to measurements. Each interval is a rule with its reason, and what has no rule is named without
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kerasmem.devices.cards import Card
from kerasmem.estimation.compiled.planned import Weights, add_weights, allocated, divide, requests, with_row
from kerasmem.estimation.gpu_target.plan import GpuPlan, Variant, gpu_target_plan
from kerasmem.estimation.outcome import Outcome
from kerasmem.estimation.replay import smallest_limit
from kerasmem.estimation.report import Pool, Unmodelled
from kerasmem.models.request import ModelRequest
from kerasmem.units import GIB

# What XLA lets cuDNN have for one convolution unless TF_CUDNN_WORKSPACE_LIMIT_IN_MB says otherwise: 4096 MiB, by
# `ScratchAllocator::GetDefaultMemoryLimitInBytes` of XLA's algorithm picker (openxla/xla, xla/service/gpu/autotuning).
WORKSPACE_LIMIT = 4 * GIB


@dataclass(frozen=True)
class Interval:
    """Something that takes between `low` and `high` bytes beside the plan, and why."""

    what: str
    low: int
    high: int
    why: str


@dataclass(frozen=True)
class GpuNeed:
    """What a step needs on a card.

    Attributes:
        total: bytes of the plan that XLA makes by itself.
        low: the least: of all variants, with the lower ends of the intervals, and none of it wasted by the allocator
            (where it holds all of the card's memory from the start, its waste is next to nothing).
        high: the most: of all variants, with the upper ends.
        intervals: what is added to the variants' ends.
        unmodelled: what costs memory and has no bytes here.
        notes: how the figures came about.
    """

    total: int
    low: int
    high: int
    intervals: tuple[Interval, ...]
    unmodelled: tuple[Unmodelled, ...]
    notes: tuple[str, ...]


def gpu_target_outcome(
    request: ModelRequest,
    card: Card,
    rows: Collection[str] = (),
    weights: Weights | None = None,
) -> Outcome:
    """Return what the step needs on a card by XLA's plan for it, its buffers put through the allocator's rules.

    Args:
        request: the model and its training.
        card: a card of the catalogue.
        rows: names of the layers in the report; what belongs to another one counts as the row that has it inside.
        weights: for "trainable" and "non_trainable" each weight's bytes and row, in the model's order.

    Raises:
        MissingExtraError: the compiler for NVIDIA's GPUs is not installed.
        KerasmemError: there is no plan; the message says why.
    """
    plan = gpu_target_plan(request, card)
    need = gpu_need(plan, lambda variant: allocated(_requests(plan, variant)).peak - variant.total)
    allocator = allocated(_requests(plan, plan.likely))
    limit = max(smallest_limit(_requests(plan, each)) for each in plan.variants)
    within = plan.likely.temp + plan.likely.output - plan.likely.alias
    categories, layers = divide(plan.arguments, plan.live, within, frozenset(rows))
    add_weights(layers, weights or {}, plan.arguments, plan.arguments)
    categories["allocator"] = need.total - sum(categories.values())
    return Outcome(
        "gpu-target", "xla", need.total, need.low, max(need.high, limit),
        Pool(plan.likely.total, need.total, allocator.reserved, None, limit),
        categories, layers, with_row(plan.instant, frozenset(rows)),
        need.unmodelled,
        (*need.notes, *(f"{each.what}: up to {each.high:,} B more ({each.why})" for each in need.intervals)),
    )  # fmt: skip


def _requests(plan: GpuPlan, variant: Variant) -> list[tuple[int, int]]:
    return requests(plan.arguments, variant.output - variant.alias, variant.temp)


def gpu_need(plan: GpuPlan, allocator_bytes: Callable[[Variant], int] | None = None) -> GpuNeed:
    """Return the bytes that the step needs by the plan, and their interval.

    Args:
        plan: from `gpu_target_plan`.
        allocator_bytes: for a variant the bytes that the allocator takes beyond what it is asked for (rounding and
            waste in its chunks); None leaves them out and says so.
    """
    sizes = [each.total + (allocator_bytes(each) if allocator_bytes else 0) for each in plan.variants]
    intervals = tuple(each for each in (workspace_interval(plan),) if each is not None)
    return GpuNeed(
        total=sizes[0],
        low=min(each.total for each in plan.variants) + sum(each.low for each in intervals),
        high=max(sizes) + sum(each.high for each in intervals),
        intervals=intervals,
        unmodelled=_unmodelled(plan, allocator_bytes is not None),
        notes=_notes(plan),
    )


def workspace_interval(plan: GpuPlan) -> Interval | None:
    """Return what cuDNN may take for its convolutions beside the plan; None where there are none.

    Without the card XLA cannot ask cuDNN which of its algorithms it will run, and counts 0 bytes for each. Many need
    none. Those that work in another layout hold a copy of the input, the filter and the output of one convolution,
    and convolutions run one after another, so the largest convolution's three bound that. FFT and some Winograd
    algorithms may want more; XLA gives none more than `WORKSPACE_LIMIT`.
    """
    if not plan.convolutions:
        return None
    size, operation = max(plan.convolutions)
    return Interval(
        what=f"cuDNN's workspace for {len(plan.convolutions)} convolutions",
        low=0,
        high=min(size, WORKSPACE_LIMIT),
        why="the algorithm is chosen on the card; at most a copy of the input, filter and output of the largest, "
        f"{operation}",
    )


def _unmodelled(plan: GpuPlan, has_allocator: bool) -> tuple[Unmodelled, ...]:
    inputs = sum(plan.arguments.get("inputs", ()))
    found = [
        Unmodelled(
            "CUDA context and libraries", "outside the allocator; they depend on the driver, the card and the version"
        ),
        Unmodelled("autotuning", "while the first step is compiled on the card; freed before it runs"),
        Unmodelled("prefetched batches", "each batch that the data pipeline puts on the card ahead of time", inputs),
    ]
    if not has_allocator:
        found.append(Unmodelled("allocator", "rounding and waste in the chunks that the allocator hands out"))
    return tuple(found)


def _notes(plan: GpuPlan) -> tuple[str, ...]:
    notes = [f"XLA's plan for {plan.card}, made without the card; not compared with a measurement on it"]
    if plan.likely.recomputed:
        free = next((each for each in plan.variants if not each.limited and each.triton == plan.likely.triton), None)
        wanted = "" if free is None else f"; without that limit it would take {free.total:,} B"
        notes.append(f"XLA recomputes values to keep within {plan.memory_bytes:,} B{wanted}")
    return (*notes, *plan.notes)
