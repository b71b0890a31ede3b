"""What one of several devices needs by XLA's plan for it: weights, slots or the batch in shards, Keras on JAX."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.estimation.compiled import planned
from kerasmem.estimation.compiled.hlo import Collective
from kerasmem.estimation.parallel.parallelism import DATA, MODEL, WEIGHTS, Parallelism, Placed, not_divided
from kerasmem.estimation.report import Outcome, Unmodelled
from kerasmem.models.request import ModelRequest
from kerasmem.processes.task import run_child

WORKER = "kerasmem.estimation.parallel.worker"
FEATURE, EXTRA = "memory per device where weights, slots or an XLA step lie on several (Keras on JAX)", "jax"


@dataclass(frozen=True, kw_only=True)
class DevicePlan(planned.OwnPlan, what="device plan"):
    """What XLA plans for one device of several.

    Attributes:
        placed: the variables and how they are divided.
        collectives: what is sent between devices.
    """

    placed: tuple[Placed, ...]
    collectives: tuple[Collective, ...]


def device_plan(request: ModelRequest, asked: Parallelism) -> DevicePlan:
    """Have XLA plan a step that is spread over several devices; this machine's CPU stands in for each of them.

    Args:
        request: the model and its training, with the batch of all devices together.
        asked: what is divided.

    Raises:
        UsageError: the layout does not fit the model, or the batch does not come out even.
        MissingExtraError: JAX is not installed.
        ChildFailure: Keras on JAX cannot run the model, or it took too long; the reason says which.
    """
    if asked.kind == DATA and request.batch_size % asked.replicas:
        lower = request.batch_size - request.batch_size % asked.replicas
        even = f"{lower:,} or {lower + asked.replicas:,}" if lower else f"{asked.replicas:,}"
        raise UsageError(
            f"batch_size {request.batch_size}: {asked.replicas} devices do not divide it evenly, and Keras on JAX "
            f"gives each the same share; take {even}"
        )
    if importlib.util.find_spec("jax") is None:
        raise MissingExtraError(FEATURE, EXTRA)
    data = {"model": request.to_dict(), "parallelism": asked.to_dict()}
    env = {**planned.ENVIRONMENT, "XLA_FLAGS": f"--xla_force_host_platform_device_count={asked.replicas}"}
    timeout, most = planned.DEFAULT_TIMEOUT, planned.DEFAULT_MEMORY_LIMIT
    return DevicePlan.from_dict(run_child(WORKER, data, timeout=timeout, memory_limit=most, env=env))


def device_outcome(
    plan: DevicePlan, asked: Parallelism, rows: Collection[str] = (), weights: planned.Weights | None = None
) -> Outcome:
    """Return the peak on one device, divided by category and layer.

    Args:
        plan: XLA's.
        asked: what is divided.
        rows: names of the layers in the report.
        weights: for "trainable" and "non_trainable" each weight's whole bytes and row, in the model's order.
    """
    whole = {group: [each.bytes for each in plan.placed if each.group == group] for group in weights or {}}
    return plan.outcome(rows, weights, whole, _unmodelled(plan), _notes(plan, asked))


def _unmodelled(plan: DevicePlan) -> tuple[Unmodelled, ...]:
    why = "outside the allocator; they depend on the library, its version and the links between devices"
    found = [Unmodelled("prefetched batches", "each batch that is put on a device ahead of time",
                        sum(plan.arguments.get("inputs", ())))]  # fmt: skip
    if plan.collectives:
        found.insert(0, Unmodelled("buffers of the communication library (NCCL, gloo)", why))
    return tuple(found)


def _notes(plan: DevicePlan, asked: Parallelism) -> list[str]:
    notes = [
        f"Keras on JAX (KERAS_BACKEND=jax, keras.distribution) on {asked.replicas} devices: XLA's plan for one of "
        "them, with this machine's CPU in the devices' place; a GPU's kernels may take other scratch"
    ]
    trained = [each for each in plan.placed if each.group in WEIGHTS]
    slots = [each for each in plan.placed if each.group == "optimizer"]
    if asked.kind == MODEL:
        notes.append(f"weights: {_share(trained, asked.replicas)}, by {'the layout' if asked.layout else 'rule'}")
        if not asked.layout:
            notes.append(
                "the rule: of each weight with two and more dimensions the largest that the devices divide evenly, of "
                "equal ones the last; --layout 'REGEX=,model' sets another"
            )
        count, size = not_divided(plan.placed)
        if size:
            notes.append(f"every device has all of {count} weights ({size:,} B), which are not divided")
    if slots and (asked.kind == MODEL or asked.shard_optimizer):
        notes.append(f"optimizer: {_share(slots, asked.replicas)}")
    if asked.shard_optimizer:
        count, size = not_divided(plan.placed, ("optimizer",))
        if size:
            notes.append(f"every device has all of {count} slots ({size:,} B): no dimension that it divides")
        notes.append(
            "Keras has no switch for it: give each slot a layout of its own after optimizer.build; on a GPU XLA may "
            "scatter the reduced gradients where here each device has all of them"
        )
    if plan.collectives:
        notes.append("between devices, in a step: " + "; ".join(map(str, plan.collectives)))
    return notes


def _share(variables: Sequence[Placed], replicas: int) -> str:
    here, whole = sum(each.on_device(replicas) for each in variables), sum(each.bytes for each in variables)
    return f"{here:,} B of {whole:,} B on a device"
