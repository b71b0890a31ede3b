"""The methods of an estimate, and the choice between them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers, gpu_assumed, takes_cudnn
from kerasmem.compat.tensorflow_runtime import all_reduces_traced
from kerasmem.devices.catalogue import find_card
from kerasmem.devices.host import available_memory
from kerasmem.devices.kernels import CardKernels, CpuKernels, cpu_kernels, kernels_on
from kerasmem.errors import KerasmemError, ModelError, UsageError, first_line
from kerasmem.estimation.formula import formula_bytes
from kerasmem.estimation.graph.build import build_program, step_variables
from kerasmem.estimation.graph.cuda import channels_last
from kerasmem.estimation.graph.program import NotModelled
from kerasmem.estimation.graph.scratch import Kernels
from kerasmem.estimation.graph.steps import graph_outcome
from kerasmem.estimation.report import Bytes, LayerMemory, Outcome, Pool
from kerasmem.estimation.shapes import ShapedStep
from kerasmem.estimation.unmodelled import EXCHANGE_BUFFERS, JAX_EXCHANGE, formula_notes, not_in_the_formula
from kerasmem.estimation.xla import compile_plan, xla_outcome
from kerasmem.models.backend import runs_on_jax
from kerasmem.models.op_names import EXCHANGE, Attribution, Instant
from kerasmem.models.own_step import loop_is_compiled
from kerasmem.models.sizes import element_bytes
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import TargetsError, TracedStep, trace_step

# "auto" runs real steps only if the formula's total is at most this share of the free memory.
PROBED_SHARE = 0.25


@dataclass(frozen=True)
class Method:
    """A way to estimate a step.

    Attributes:
        unavailable: returns the reason why the method cannot estimate a step, or None.
        outcome: estimates a step, or raises KerasmemError.
        is_of_cpu: returns whether an outcome is of this machine's CPU even if a card is named.
        card_part: returns the part of a card's compute capability that the method depends on, or None.
    """

    unavailable: Callable[[ShapedStep], str | None]
    outcome: Callable[[ShapedStep], Outcome]
    is_of_cpu: Callable[[Outcome], bool] = lambda outcome: False
    card_part: Callable[[tuple[int, int]], Any] = lambda capability: None


def step_outcome(step: ShapedStep) -> Outcome:
    """Run the requested method, or for "auto" the first that can estimate the step.

    Raises:
        KerasmemError: If the requested method cannot estimate the step.
    """
    if step.spec.method != "auto":
        return run_method(step.spec.method, step)
    names, why = automatic_methods(step)
    reasons: list[str] = []
    for name in names:
        try:
            outcome = run_method(name, step)
        except TargetsError:
            raise
        except KerasmemError as error:
            reasons.append(f"{name} has no answer: {error}")
        except Exception as error:  # answer by the formula, and run no step of the model
            reasons.append(f"{name} failed: {type(error).__name__}: {error}; a defect in kerasmem")
            break
        else:
            return _with_notes(outcome, *reasons, f"{name}, since {why}")
    formula = _with_notes(run_method("formula", step), *reasons, "the formula answers instead of other methods")
    return replace(formula, fallback="; ".join(reasons))


def automatic_methods(step: ShapedStep) -> tuple[tuple[str, ...], str]:
    """Return the methods that match how Keras would run the step, the best first, and the reason."""
    if is_eager(step):
        return ("probe",), "the model is compiled with run_eagerly=True"
    compiles, why = _compiles(step)
    if not compiles:
        return ("graph", "probe"), why
    names: tuple[str, ...] = ("xla",) if runs_on_jax() else ("xla", "graph")
    return (("gpu-target", *names) if step.is_on_card else names), why


def _compiles(step: ShapedStep) -> tuple[bool, str]:
    """Return whether XLA compiles the step, and the reason."""
    jit_compile, model = step.spec.jit_compile, step.opened.model
    if runs_on_jax():
        return True, "Keras runs on JAX, which compiles every step"
    if jit_compile != "auto":
        return bool(jit_compile), f"jit_compile={jit_compile}"
    compiles = loop_is_compiled(model)
    if compiles is not None:
        return compiles, f"the step function has jit_compile={compiles}"
    if step.spec.replicas > 1:
        return False, "Keras does not compile with XLA under tf.distribute"
    if not step.is_on_card:
        reason = "no card is named" if step.target is None else "a memory size alone does not name a GPU"
        return False, f"Keras compiles with XLA on a GPU only, and {reason}"
    for layer in flatten_layers(model):
        if not layer.supports_jit:
            return False, f"layer {layer.name!r} cannot be compiled by XLA"
        if takes_cudnn(layer):
            return False, f"cuDNN runs layer {layer.name!r} on a GPU, and Keras does not compile with XLA then"
    return True, (
        "Keras compiles with XLA on a GPU; if you compile with jit_compile=False, pass --no-jit-compile "
        "(jit_compile=False in Python), as this machine cannot tell it from the default"
    )


def run_method(name: str, step: ShapedStep) -> Outcome:
    """Estimate a step by one method.

    Raises:
        KerasmemError: If the method cannot estimate the step.
    """
    method = METHODS[name]
    if (reason := method.unavailable(step)) is not None:
        raise UsageError(reason)
    outcome = method.outcome(step)
    outcome = _with_notes(outcome, *unused_profile(step.spec, outcome.kernels, name))
    if step.spec.replicas > 1 and step.spec.mode == "train" and name != "formula":
        outcome = _with_exchange(outcome, step.layers, step.spec.replicas)
    return _stand_in(outcome) if step.is_on_card and method.is_of_cpu(outcome) else outcome


def unused_profile(spec: StepSpec, kernels: CpuKernels | None, method: str) -> tuple[str, ...]:
    """Return a note if the user chose kernels or threads and a result does not depend on them."""
    if kernels is not None or (spec.kernels, spec.threads) == (None, None):
        return ()
    return (f"kernels and threads are not used, as this result of {method} does not depend on them",)


def _stand_in(outcome: Outcome) -> Outcome:
    """Widen an outcome of this machine's CPU to stand in for a card.

    A card usually takes less. The lower end becomes the memory that the step holds from beginning to end.
    """
    notes = (*outcome.notes, stand_in_note(outcome.method))
    return replace(outcome, low=min(outcome.low or 0, constant_bytes(outcome)), stands_in=True, notes=notes)


def stand_in_note(method: str) -> str:
    """Return the note on a result of this machine's CPU that stands in for a card."""
    return f"{method} on this machine's CPU stands in for the card: a GPU usually takes less"


