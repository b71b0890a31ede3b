"""The third step of an estimate: the methods, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kerasmem.compat.keras_layers import flatten_layers, takes_cudnn
from kerasmem.devices.catalogue import DeviceTarget, find_card
from kerasmem.devices.host import host_memory
from kerasmem.devices.kernels import kernels_on
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.live import standing_in, traced_outcome
from kerasmem.estimation.report import Outcome
from kerasmem.estimation.tracing import Step
from kerasmem.models.backend import require_tensorflow, runs_on_jax
from kerasmem.models.own_loop import loop_is_compiled
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.step import PreparedStep, prepare_step
from kerasmem.models.training import optimizer_slot_bytes
from kerasmem.processes.guarding import note_stage

# "auto" runs real steps only if the formula's figure is at most this share of the free memory.
PROBED_SHARE = 0.25


@dataclass(frozen=True)
class Answer:
    """The outcome of the chosen method.

    Attributes:
        outcome: None if the formula answers.
        notes: the reason for the choice.
    """

    outcome: Outcome | None
    notes: tuple[str, ...] = ()


def ask(step: Step, target: DeviceTarget | None) -> Answer:
    """Run the requested method, or for "auto" those that match how Keras would run the step.

    Args:
        step: inside `open_step`.
        target: the named device, or None.

    Raises:
        KerasmemError: If a named method cannot answer. "auto" notes the reason and tries the next method.
    """
    method = step.arguments.method
    if step.opened.only_formula is not None:
        return Answer(None, notes=(f"the formula, since {step.opened.only_formula}",))
    if method == "auto":
        return _first_outcome(step, target)
    if method == "formula":
        return Answer(None)
    return Answer(outcome_of(method, step, target, step.arguments.jit_compile))


def automatic_methods(step: Step, target: DeviceTarget | None) -> tuple[tuple[str, ...], str]:
    """Return the methods that match how Keras would run the step, the most accurate first, and the reason."""
    compiles, why = _compiles(step, target)
    if not compiles:
        return ("graph", "probe"), why
    methods = ("xla",) if runs_on_jax() else ("xla", "graph")
    # A card's own plan is made for one card, and has no exchange between several.
    has_plan = _is_card(target) and step.arguments.replicas == 1
    return (("gpu-target", *methods) if has_plan else methods), why


def _compiles(step: Step, target: DeviceTarget | None) -> tuple[bool, str]:
    """Return whether XLA compiles the step, and the reason."""
    jit_compile, model = step.arguments.jit_compile, step.opened.model
    if runs_on_jax():
        return True, "Keras runs on JAX, which compiles every step"
    if jit_compile != "auto":
        return bool(jit_compile), f"jit_compile={jit_compile}"
    compiles = loop_is_compiled(model)
    if compiles is not None:
        return compiles, f"the step function has jit_compile={compiles}"
    if step.arguments.replicas > 1:
        return False, "Keras does not compile with XLA under tf.distribute"
    if not _is_card(target):
        reason = "no card is named" if target is None else "a size does not say that it is a GPU's"
        return False, f"Keras compiles with XLA on a GPU only, and {reason}"
    for layer in flatten_layers(model):
        if not layer.supports_jit:
            return False, f"layer {layer.name!r} cannot be compiled by XLA"
        if takes_cudnn(layer):
            return False, f"Keras hands layer {layer.name!r} to cuDNN on a GPU, and does not compile with XLA then"
    return True, (
        "Keras compiles with XLA on a GPU; if yours is compiled with jit_compile=False, which a CPU machine does not "
        "keep apart from the default, name it: --no-jit-compile, or jit_compile=False in Python"
    )


def _is_card(target: DeviceTarget | None) -> bool:
    return target is not None and target.source == "catalogue"


def _first_outcome(step: Step, target: DeviceTarget | None) -> Answer:
    """Return the outcome of the first method that has one, with notes on it and on those that failed."""
    methods, why = automatic_methods(step, target)
    notes: list[str] = []
    for method in methods:
        if method == "probe" and (reason := _too_large(step.shapes.formula.total_bytes)):
            notes.append(reason)
            continue
        try:
            outcome = outcome_of(method, step, target, step.arguments.jit_compile)
        except Exception as error:  # the next method is a better answer than a traceback
            is_known = isinstance(error, KerasmemError)
            reason = str(error) if is_known else f"unexpected {type(error).__name__}: {error}; a defect in kerasmem"
            notes.append(f"{method} has no answer: {reason}")
            continue
        notes.append(f"{method}, since {why}")
        if method == "xla" and "gpu-target" in methods:
            notes.append("XLA's plan for this machine's CPU stands in for the card's: a GPU's is usually smaller")
            outcome = standing_in(outcome)
        return Answer(outcome, tuple(notes))
    return Answer(None, (*notes, "the formula answers in their place"))


def _too_large(formula_bytes: int) -> str | None:
    free = host_memory().available_bytes
    if formula_bytes <= PROBED_SHARE * free:
        return None
    return (
        f"no step was run to find out (--method probe): by the formula it needs {formula_bytes:,} B, more "
        f"than a quarter of the {free:,} B that are free here"
    )


def outcome_of(method: str, step: Step, target: DeviceTarget | None, jit_compile: bool | str = "auto") -> Outcome:
    """Return the outcome of one method.

    Args:
        method: one of `METHODS`.
        step: inside `open_step`.
        target: the named device, or None.
        jit_compile: for "probe": True, False or "auto". Defaults to "auto".

    Raises:
        KerasmemError: If the method cannot answer.
    """
    note_stage(f"asking method {method}")
    check_backend(method, jit_compile)
    replicas, run = step.arguments.replicas, METHODS[method]
    if replicas == 1 or step.arguments.mode != "train":
        return run(step, target, jit_compile)
    from kerasmem.estimation.graph.exchange import gradients_exchanged, not_exchanged, with_exchange

    if method != "graph":
        return not_exchanged(run(step, target, jit_compile))
    with gradients_exchanged(replicas) as exchanged:
        found = run(step, target, jit_compile)
    return with_exchange(found, replicas, exchanged)


def check_backend(method: str, jit_compile: bool | str) -> None:
    """Refuse methods and settings that Keras's backend does not support.

    Args:
        method: of the estimate, or "measure".
        jit_compile: True, False or "auto".

    Raises:
        UsageError: If the method or the setting is another backend's.
    """
    if method in ("graph", "probe"):
        require_tensorflow(f"method {method!r}", "take xla, as Keras on JAX compiles every step with XLA, or measure")
    if jit_compile is False and runs_on_jax():
        raise UsageError(
            "jit_compile=False: Keras on JAX then runs each operation by itself, which nothing here models"
        )


def _graph(step: Step, target: DeviceTarget | None, jit_compile: bool | str) -> Outcome:
    prepared = _prepared(step, step.shapes.batch_size, False)
    return traced_outcome(prepared, step.rows, step.shapes.inferred.owners, kernels_on(target))


def _xla(step: Step, target: DeviceTarget | None, jit_compile: bool | str) -> Outcome:
    if runs_on_jax():
        from kerasmem.estimation.compiled.on_jax import jax_outcome

        return jax_outcome(step)
    from kerasmem.estimation.xla import check_room

    model = step.opened.model
    slots = optimizer_slot_bytes(step.opened.training, model.trainable_variables) or 0
    check_room(slots + sum(variable_bytes(each) for each in model.variables))
    prepared = _prepared(step, step.shapes.batch_size, True)
    return traced_outcome(prepared, step.rows, step.shapes.inferred.owners, kernels_on(target))


def _prepared(step: Step, batch_size: int, is_xla: bool) -> PreparedStep:
    """Prepare the step at a batch size, from the last one if it was prepared for the same mode and execution."""
    note_stage("tracing the step")
    opened, shapes, mode = step.opened, step.shapes, step.arguments.mode
    known = next((each for each in opened.prepared if (each.mode, each.jit_compile) == (mode, is_xla)), None)
    made = prepare_step(opened.model, opened.training, shapes.structure, shapes.inputs, batch_size, mode, is_xla, known)
    opened.prepared[:] = [made]
    return made


def _gpu_target(step: Step, target: DeviceTarget | None, jit_compile: bool | str) -> Outcome:
    from kerasmem.estimation.gpu_target.plan import gpu_target_outcome, gpu_target_plan

    if target is None or not _is_card(target):
        raise UsageError("method 'gpu-target' plans for a card: name one with --device (device=…)")
    card = find_card(target.name)
    with step.arguments.request(step.shapes.batch_size, jit_compile=True) as request:
        note_stage(f"compiling for {card.name}")
        return gpu_target_outcome(gpu_target_plan(request, card), card, step.rows, step.weights())


def _probe(step: Step, target: DeviceTarget | None, jit_compile: bool | str) -> Outcome:
    from kerasmem.estimation.probe.probing import probe

    with step.arguments.request(step.shapes.batch_size, jit_compile) as request:
        return probe(request, is_fixed=step.shapes.is_fixed)


Method = Callable[[Step, DeviceTarget | None, bool | str], Outcome]
METHODS: dict[str, Method] = {"graph": _graph, "xla": _xla, "gpu-target": _gpu_target, "probe": _probe}
