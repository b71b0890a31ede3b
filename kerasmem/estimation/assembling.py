"""The last step of an estimate: the report, from the model's shapes and what a method or the formula says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.devices.catalogue import DeviceTarget
from kerasmem.estimation.choice import Answer
from kerasmem.estimation.formula import formula_bytes, opaque_layers
from kerasmem.estimation.report import Bytes, LayerMemory, MemoryReport, ModelFacts, Outcome, Settings, Unmodelled
from kerasmem.estimation.tracing import OpenedStep, Step
from kerasmem.estimation.verdict import device_verdict


def assemble(step: Step, answer: Answer, target: DeviceTarget | None) -> MemoryReport:
    """Return the report of a step.

    Args:
        step: inside `open_step`.
        answer: what the methods say.
        target: the device that was named, or None.
    """
    shapes, opened, found = step.shapes, step.opened, answer.outcome or _by_formula(step)
    need = Bytes(found.total, found.low, found.high, **found.categories)
    layers = shapes.layers
    if found.layers is not None:
        sizes = [found.layers.get(row.name, 0) for row in layers]
        layers = tuple(replace(row, bytes=size, bytes_at_peak=size) for row, size in zip(layers, sizes, strict=True))
    return MemoryReport(
        model=_facts(opened, shapes.layers),
        settings=_settings(step, found, target),
        bytes=need,
        formula=shapes.formula,
        layers=layers,
        nested=shapes.inferred.nested,
        device=None if target is None else device_verdict(target, need),
        unmodelled=found.unmodelled,
        notes=(*opened.notes, *shapes.notes, *answer.notes, *found.notes),
        pool=found.pool,
        instant=found.instant,
        alternatives=answer.alternatives,
    )


def _settings(step: Step, found: Outcome, target: DeviceTarget | None) -> Settings:
    return Settings(
        batch_size=step.shapes.batch_size,
        optimizer=step.optimizer,
        loss=step.opened.training.loss,
        dtype_policy=_policy(step.opened.model),
        mode=step.arguments.mode,
        method=found.method,
        execution=found.execution,
        device=None if target is None else target.name,
        replicas=step.arguments.replicas,
    )


def _by_formula(step: Step) -> Outcome:
    shapes = step.shapes
    need = formula_bytes(shapes.layers, shapes.batch_size, step.arguments.mode, shapes.slots)
    return Outcome(
        "formula", "none", need.total, need.low, need.high,
        categories={name: getattr(need, name) for name in Bytes.CATEGORIES},
        layers=None,
        unmodelled=tuple(_not_in_the_formula(step)),
        notes=tuple(_formula_notes(shapes.layers, need, shapes.formula.total_bytes)),
    )  # fmt: skip


def _not_in_the_formula(step: Step) -> list[Unmodelled]:
    layers, is_training = step.shapes.layers, step.arguments.mode == "train"
    missing: list[Unmodelled] = []
    if is_training:
        own = step.optimizer
        name = f"slots of {own}" if own else "slots of adam (assumed: no optimizer is stored with the model)"
        why = "what the optimizer keeps for each weight; the formula has weights and gradients only"
        missing.append(Unmodelled(f"optimizer {name}", why, step.shapes.slots))
    missing.append(Unmodelled("workspace", "scratch memory of convolutions and matrix products"))
    missing.append(Unmodelled("allocator", "rounding and waste in the chunks that the allocator hands out"))
    missing.append(Unmodelled("buffer reuse", "buffers are freed and reused within the step: deep networks need less"))
    unknown = [row.name for row in layers if row.activation_elements is None]
    if unknown:
        missing.append(Unmodelled(f"outputs of {_some(unknown)}", "their size depends on the data"))
    if opaque := opaque_layers(layers):
        why = "gates, states and attention scores, often many times the output, so no upper end is given"
        missing.append(Unmodelled(f"the inside of {_some(opaque)}", why))
    if step.arguments.replicas > 1 and is_training:
        why = "gradients are gathered in buffers of their own where replicas exchange them"
        missing.append(Unmodelled("exchange of gradients", why))
    return missing


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _formula_notes(layers: tuple[LayerMemory, ...], need: Bytes, plain: int) -> list[str]:
    notes = []
    if need.total != plain:
        notes.append(
            f"at the true sizes of its dtypes the total is {need.total:,} B; "
            f"the formula, which takes every value as float32, gives {plain:,} B"
        )
    frozen = sum(row.parameters - row.trainable_parameters for row in layers)
    if frozen and need.gradients:
        notes.append(f"the formula counts a gradient for {frozen:,} parameters that are not trained")
    if any(row.dtype == "string" for row in layers):
        notes.append("text is counted as 24 bytes an element; longer text takes more")
    return notes


def _facts(opened: OpenedStep, layers: tuple[LayerMemory, ...]) -> ModelFacts:
    return ModelFacts(
        name=opened.name,
        source=opened.source,
        layers=sum(row.kind != "input" for row in layers),
        parameters=sum(row.parameters for row in layers),
        trainable_parameters=sum(row.trainable_parameters for row in layers),
    )


def _policy(model: Any) -> str:
    """Return the policy that most layers with weights compute in."""
    names = [layer.dtype_policy.name for layer in flatten_layers(model) if layer.weights or layer is model]
    return str(max(names, key=names.count))
