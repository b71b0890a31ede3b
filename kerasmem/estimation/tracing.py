"""From an opened model to what a method finds about its step: the graph and xla methods' common way."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from kerasmem.estimation.layers import Inferred
from kerasmem.estimation.outcome import Outcome
from kerasmem.models.inputs import ModelInput
from kerasmem.models.op_names import Attribution
from kerasmem.models.sizes import element_bytes
from kerasmem.models.step import prepare_step, trace_step
from kerasmem.models.training import TrainingSettings


def step_outcome(
    method: str,
    model: Any,
    training: TrainingSettings,
    structure: Any,
    inputs: list[ModelInput],
    inferred: Inferred,
    batch_size: int,
    mode: str,
) -> Outcome:
    """Trace the step of a model without weights and return what "graph" or "xla" finds.

    Args:
        method: "graph" or "xla".
        model: inside `open_model`.
        training: optimizer, loss and metrics.
        structure: how the model takes its inputs.
        inputs: those.
        inferred: the rows of the report, and which of them has which weight.
        batch_size: samples.
        mode: "train", "evaluate" or "inference".

    Raises:
        KerasmemError: the step cannot be prepared, traced, compiled or simulated; the message says why.
    """
    is_xla = method == "xla"
    prepared = prepare_step(model, training, structure, inputs, batch_size, mode, jit_compile=is_xla)
    keep_alive: list[Any] = []
    traced = trace_step(prepared, keep_alive if is_xla else None)
    attribution = Attribution(traced.scopes, [row.name for row in inferred.layers], traced.optimizers)
    layer_of = {
        number: inferred.owners[id(variable)]
        for number, variable in enumerate(traced.variables)
        if id(variable) in inferred.owners
    }
    if is_xla:
        from kerasmem.estimation.graph.build import variables_of
        from kerasmem.estimation.xla import compile_plan, outcome

        batch = tuple(math.prod(spec.shape) * element_bytes(spec.dtype.name) for spec in traced.flat)
        found = outcome(compile_plan(traced), variables_of(traced), batch, layer_of, attribution)
    else:
        from kerasmem.estimation.graph.build import build_program
        from kerasmem.estimation.graph.steps import graph_outcome

        program, notes = build_program(traced)
        found = graph_outcome(program, layer_of, attribution)
        found = replace(found, notes=(*notes, *found.notes))
    return replace(found, notes=(*prepared.notes, *found.notes))
