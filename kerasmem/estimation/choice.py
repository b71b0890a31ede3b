"""The third step of an estimate: which method answers, and what the others say.

Where no method is named, those are asked that match how Keras would run the step. Others are asked only on request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kerasmem.compat.keras_layers import flatten_layers, takes_cudnn
from kerasmem.devices.catalogue import DeviceTarget, find_card
from kerasmem.devices.host import host_memory
from kerasmem.devices.kernels import kernels_on
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.graph.sizes import KnownSizes
from kerasmem.estimation.live import simulated_outcome, sized_step, standing_in, traced_outcome
from kerasmem.estimation.report import Alternative, Outcome
from kerasmem.estimation.tracing import Step
from kerasmem.models.backend import require_tensorflow, runs_on_jax
from kerasmem.models.opening import OpenedModel
from kerasmem.models.own_loop import loop_is_compiled
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.step import PreparedStep, prepare_step
from kerasmem.models.training import optimizer_slot_bytes
from kerasmem.processes.guarding import note_stage

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
    if step.opened.only_formula is not None:
        return Answer(None, notes=(f"the formula, since {step.opened.only_formula}",))
    return _with_others(_asked(step, target), step, target)


def _asked(step: Step, target: DeviceTarget | None) -> Answer:
    """Return what the method says that was named or chosen."""
    method, is_one = step.arguments.method, step.arguments.replicas == 1
    if method == "formula":
        return Answer(None)
    if method != "auto":
        return Answer(outcome_of(method, step, target, step.arguments.jit_compile))
    execution, why = _as_keras_would(step, target)
    # A card's own plan is made for one card, and has no exchange between several.
    first = _first(_methods(execution, target if is_one else None), why, step, target)
    if first.outcome is None:
        return replace(first, notes=(*first.notes, "the formula answers in their place"))
    if runs_on_jax():
        return first
    return replace(first, alternatives=(_unasked(first.outcome),))


def _methods(execution: str, target: DeviceTarget | None) -> tuple[str, ...]:
    """Return the methods for a way of running the step, the truest first."""
    if execution == "graph":
        return ("graph", "probe")
    is_card = target is not None and target.source == "catalogue"
    methods = ("xla",) if runs_on_jax() else ("xla", "graph")
    return ("gpu-target", *methods) if is_card else methods


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
            outcome = standing_in(outcome)
        return Answer(outcome, notes=tuple(notes), failed=tuple(failed))
    return Answer(None, notes=tuple(notes), failed=tuple(failed))


def _too_large(formula_bytes: int) -> str | None:
    free = host_memory().available_bytes
    if formula_bytes <= PROBED_SHARE * free:
        return None
    return (
        f"no step was run to find out (--method probe): by the formula it needs {formula_bytes:,} B, more "
        f"than a quarter of the {free:,} B that are free here"
    )


def _with_others(first: Answer, step: Step, target: DeviceTarget | None) -> Answer:
    """Return the answer with what other methods say, where they are wanted."""
    arguments, own = step.arguments, None if first.outcome is None else first.outcome.method
    if not arguments.all_methods:
        return first
    is_card = target is not None and target.source == "catalogue"
    found, failed = [], list(first.failed)
    for method in ("graph", "xla", *(("gpu-target",) if is_card else ())):
        if method == own or method in first.failed:
            continue
        execution = "graph" if method == "graph" else "xla"
        try:
            said = outcome_of(method, step, target)
        except Exception as error:  # what is only beside the answer must not stand in its way
            found.append(Alternative(method, execution, None, None, None, str(error)))
            failed.append(method)
        else:
            when = f"with jit_compile={execution == 'xla'}"
            found.append(Alternative(method, execution, said.total, said.low, said.high, when))
    return replace(first, alternatives=tuple(found), failed=tuple(failed))


def _unasked(outcome: Outcome) -> Alternative:
    """Return the other way to run the step, which nobody asked about."""
    other = "xla" if outcome.execution == "graph" else "graph"
    return Alternative(other, other, None, None, None, f"ask for it with --method {other}")


def _as_keras_would(step: Step, target: DeviceTarget | None) -> tuple[str, str]:
    """Return "xla" or "graph", and why."""
    jit_compile, model = step.arguments.jit_compile, step.opened.model
    if runs_on_jax():
        return "xla", "Keras runs on JAX, which compiles every step"
    if jit_compile != "auto":
        return ("xla" if jit_compile else "graph"), f"jit_compile={jit_compile}"
    compiles = loop_is_compiled(model)
    if compiles is not None:
        return ("xla" if compiles else "graph"), f"the step function has jit_compile={compiles}"
    if step.arguments.replicas > 1:
        return "graph", "Keras does not compile with XLA under tf.distribute"
    if target is None or target.source != "catalogue":
        reason = "no card is named" if target is None else "a size does not say that it is a GPU's"
        return "graph", f"Keras compiles with XLA on a GPU only, and {reason}"
    for layer in flatten_layers(model):
        if not layer.supports_jit:
            return "graph", f"layer {layer.name!r} cannot be compiled by XLA"
        if takes_cudnn(layer):
            return "graph", f"Keras hands layer {layer.name!r} to cuDNN on a GPU, and does not compile with XLA then"
    return "xla", "Keras compiles with XLA on a GPU"


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
    note_stage(f"asking method {method}")
    check_backend(method, jit_compile)
    replicas = step.arguments.replicas
    if replicas == 1 or step.arguments.mode != "train":
        return _on_one_device(method, step, target, jit_compile)
    from kerasmem.estimation.graph.exchange import gradients_exchanged, not_exchanged, with_exchange

    if method != "graph":
        return not_exchanged(_on_one_device(method, step, target, jit_compile))
    with gradients_exchanged(replicas) as exchanged:
        found = _on_one_device(method, step, target, jit_compile)
    return with_exchange(found, replicas, exchanged)


def check_backend(method: str, jit_compile: bool | str) -> None:
    """Refuse what Keras's backend does not do.

    Args:
        method: of the estimate, or "measure".
        jit_compile: True, False or "auto".

    Raises:
        UsageError: the method or the setting is another backend's.
    """
    if method in ("graph", "probe"):
        require_tensorflow(f"method {method!r}", "take xla, as Keras on JAX compiles every step with XLA, or measure")
    if jit_compile is False and runs_on_jax():
        raise UsageError(
            "jit_compile=False: Keras on JAX then runs each operation by itself, which nothing here models"
        )


def _on_one_device(method: str, step: Step, target: DeviceTarget | None, jit_compile: bool | str) -> Outcome:
    if method in ("graph", "xla"):
        return step_outcome(method, step, target)
    from kerasmem.estimation.gpu_target.plan import gpu_target_outcome, gpu_target_plan
    from kerasmem.estimation.probe.probing import probe

    compiles = True if method == "gpu-target" else jit_compile
    with step.arguments.request(step.shapes.batch_size, compiles) as request:
        if method == "probe":
            return probe(request, is_fixed=step.shapes.is_fixed).outcome
        if target is None or target.source != "catalogue":
            raise UsageError("method 'gpu-target' plans for a card: name one with --device (device=…)")
        card = find_card(target.name)
        note_stage(f"compiling for {card.name}")
        return gpu_target_outcome(gpu_target_plan(request, card), step.rows, step.weights())


def _check_room(opened: OpenedModel) -> None:
    from kerasmem.estimation.xla import check_room

    slots = optimizer_slot_bytes(opened.training, opened.model.trainable_variables) or 0
    check_room(slots + sum(variable_bytes(each) for each in opened.model.variables))


def step_outcome(method: str, step: Step, target: DeviceTarget | None = None) -> Outcome:
    """Trace the step of a model without weights and return what "graph" or "xla" finds.

    Args:
        method: "graph" or "xla".
        step: inside `open_step`.
        target: for "graph" the card that the step runs on; this machine's CPU without one.

    Raises:
        KerasmemError: the step cannot be prepared, traced, compiled or simulated; the message says why.
    """
    if runs_on_jax():
        from kerasmem.estimation.compiled.here import jax_outcome

        return jax_outcome(step)
    is_xla = method == "xla"
    opened, shapes, mode, kernels = step.opened, step.shapes, step.arguments.mode, kernels_on(target)
    if is_xla:
        _check_room(opened)

    def prepared(batch_size: int) -> PreparedStep:
        note_stage("tracing the step")
        known = next((each for each in opened.prepared if (each.mode, each.jit_compile) == (mode, is_xla)), None)
        made = prepare_step(
            opened.model, opened.training, shapes.structure, shapes.inputs, batch_size, mode, is_xla, known
        )
        opened.prepared[:] = [made]
        return made

    owners = shapes.inferred.owners
    if is_xla or step.arguments.replicas > 1:  # several replicas exchange gradients, which is noted while it is traced
        return traced_outcome(prepared(shapes.batch_size), step.rows, owners, kernels)
    sizes = opened.sizes.setdefault((mode, kernels), KnownSizes())
    sized = sizes.at(shapes.batch_size, lambda batch_size: sized_step(prepared(batch_size), kernels))
    return simulated_outcome(sized, step.rows, owners, kernels)
