"""The xla method: compile the step for this machine, never run it, and read XLA's buffer assignment.

XLA plans one large temporary buffer for the whole step, and TensorFlow asks its allocator for exactly that, beside
the variables and the batch. So the plan goes through the allocator's rules and the result is the peak in use. On JAX
the arguments are part of the plan.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from kerasmem.compat import tensorflow_runtime
from kerasmem.compat.borrowing import NotAvailableError
from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.devices.growth import jax_grows
from kerasmem.errors import KerasmemError, ModelError, first_line
from kerasmem.estimation.allocator import GRAIN, Heap, smallest_limit
from kerasmem.estimation.graph.memory import make_variables
from kerasmem.estimation.graph.program import Variable
from kerasmem.estimation.report import SPREAD, Outcome, Pool, Unmodelled
from kerasmem.estimation.shapes import ShapedStep
from kerasmem.estimation.unmodelled import CPU_SCRATCH, XLA_AUTOTUNING, prefetched_batches
from kerasmem.estimation.xla_plan import HOPPER, CompiledStep, JaxNames, XlaPlan, product_bytes, read_plan
from kerasmem.models.backend import import_keras
from kerasmem.models.op_names import Attribution
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.step import PreparedStep, TracedStep


class XlaRefused(KerasmemError):
    """XLA cannot compile the step, which may still train in graph mode."""


def compile_plan(traced: TracedStep) -> XlaPlan:
    """Compile a step that was traced with `keep_alive` and return XLA's plan.

    Raises:
        XlaRefused: If XLA has no kernel for something in it.
    """
    return _plan("the step", partial(tensorflow_runtime.compile_function, traced.function, list(traced.flat)))


def scratch_of_function(name: str, inputs: Iterable[tuple[tuple[int, ...], str]]) -> int:
    """Return the bytes in between of a function of the traced step that XLA compiles by itself.

    Args:
        name: of the function.
        inputs: shape and dtype of each of its arguments.

    Raises:
        XlaRefused: If it cannot be compiled alone.
    """
    import tensorflow as tf

    arguments = [tf.TensorSpec(shape, dtype) for shape, dtype in inputs]
    return _plan(f"{name} alone", partial(tensorflow_runtime.compile_named, name, arguments)).temporary


def _plan(subject: str, compiled: Callable[[], bytes]) -> XlaPlan:
    import tensorflow as tf

    try:
        return read_plan(compiled())
    except (tf.errors.OpError, ValueError, NotAvailableError) as error:
        raise XlaRefused(f"XLA cannot compile {subject}: {first_line(error)}") from error


def simulate(plan: XlaPlan, variables: Sequence[Variable], batch: tuple[int, ...]) -> Heap:
    """Run two steps of the plan on a simulated heap, whose peak is then that of the second.

    The first step needs more: the optimizer's variables still share their first values, and each gets memory of its
    own while the step's temporary buffer is in use.

    Args:
        plan: XLA's.
        variables: of the model, its optimizer and metrics, in the order in which they are made.
        batch: bytes of each tensor of the batch.
    """
    heap = Heap()
    buffers = make_variables(variables, [(-1, size) for size in batch], heap)
    # Variables that share their first value get a buffer each once it is written, in the first step.
    shared = [number for number, buffer in enumerate(buffers) if buffer.holders > 1]
    for numbers in (shared, []):
        heap.reset_peak()
        temporary = [heap.allocate(size) for size in (*plan.results[:1], plan.temporary)]
        for number in numbers:
            heap.allocate(buffers[number].bytes, -1, number)
        temporary += [heap.allocate(size) for size in plan.results[1:]]
        for buffer in (*temporary, *(buffers[number] for number in numbers)):
            heap.let_go(buffer)
    return heap


def xla_outcome(
    plan: XlaPlan, variables: Sequence[Variable], batch: tuple[int, ...], layer_of: dict[int, str], names: Attribution
) -> Outcome:
    """Return the peak of the planned step, divided by category and layer.

    Args:
        plan: XLA's.
        variables: in the order in which they are made.
        batch: bytes of each tensor of the batch.
        layer_of: variable's number → layer.
        names: origins of the operations in the plan.
    """
    heap = simulate(plan, variables, batch)
    total, spread = heap.peak.in_use, SPREAD["xla"]
    limit = smallest_limit(heap.requests(), descending=True)
    held: list[tuple[int, str, str | None]] = [
        (variable.bytes, "optimizer" if variable.kind == "optimizer" else "weights", layer_of.get(number))
        for number, variable in enumerate(variables)
    ]
    held.append((sum(batch), "inputs", None))
    requested = sum(size for size, _, _ in held) + plan.requested
    outcome = Outcome(
        method="xla",
        execution="xla",
        total=total,
        low=int(total * (1 - spread)),
        high=int(max(total, limit) * (1 + spread)),
        pool=Pool(requested, total, heap.allocator.reserved, limit),
        notes=(f"XLA's buffer assignment for this machine's CPU asks for {plan.requested:,} B in a step",),
    )
    return plan.divided(outcome, held, names)


def jax_outcome(step: ShapedStep) -> Outcome:
    """Compile the step of a model without weights for JAX's first device, and return XLA's plan for it.

    The state is given up to the step (donated), as Keras's own trainer does, so that new weights take the place of the
    old ones.

    Args:
        step: of an open session.

    Raises:
        ModelError: If the step cannot be prepared, traced or compiled.
    """
    import jax

    device = jax.devices()[0]
    lowered, compiled = lower(step.prepare(True), device)
    # How much LLVM optimises does not change XLA's plan of memory, and takes half of the time and more.
    hurried = {"xla_backend_optimization_level": 0} if device.platform == "cpu" else {}
    with _no_compilation_cache(), tempfile.TemporaryDirectory(prefix="kerasmem-") as folder:
        plan = compile_lowered(lowered, hurried, folder)
    if step.spec.mode == "evaluate":  # Keras on JAX makes the slots for it too, which its step does not take
        slots = tuple(map(variable_bytes, step.opened.model.optimizer.variables))
        compiled = replace(compiled, arguments={**compiled.arguments, "optimizer": slots})
    is_cpu, spread = device.platform == "cpu", SPREAD["xla"]
    planned = planned_bytes(compiled, plan, grows=not is_cpu and jax_grows(os.environ))
    limit = smallest_limit(compiled.requests(plan))
    most, where = 0, "this machine's CPU"
    unmodelled: tuple[Unmodelled, ...] = (CPU_SCRATCH,)
    if not is_cpu:  # the next compilation may find other kernels the fastest
        most, where = product_bytes((plan,), HOPPER), f"{device.device_kind} ({device.platform})"
        unmodelled = prefetched_batches(sum(compiled.arguments.get("inputs", ()))), XLA_AUTOTUNING
    note = (
        f"Keras on JAX: XLA's plan for {where} has {plan.argument:,} B of arguments (weights, optimizer, the batch), "
        f"{plan.temporary:,} B in between and {sum(plan.results):,} B of results beside the donated state"
    )
    outcome = Outcome(
        method="xla",
        execution="xla",
        total=planned,
        low=int(planned * (1 - spread)),
        high=int((max(compiled.allocated(plan).in_use, limit) + most) * (1 + spread)),
        pool=Pool(plan.total, planned, None, limit),
        unmodelled=unmodelled,
        notes=(note, *compiled.notes),
    )
    names = JaxNames(compiled.layers, compiled.optimizer, step.rows)
    return plan.divided(outcome, compiled.held(step.weights()), names)


def planned_bytes(compiled: CompiledStep, plan: XlaPlan, grows: bool) -> int:
    """Return the bytes in use when a plan has all its buffers.

    Args:
        compiled: the step.
        plan: one of it.
        grows: whether the allocator takes regions as it needs them, whose chunks may be larger than the buffers. In one
            region each buffer is only rounded up.
    """
    if grows:
        return compiled.allocated(plan).in_use
    return sum(-(-size // GRAIN) * GRAIN for _, size in compiled.requests(plan))


def state_of(step: PreparedStep) -> dict[str, list[Any]]:
    """Return the variables of a step, in the groups and order of Keras's step functions on JAX."""
    model = step.model
    groups = {"trainable": model.trainable_variables, "non_trainable": model.non_trainable_variables}
    if step.mode == "train":
        groups["optimizer"] = model.optimizer.variables
    if step.mode != "inference":
        groups["metrics"] = model.metrics_variables
    return groups


