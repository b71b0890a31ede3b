"""What one method finds about a step: graph, xla, gpu-target or probe, on one device or one of several."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from kerasmem.devices.catalogue import DeviceTarget, find_card
from kerasmem.errors import UsageError
from kerasmem.estimation.outcome import Outcome
from kerasmem.estimation.parallel.parallelism import SHARDED_METHOD, check_method
from kerasmem.estimation.tracing import Step
from kerasmem.models.op_names import Attribution
from kerasmem.models.sizes import element_bytes
from kerasmem.models.step import prepare_step, trace_step


def outcome_of(method: str, step: Step, target: DeviceTarget | None, jit_compile: bool | str = "auto") -> Outcome:
    """Return what a method that looks at the step finds.

    Args:
        method: "graph", "xla", "gpu-target" or "probe".
        step: inside `open_step`.
        target: the device that was named, or None.
        jit_compile: for "probe": True, False or "auto".

    Raises:
        KerasmemError: it has no answer; the message says why.
    """
    split, mode = step.shapes.split, step.arguments.mode
    if split is None:
        return _on_one_device(method, step, target, jit_compile)
    check_method(method, split)
    if method == SHARDED_METHOD:
        from kerasmem.estimation.parallel.plan import device_outcome, device_plan

        with step.arguments.request(step.shapes.whole_batch, jit_compile=True) as request:
            return device_outcome(device_plan(request, split), split, step.rows, step.weights())
    if mode != "train":
        return _on_one_device(method, step, target, jit_compile)
    from kerasmem.estimation.parallel.exchange import gradients_exchanged, not_exchanged, with_exchange

    if method != "graph":
        return not_exchanged(_on_one_device(method, step, target, jit_compile))
    with gradients_exchanged(split.replicas) as exchanged:
        found = _on_one_device(method, step, target, jit_compile)
    return with_exchange(found, split.replicas, exchanged)


def _on_one_device(method: str, step: Step, target: DeviceTarget | None, jit_compile: bool | str) -> Outcome:
    if method in ("graph", "xla"):
        return step_outcome(method, step)
    from kerasmem.estimation.gpu_target.need import gpu_target_outcome
    from kerasmem.estimation.probe.probing import probe_outcome

    compiles = True if method == "gpu-target" else jit_compile
    with step.arguments.request(step.shapes.batch_size, compiles) as request:
        if method == "probe":
            return probe_outcome(request, step.shapes.is_fixed)
        if target is None or target.source != "catalogue":
            raise UsageError("method 'gpu-target' plans for a card: name one with --device (device=…)")
        return gpu_target_outcome(request, find_card(target.name), step.rows, step.weights())


def step_outcome(method: str, step: Step) -> Outcome:
    """Trace the step of a model without weights and return what "graph" or "xla" finds.

    Raises:
        KerasmemError: the step cannot be prepared, traced, compiled or simulated; the message says why.
    """
    is_xla = method == "xla"
    opened, shapes = step.opened, step.shapes
    prepared = prepare_step(
        opened.model, opened.training, shapes.structure, shapes.inputs, shapes.batch_size, step.arguments.mode,
        jit_compile=is_xla,
    )  # fmt: skip
    keep_alive: list[Any] = []
    traced = trace_step(prepared, keep_alive if is_xla else None)
    attribution = Attribution(traced.scopes, step.rows, traced.optimizers)
    owners = shapes.inferred.owners
    layer_of = {
        number: owners[id(variable)] for number, variable in enumerate(traced.variables) if id(variable) in owners
    }
    if is_xla:
        from kerasmem.estimation.graph.build import variables_of
        from kerasmem.estimation.xla import compile_plan, outcome

        batch = tuple(math.prod(spec.shape) * element_bytes(spec.dtype.name) for spec in traced.flat)
        notes: tuple[str, ...] = ()
        found = outcome(compile_plan(traced), variables_of(traced), batch, layer_of, attribution)
    else:
        from kerasmem.estimation.graph.build import build_program
        from kerasmem.estimation.graph.steps import graph_outcome

        program, notes = build_program(traced)
        found = graph_outcome(program, layer_of, attribution)
    return replace(found, notes=(*prepared.notes, *notes, *found.notes))
