"""The third step of an estimate: which method answers, and what the others say.

Where no method is named, those are asked that match how Keras would run the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.devices.catalogue import DeviceTarget
from kerasmem.devices.host import host_memory
from kerasmem.errors import KerasmemError
from kerasmem.estimation.methods import outcome_of
from kerasmem.estimation.outcome import Outcome
from kerasmem.estimation.parallel.parallelism import SHARDED_METHOD, WHY_SHARDED, Parallelism
from kerasmem.estimation.report import Alternative
from kerasmem.estimation.tracing import Step

# `auto` runs a step for real only where the formula's figure is no more than this share of the memory that is free.
PROBED_SHARE = 0.25


@dataclass(frozen=True)
class Answer:
    """What the methods say.

    Attributes:
        outcome: of the method that answers; None: the formula does.
        alternatives: what other methods say.
        notes: why it was chosen.
        failed: the methods that were asked and had no answer, which they may have another time.
    """

    outcome: Outcome | None
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def ask(step: Step, target: DeviceTarget | None) -> Answer:
    """Ask the method that was named, or those that match how Keras would run the step, one after another.

    Args:
        step: inside `open_step`.
        target: the device that was named, or None.

    Raises:
        KerasmemError: a method was named and cannot answer; "auto" goes on to the next and says why.
    """
    method, split = step.arguments.method, step.shapes.split
    if method == "formula":
        return Answer(None)
    if step.opened.only_formula is not None:
        return Answer(None, notes=(f"the formula, since {step.opened.only_formula}",))
    if method != "auto":
        return Answer(outcome_of(method, step, target, step.arguments.jit_compile))
    if split is not None and split.is_sharded:
        found = outcome_of(SHARDED_METHOD, step, target)
        return Answer(found, notes=(f"{SHARDED_METHOD}, since {WHY_SHARDED}",))
    execution, why = _as_keras_would(step.arguments.jit_compile, target, step.opened.model, split)
    # A card's own plan is made for one card, and has no exchange between several.
    first = _first(_methods(execution, target if split is None else None), why, step, target)
    if first.outcome is None:
        return replace(first, notes=(*first.notes, "the formula answers in their place"))
    other = _other(first.outcome, step, target)
    return replace(other, outcome=first.outcome, notes=first.notes, failed=(*first.failed, *other.failed))


def _methods(execution: str, target: DeviceTarget | None) -> tuple[str, ...]:
    """Return the methods for a way of running the step, the truest first."""
    if execution == "graph":
        return ("graph", "probe")
    is_card = target is not None and target.source == "catalogue"
    return ("gpu-target", "xla", "graph") if is_card else ("xla", "graph")


def _first(methods: tuple[str, ...], why: str, step: Step, target: DeviceTarget | None) -> Answer:
    """Return the outcome of the first method that has one, with notes on it and on those that failed."""
    notes: list[str] = []
    failed: list[str] = []
    for method in methods:
        if method == "probe" and (reason := _too_large(step.shapes.formula.total_bytes)):
            notes.append(reason)
            continue
        try:
            outcome = outcome_of(method, step, target, step.arguments.jit_compile)
        except Exception as error:  # the next method is a better answer than a traceback
            is_known = isinstance(error, KerasmemError)
            said = str(error) if is_known else f"unexpected {type(error).__name__}: {error}; a defect in kerasmem"
            notes.append(f"{method} has no answer: {said}")
            failed.append(method)
            continue
        notes.append(f"{method}, since {why}")
        if method == "xla" and "gpu-target" in methods:
            notes.append("XLA's plan for this machine's CPU stands in for the card's: a GPU's is usually smaller")
            outcome = replace(outcome, low=_kept(outcome))
        return Answer(outcome, notes=tuple(notes), failed=tuple(failed))
    return Answer(None, notes=tuple(notes), failed=tuple(failed))


def _kept(outcome: Outcome) -> int:
    """Return what the step holds from beginning to end, whatever is computed in between."""
    divided = outcome.categories or {}
    return min(outcome.low, sum(divided.get(name, 0) for name in ("weights", "optimizer", "inputs")))


def _too_large(formula_bytes: int) -> str | None:
    free = host_memory().available_bytes
    if formula_bytes <= PROBED_SHARE * free:
        return None
    return (
        f"no step was run to find out (--method probe): by the formula it needs {formula_bytes:,} B, more "
        f"than a quarter of the {free:,} B that are free here"
    )


def _other(outcome: Outcome, step: Step, target: DeviceTarget | None) -> Answer:
    """Return what the other way of running the step would need; only offered where no device is named."""
    other = "xla" if outcome.execution == "graph" else "graph"
    unknown = Alternative(other, other, None, None, None, f"ask for it with --method {other}")
    if target is None or step.shapes.split is not None:
        return Answer(None, (unknown,))
    try:
        found = outcome_of(other, step, target)
    except Exception as error:  # what is only offered must not stand in the way
        return Answer(None, (replace(unknown, why=str(error)),), failed=(other,))
    when = f"with jit_compile={other == 'xla'}"
    return Answer(None, (Alternative(other, other, found.total, found.low, found.high, when),))


def _as_keras_would(
    jit_compile: bool | str, target: DeviceTarget | None, model: Any, split: Parallelism | None = None
) -> tuple[str, str]:
    """Return "xla" or "graph", and why."""
    if jit_compile != "auto":
        return ("xla" if jit_compile else "graph"), f"jit_compile={jit_compile}"
    if split is not None:
        return "graph", "Keras does not compile with XLA under tf.distribute"
    if target is None or target.source != "catalogue":
        reason = "no card is named" if target is None else "a size does not say that it is a GPU's"
        return "graph", f"Keras compiles with XLA on a GPU only, and {reason}"
    without = next((layer.name for layer in flatten_layers(model) if not layer.supports_jit), None)
    if without is not None:
        return "graph", f"layer {without!r} cannot be compiled by XLA"
    return "xla", "Keras compiles with XLA on a GPU"