def batch_of(step: PreparedStep) -> tuple[Any, ...]:
    """Return the shapes of a step's batch: (x, y), or (x,) if it takes no targets."""
    return step.data if isinstance(step.data, tuple) else (step.data,)


def lower(step: PreparedStep, device: Any) -> tuple[Any, CompiledStep]:
    """Lower a step for one device.

    Keras's trainer donates the state to a step that returns a new one; so does this.

    Args:
        step: the step.
        device: JAX's, or a description of one.

    Returns:
        The lowered step, and its description without plans.

    Raises:
        ModelError: If JAX cannot trace the step.
    """
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device)

    def shaped(tensor: Any) -> Any:
        dtype = jax.dtypes.canonicalize_dtype(tensor.dtype)
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype, sharding=sharding)

    def infer(state: Any, data: Any) -> Any:
        return model.predict_step(state, data)[0]

    model, groups = step.model, state_of(step)
    state, data = import_keras().tree.map_structure(shaped, (tuple(groups.values()), batch_of(step)))
    function = {"train": model.train_step, "evaluate": model.test_step, "inference": infer}[step.mode]
    options = {} if step.mode == "inference" else {"donate_argnums": 0}
    try:
        lowered = jax.jit(function, **options).lower(state, data)
    except KerasmemError:
        raise
    except Exception as error:  # the model's own code runs while it is traced, and may raise anything
        raise ModelError(
            f"the step of model {model.name!r} cannot be traced on JAX: {type(error).__name__}: {first_line(error)}"
        ) from error
    named = zip((*groups, "inputs"), (*state, data), strict=True)
    return lowered, CompiledStep(
        arguments={name: tuple(map(variable_bytes, jax.tree.leaves(group))) for name, group in named},
        plans=(),
        layers=tuple({str(layer.name) for layer in flatten_layers(model, include_self=False)}),
        optimizer=str(model.optimizer.name) if step.mode == "train" else None,
        notes=step.notes,
    )


def compile_lowered(lowered: Any, options: dict[str, Any], folder: str) -> XlaPlan:
    """Compile a lowered step and return XLA's plan.

    Args:
        lowered: the step.
        options: of the compiler.
        folder: an empty one for XLA's dumps.

    Raises:
        ModelError: If XLA refuses.
    """
    import jax

    try:
        lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_proto": True, **options})
    except jax.errors.JaxRuntimeError as error:
        raise ModelError(f"XLA does not compile the step: {first_line(error)}") from error
    if (plan := dumped_plan(folder)) is None:
        raise ModelError("this version of XLA does not write its plan for this device")
    return plan


def dumped_plan(folder: str) -> XlaPlan | None:
    """Return the plan in XLA's dumps, or None until XLA has written it to its end."""
    for dump in Path(folder).glob("*_after_optimizations.hlo.pb"):
        with contextlib.suppress(DecodeError):  # the rest is still being written
            return read_plan(dump.read_bytes())
    return None


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Compile even if the step was compiled before: a program from JAX's cache on disk comes without its plan."""
    import jax

    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    try:
        yield
    finally:
        jax.config.update(name, before)
