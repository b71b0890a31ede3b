"""The methods that need a process of their own: XLA's plan for a card that is not here, and steps that really run."""

from __future__ import annotations

from collections import Counter

from kerasmem.devices.cards import Card
from kerasmem.estimation.allocator import BFCAllocator
from kerasmem.estimation.gpu_target.need import gpu_need
from kerasmem.estimation.gpu_target.plan import GpuPlan, Variant, gpu_target_plan
from kerasmem.estimation.outcome import Outcome
from kerasmem.estimation.probe.probing import probe
from kerasmem.estimation.report import Pool
from kerasmem.models.request import ModelRequest

_KINDS = {"forward": "activations", "backward": "gradients", "optimizer": "workspace"}


def gpu_target_outcome(request: ModelRequest, card: Card) -> Outcome:
    """Return what the step needs on a card by XLA's plan for it, its buffers put through the allocator's rules.

    Raises:
        MissingExtraError: the compiler for NVIDIA's GPUs is not installed.
        KerasmemError: there is no plan; the message says why.
    """
    plan = gpu_target_plan(request, card)
    need = gpu_need(plan, lambda variant: _in_allocator(plan, variant).peak - variant.total)
    allocator = _in_allocator(plan, plan.likely)
    categories, layers = _divide(plan)
    categories["allocator"] = need.total - sum(categories.values())
    return Outcome(
        "gpu-target", "xla", need.total, need.low, need.high,
        Pool(plan.likely.total, need.total, allocator.reserved),
        categories, layers, plan.instant,
        need.unmodelled,
        (*need.notes, *(f"{each.what}: up to {each.high:,} B more ({each.why})" for each in need.intervals)),
    )  # fmt: skip


def _in_allocator(plan: GpuPlan, variant: Variant) -> BFCAllocator:
    """Return the allocator after the state, the batch and the step's own buffers were asked of it."""
    allocator = BFCAllocator()
    for group in ("trainable", "non_trainable", "metrics", "optimizer", "inputs"):
        for size in plan.arguments.get(group, ()):
            allocator.allocate(size)
    for size in (variant.output - variant.alias, variant.temp):
        if size > 0:
            allocator.allocate(size)
    return allocator


def _divide(plan: GpuPlan) -> tuple[dict[str, int], dict[str, int]]:
    groups = {name: sum(sizes) for name, sizes in plan.arguments.items()}
    categories = {
        "weights": groups.get("trainable", 0) + groups.get("non_trainable", 0) + groups.get("metrics", 0),
        "optimizer": groups.get("optimizer", 0),
        "gradients": 0,
        "activations": 0,
        "inputs": groups.get("inputs", 0),
        "workspace": 0,
    }
    layers: Counter[str] = Counter()
    known = 0
    within = plan.likely.temp + plan.likely.output - plan.likely.alias
    for each in plan.live:
        if each.phase is None:  # an argument, counted above
            continue
        if known + each.bytes > within:
            break
        known += each.bytes
        categories[_KINDS[each.phase]] += each.bytes
        if each.layer is not None:
            layers[each.layer] += each.bytes
    categories["workspace"] += within - known
    return categories, dict(layers)


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