def constant_bytes(need: Bytes) -> int:
    """Return the bytes that a step holds from beginning to end."""
    return sum(getattr(need, name) or 0 for name in ("weights", "optimizer", "inputs"))


def _with_exchange(outcome: Outcome, layers: Iterable[LayerMemory], replicas: int) -> Outcome:
    """Add the exchange of gradients between replicas to an outcome, or an entry on it.

    The steps that `graph` and `xla` trace contain it. Other outcomes are of a step without it. The total is at least
    what is live during the exchange: the gradients, and the buffer. At most both are live at the peak too, and with XLA
    a second buffer for the sums.
    """
    if runs_on_jax():
        return replace(outcome, unmodelled=(*outcome.unmodelled, JAX_EXCHANGE))
    trained = [row for row in layers if row.trainable_parameters and row.class_name != "Embedding"]
    gradients = sum(row.weight_bytes * row.trainable_parameters // row.parameters for row in trained)
    note = (
        f"before the first update the gradients are packed into one buffer of {gradients:,} B, reduced over "
        f"{replicas} replicas and split again: they are then in memory twice"
    )
    outcome = replace(outcome, notes=(*outcome.notes, note), unmodelled=(*outcome.unmodelled, EXCHANGE_BUFFERS))
    if outcome.method in ("graph", "xla"):
        return outcome
    if outcome.high is not None:
        outcome = replace(outcome, high=outcome.high + (3 if outcome.execution == "xla" else 2) * gradients)
    increase = max(constant_bytes(outcome) + 2 * gradients - outcome.total, 0)
    if not increase:
        return outcome
    pool: dict[str, Any] = {
        name: None if size is None else size + increase for name, size in vars(outcome.pool).items()
    }
    return replace(
        outcome,
        total=outcome.total + increase,
        pool=Pool(**pool),
        gradients=(outcome.gradients or 0) + increase,
        instant=Instant("while the gradients of all replicas are exchanged", "batch_all_reduce", None, "optimizer"),
    )


def backend_refusal(method: str, jit_compile: bool | str) -> str | None:
    """Return why the backend does not support a method (or "measure"), or None."""
    if not runs_on_jax():
        return None
    if method in ("graph", "probe"):
        return (
            f"method {method!r}: not on Keras's jax backend, only on TensorFlow; use xla, as Keras on JAX compiles "
            "every step with XLA, or measure"
        )
    if jit_compile is False and method != "formula":
        return "jit_compile=False: Keras on JAX then runs operations one by one, which only method formula supports"
    return None


def is_eager(step: ShapedStep) -> bool:
    """Return whether the step runs one operation after another, without a graph."""
    return bool(getattr(step.opened.model, "run_eagerly", False))


def _check_traced(name: str, step: ShapedStep) -> str | None:
    """Return why a method cannot trace the step, or None."""
    if is_eager(step):
        return (
            f"method {name!r} traces the step as a graph, but the model is compiled with run_eagerly=True; use probe "
            "or kerasmem.measure, or compile it without"
        )
    return backend_refusal(name, step.spec.jit_compile)


def _formula(step: ShapedStep) -> Outcome:
    is_bounded = not step.opaque
    inner = step.inner_bytes() if is_bounded else 0
    need = formula_bytes(step.layers, step.batch_size, step.spec.mode, step.slots, is_bounded, inner)
    return Outcome(
        **vars(need),
        method="formula",
        execution="none",
        layers=None,
        unmodelled=not_in_the_formula(step),
        notes=formula_notes(step.layers, need, step.formula.total_bytes),
    )


def _graph(step: ShapedStep) -> Outcome:
    return _traced_outcome(step, jit_compile=False)


def _xla(step: ShapedStep) -> Outcome:
    if runs_on_jax():
        from kerasmem.estimation.xla import jax_outcome

        return jax_outcome(step)
    return _traced_outcome(step, jit_compile=True)


def _traced_outcome(step: ShapedStep, jit_compile: bool) -> Outcome:
    """Trace a step, then simulate it or have XLA plan it.

    Raises:
        KerasmemError: If the step cannot be traced, compiled or simulated.
    """
    if jit_compile:  # XLA compiles the step anew for each batch size
        keep_alive: list[Any] = []  # XLA's compiler reads the variables
        with _exchange(step):
            traced = trace_step(step.prepare(jit_compile), keep_alive)
        batch = tuple(math.prod(spec.shape) * element_bytes(spec.dtype.name) for spec in traced.flat)
        return xla_outcome(compile_plan(traced), step_variables(traced), batch, *_origins(step, traced))
    kernels = kernels_on(step.target, step.spec.kernels, step.spec.threads)
    caveats: tuple[str, ...] = ()
    try:
        outcome = _simulated(step, kernels, has_open_batch=not step.is_fixed)
    except (ModelError, NotModelled) as error:
        if step.is_fixed:
            raise
        outcome = _simulated(step, kernels, has_open_batch=False)
        caveats = (
            f"estimated for batches of one fixed size, as with drop_remainder=True, because {first_line(error)}",
        )
    return replace(outcome, caveats=caveats)


def _simulated(step: ShapedStep, kernels: Kernels, has_open_batch: bool) -> Outcome:
    """Return the outcome of a step in graph mode, with an open batch as in `fit` or a fixed one."""
    prepared = step.prepare(jit_compile=False)
    is_on_card = isinstance(kernels, CardKernels)
    with gpu_assumed() if is_on_card else contextlib.nullcontext(), _exchange(step):
        traced = trace_step(prepared, has_open_batch=has_open_batch)
    program, notes = build_program(traced, kernels)
    outcome = graph_outcome(program, *_origins(step, traced), kernels)
    on_cpu = kernels if isinstance(kernels, CpuKernels) else None
    profile = () if on_cpu is None else _profile_notes(on_cpu)
    return replace(outcome, kernels=on_cpu, notes=(*notes, *profile, *outcome.notes))


def _exchange(step: ShapedStep) -> contextlib.AbstractContextManager[Any]:
    """Return a context that traces the exchange of gradients between replicas."""
    return all_reduces_traced(step.spec.replicas, EXCHANGE) if step.spec.replicas > 1 else contextlib.nullcontext()


def _origins(step: ShapedStep, traced: TracedStep) -> tuple[dict[int, str], Attribution]:
    """Return the layers of a step's variables and the origins of its operations."""
    owners = step.inferred.owners
    layer_of = {
        number: owners[id(variable)] for number, variable in enumerate(traced.variables) if id(variable) in owners
    }
    return layer_of, Attribution(traced.scopes, step.rows, traced.optimizers)


def _profile_notes(kernels: CpuKernels) -> tuple[str, ...]:
    """Return a note if this machine has other kernels or threads."""
    here = cpu_kernels()
    if kernels.profile == here.profile:
        return ()
    texts = [f"{one.title} in {one.inter_op_threads} threads" for one in (kernels, here)]
    return (
        f"estimated for {texts[0]}; this process has {texts[1]}, and speeds of operations are those of two threads",
    )


def _why_no_plan(step: ShapedStep) -> str | None:
    if not step.is_on_card:
        return "method 'gpu-target' plans for a card; name one with --device (device=…)"
    return _check_traced("gpu-target", step)


def _gpu_target(step: ShapedStep) -> Outcome:
    from kerasmem.estimation.gpu_target import gpu_target_outcome, gpu_target_plan

    assert step.target is not None
    card = find_card(step.target.name)
    spec = step.spec.portable(batch_size=step.batch_size, jit_compile=True)
    return gpu_target_outcome(gpu_target_plan(spec, card), card, step.rows, step.weights())


def _why_no_steps(step: ShapedStep) -> str | None:
    """Return why no real steps run, or None. For "auto" they must be small."""
    needed, free = step.formula.total_bytes, available_memory()
    if step.spec.method == "auto" and needed > PROBED_SHARE * free:
        return (
            f"no step was run (--method probe runs some): the formula gives {needed:,} B, more than a quarter of "
            f"the {free:,} B of memory available to this job"
        )
    return backend_refusal("probe", step.spec.jit_compile)


def _probe(step: ShapedStep) -> Outcome:
    from kerasmem.estimation.probing import probe

    return probe(step.spec.portable(batch_size=step.batch_size), is_fixed=step.is_fixed)


def _jax_has_gpu() -> bool:
    """Return whether Keras runs on JAX, and JAX plans for a GPU of this machine."""
    if not runs_on_jax():
        return False
    import jax

    return bool(jax.default_backend() != "cpu")


METHODS: dict[str, Method] = {
    "formula": Method(lambda step: None, _formula),
    "graph": Method(partial(_check_traced, "graph"), _graph, card_part=channels_last),
    "xla": Method(partial(_check_traced, "xla"), _xla, lambda outcome: not _jax_has_gpu()),
    "gpu-target": Method(_why_no_plan, _gpu_target, card_part=tuple),
    "probe": Method(_why_no_steps, _probe, lambda outcome: outcome.ran_on == "CPU:0"),
}


def _with_notes(outcome: Outcome, *notes: str) -> Outcome:
    return replace(outcome, notes=(*notes, *outcome.notes))
