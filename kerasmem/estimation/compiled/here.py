"""The xla method where Keras runs on JAX: the very step that `fit` compiles, compiled here on shapes and never run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kerasmem.errors import ModelError
from kerasmem.estimation.allocator import GRAIN, smallest_limit
from kerasmem.estimation.compiled import on_jax
from kerasmem.estimation.compiled.hlo import NO_SCRATCH, Scratch, library_scratch
from kerasmem.estimation.compiled.planned import OwnPlan, with_row
from kerasmem.estimation.report import SPREAD, Outcome, Pool, Unmodelled
from kerasmem.estimation.tracing import Step
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.symbolic_step import SymbolicStep, symbolic_step
from kerasmem.processes.children import ChildFailure


def jax_outcome(step: Step) -> Outcome:
    """Compile the step of a model without weights for JAX's first device, and return what XLA plans for it.

    The state is given up to the step (donated), as Keras's own trainer does, so that new weights take the place of the
    old ones.

    Args:
        step: inside `open_step`.

    Raises:
        ModelError: the step cannot be prepared, traced or compiled; the message says why.
    """
    import jax

    opened, shapes = step.opened, step.shapes
    prepared = symbolic_step(
        opened.model, opened.training, shapes.structure, shapes.inputs, shapes.batch_size, step.arguments.mode
    )
    device = jax.devices()[0]
    try:
        with _no_compilation_cache():
            plan, compiled = _plan(prepared, device)
    except ChildFailure as failure:
        raise ModelError(f"model {opened.model.name!r}: {failure.reason}") from failure
    if step.arguments.mode == "evaluate":  # Keras on JAX makes the slots for it too, which its step does not take
        slots = tuple(map(variable_bytes, opened.model.optimizer.variables))
        plan = replace(plan, arguments={**plan.arguments, "optimizer": slots})
    scratch = library_scratch(compiled.as_text()) if device.platform == "cpu" else NO_SCRATCH
    missing = _unmodelled(plan, int(compiled.memory_analysis().generated_code_size_in_bytes), device, scratch)
    requests, rows, spread = plan.requests(plan), frozenset(step.rows), SPREAD["xla"]
    # JAX has one region (it takes three quarters of a GPU at once unless told otherwise) with each buffer rounded up.
    # The upper end is for regions that grow, and what their chunks waste.
    planned = sum(-(-size // GRAIN) * GRAIN for _, size in requests)
    total, limit = planned + scratch.copied, smallest_limit(requests)
    shares = plan.divided(plan, planned, rows, step.weights())
    shares.add(scratch.copied, "workspace")
    return Outcome(
        "xla", "xla", total, int(total * (1 - spread)),
        int((max(plan.allocated(plan).peak, limit) + scratch.most) * (1 + spread)),
        Pool(plan.total, planned, None, None, limit),
        shares.categories, shares.layers, with_row(plan.instant, rows), tuple(missing),
        (_note(plan, device), *plan.notes),
    )  # fmt: skip


def _plan(step: SymbolicStep, device: Any) -> tuple[OwnPlan, Any]:
    """Return the plan and the compiled step."""
    lowered, described = on_jax.lower(step, device)
    # How much LLVM optimises has no part in XLA's plan of memory, and takes half of the time and more.
    hurried = {"xla_backend_optimization_level": 0} if device.platform == "cpu" else {}
    with tempfile.TemporaryDirectory(prefix="kerasmem-") as folder:
        compiled = on_jax.compile_lowered(lowered, {**on_jax.dump_to(folder), **hurried}, "this machine")
        found = {**on_jax.planned_bytes(compiled), **on_jax.at_peak(compiled.as_text(), folder, step)}
    return OwnPlan.from_dict({**described, **found}), compiled


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Compile inside whatever was compiled before: a program from JAX's cache on disk has no texts of its plan."""
    import jax

    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _note(plan: OwnPlan, device: Any) -> str:
    where = "this machine's CPU" if device.platform == "cpu" else f"{device.device_kind} ({device.platform})"
    return (
        f"Keras on JAX: XLA's plan for {where} has {plan.argument:,} B of arguments (weights, optimizer, the batch), "
        f"{plan.temp:,} B in between and {plan.output - plan.alias:,} B of results beside the donated state"
    )


def _unmodelled(plan: OwnPlan, code: int, device: Any, scratch: Scratch) -> Iterator[Unmodelled]:
    if code:
        yield Unmodelled("compiled code", "the step's machine code and constants, outside the plan", code)
    if device.platform != "cpu":
        why = "Keras puts the next batch on a card while a step runs"
        yield Unmodelled("prefetched batch", why, sum(plan.arguments.get("inputs", ())))
        yield Unmodelled("autotuning", "while the first step is compiled on the card; freed before it runs")
    else:
        why = "what matrix products and convolutions take from the C library; in the interval, not in the total"
        yield Unmodelled("scratch of kernels", why, scratch.most - scratch.copied or None)
