"""The methods that need a process of their own: XLA's plan for a card that is not here, and steps that really run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kerasmem.devices.cards import Card
from kerasmem.estimation.allocator import BFCAllocator
from kerasmem.estimation.gpu_target.need import gpu_need
from kerasmem.estimation.gpu_target.plan import GpuPlan, Variant, gpu_target_plan, instant_of
from kerasmem.estimation.outcome import Outcome
from kerasmem.estimation.planned import divide, requests, row_of
from kerasmem.estimation.probe.probing import probe
from kerasmem.estimation.replay import smallest_limit
from kerasmem.estimation.report import Pool
from kerasmem.models.op_names import Instant
from kerasmem.models.request import ModelRequest


def gpu_target_outcome(
    request: ModelRequest,
    card: Card,
    rows: Collection[str] = (),
    weights: Mapping[str, Sequence[tuple[int, str | None]]] | None = None,
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
    need = gpu_need(plan, lambda variant: _in_allocator(plan, variant).peak - variant.total)
    allocator = _in_allocator(plan, plan.likely)
    limit = max(smallest_limit(_requests(plan, each)) for each in plan.variants)
    within = plan.likely.temp + plan.likely.output - plan.likely.alias
    categories, layers = divide(plan.arguments, plan.live, within, frozenset(rows))
    _add_weights(plan, weights or {}, layers)
    categories["allocator"] = need.total - sum(categories.values())
    return Outcome(
        "gpu-target", "xla", need.total, need.low, max(need.high, limit),
        Pool(plan.likely.total, need.total, allocator.reserved, None, limit),
        categories, layers, with_row(plan.instant, frozenset(rows)),
        need.unmodelled,
        (*need.notes, *(f"{each.what}: up to {each.high:,} B more ({each.why})" for each in need.intervals)),
    )  # fmt: skip


def _in_allocator(plan: GpuPlan, variant: Variant) -> BFCAllocator:
    """Return the allocator after the state, the batch and the step's own buffers were asked of it."""
    allocator = BFCAllocator()
    for _, size in _requests(plan, variant):
        allocator.allocate(size)
    return allocator


def _requests(plan: GpuPlan, variant: Variant) -> list[tuple[int, int]]:
    return requests(plan.arguments, variant.output - variant.alias, variant.temp)


def with_row(instant: Instant | None, rows: frozenset[str]) -> Instant | None:
    """Return an instant whose layer is a row of the report."""
    if instant is None or row_of(instant.layer, rows) == instant.layer:
        return instant
    return instant_of(instant.operation, row_of(instant.layer, rows), instant.phase)


def _add_weights(
    plan: GpuPlan, weights: Mapping[str, Sequence[tuple[int, str | None]]], layers: dict[str, int]
) -> None:
    """Add to the layers their weights, where the plan has the same ones."""
    for group, known in weights.items():
        if [size for size, _ in known] != list(plan.arguments.get(group, ())):
            continue
        for size, row in known:
            if row is not None:
                layers[row] = layers.get(row, 0) + size


def probe_outcome(request: ModelRequest, is_fixed: bool = False) -> Outcome:
    """Return what the step needs by running it at small batches.

    Raises:
        KerasmemError: a step fails, or memory does not grow in proportion to the batch.
    """
    found = probe(request, is_fixed=is_fixed)
    divided = {"weights": found.weights, "inputs": found.inputs}
    if found.optimizer is not None:
        divided["optimizer"] = found.optimizer
    return Outcome(
        "probe", found.execution, found.total, found.low, max(found.high, found.smallest_limit or 0),
        Pool(found.requested, found.total, found.reserved, None, found.smallest_limit),
        divided,
        notes=found.notes,
    )  # fmt: skip
