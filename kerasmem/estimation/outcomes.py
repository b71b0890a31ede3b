"""Outcomes of a prepared step: traced, then simulated or planned by XLA, and never run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kerasmem.compat.keras_layers import gpu_assumed
from kerasmem.devices.kernels import CardKernels, CpuKernels
from kerasmem.estimation.graph.build import build_program, variables_of
from kerasmem.estimation.graph.steps import graph_outcome
from kerasmem.estimation.report import LayerMemory, Outcome, Pool
from kerasmem.estimation.unmodelled import EXCHANGE_BUFFERS
from kerasmem.estimation.xla import compile_plan, xla_outcome
from kerasmem.models.op_names import Attribution, Instant
from kerasmem.models.sizes import element_bytes
from kerasmem.models.step import PreparedStep, trace_step


def traced_outcome(
    prepared: PreparedStep, rows: Iterable[str], owners: Mapping[int, str], kernels: CpuKernels | CardKernels
) -> Outcome:
    """Trace a step and return its peak in graph mode, or by XLA's plan for this machine if XLA compiles it.

    Args:
        prepared: the step.
        rows: names of the layers in the report.
        owners: id of a variable → the row that counts it.
        kernels: that run it in graph mode.

    Raises:
        KerasmemError: the step cannot be traced, compiled or simulated.
    """
    keep_alive: list[Any] | None = [] if prepared.jit_compile else None  # XLA's compiler reads the variables
    is_on_card = isinstance(kernels, CardKernels) and not prepared.jit_compile
    with gpu_assumed() if is_on_card else contextlib.nullcontext():
        traced = trace_step(prepared, keep_alive)
    attribution = Attribution(traced.scopes, rows, traced.optimizers)
    layer_of = {number: owners[id(each)] for number, each in enumerate(traced.variables) if id(each) in owners}
    notes: tuple[str, ...] = ()
    if prepared.jit_compile:
        batch = tuple(math.prod(spec.shape) * element_bytes(spec.dtype.name) for spec in traced.flat)
        outcome = xla_outcome(compile_plan(traced), variables_of(traced), batch, layer_of, attribution)
    else:
        program, notes = build_program(traced, kernels)
        outcome = graph_outcome(program, layer_of, attribution, kernels)
    return replace(outcome, notes=(*prepared.notes, *notes, *outcome.notes))


def standing_in(outcome: Outcome) -> Outcome:
    """Widen the outcome of this machine's CPU to stand in for a card's, which is usually smaller.

    A step takes no less than what it holds from beginning to end, whatever is computed in between.
    """
    held = sum(getattr(outcome, name) or 0 for name in ("weights", "optimizer", "inputs"))
    note = f"{outcome.method} on this machine's CPU stands in for the card: a GPU usually takes less"
    return replace(outcome, low=min(outcome.low or 0, held), stands_in=True, notes=(*outcome.notes, note))


def with_exchange(outcome: Outcome, layers: Iterable[LayerMemory], replicas: int) -> Outcome:
    """Return the outcome of a step that sums its gradients with other replicas before the first update.

    `tf.distribute` packs them into one buffer, which is reduced in place and split again, so they are in memory twice
    (`batch_all_reduce` in tensorflow/python/distribute/cross_device_utils.py).
    """
    trained = [row for row in layers if row.trainable_parameters and row.class_name != "Embedding"]
    gradients = sum(row.weight_bytes * row.trainable_parameters // row.parameters for row in trained)
    held = sum(getattr(outcome, name) or 0 for name in ("weights", "optimizer", "inputs"))
    more = max(held + 2 * gradients - outcome.total, 0)
    note = (
        f"before the first update the gradients are packed into one buffer of {gradients:,} B, reduced over "
        f"{replicas} replicas and split again: they are then in memory twice"
    )
    outcome = replace(outcome, notes=(*outcome.notes, note), unmodelled=(*outcome.unmodelled, EXCHANGE_BUFFERS))
    if not more:
        return outcome
    pool: dict[str, Any] = {name: None if size is None else size + more for name, size in vars(outcome.pool).items()}
    return replace(
        outcome,
        total=outcome.total + more,
        high=None if outcome.high is None else outcome.high + more,
        pool=Pool(**pool),
        gradients=(outcome.gradients or 0) + more,
        instant=Instant("while the gradients of all replicas are exchanged", "batch_all_reduce", None, "optimizer"),
    )
