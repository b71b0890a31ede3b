"""The xla method: XLA's buffer assignment of the step, compiled for this machine.

XLA plans one large temporary buffer for the whole step, and TensorFlow requests exactly that from its allocator, after
the variables and the batch. So the plan is replayed on the simulated allocator. On JAX the plan has the arguments too.
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
    """XLA cannot compile the step. It may still train in graph mode."""


def compile_plan(traced: TracedStep) -> XlaPlan:
    """Compile a step that was traced with `keep_alive` and return XLA's plan.

    Raises:
        XlaRefused: If XLA cannot compile the step.
    """
    return _plan("the step", partial(tensorflow_runtime.compile_function, traced.function, list(traced.flat)))


def scratch_of_function(name: str, inputs: Iterable[tuple[tuple[int, ...], str]]) -> int:
    """Return the temporary bytes of a function that XLA compiles by itself.

    Args:
        name: name of the function.
        inputs: shape and dtype of each argument.

    Raises:
        XlaRefused: If the function cannot be compiled.
    """
    import tensorflow as tf

    arguments = [tf.TensorSpec(shape, dtype) for shape, dtype in inputs]
    return _plan(f"{name} alone", partial(tensorflow_runtime.compile_named, name, arguments)).temporary


def _plan(subject: str, compile_step: Callable[[], bytes]) -> XlaPlan:
    import tensorflow as tf

    try:
        return read_plan(compile_step())
    except (tf.errors.OpError, ValueError, NotAvailableError) as error:
        raise XlaRefused(f"XLA cannot compile {subject}: {first_line(error)}") from error


def simulate(plan: XlaPlan, variables: Sequence[Variable], batch: tuple[int, ...]) -> Heap:
    """Simulate two steps of a plan, and return the heap with the second's peak.

    The first step needs more: the optimizer's variables still share their first values, and each gets its own memory
    while the temporary buffer is in use.

    Args:
        plan: XLA's plan.
        variables: variables of the model, its optimizer and metrics, in the order of their creation.
        batch: bytes of each tensor of the batch.
    """
    heap = Heap()
    buffers = make_variables(variables, [(-1, size) for size in batch], heap)
    # In the first step variables that share their first value get a buffer each.
    shared = [number for number, buffer in enumerate(buffers) if buffer.holders > 1]
    for numbers in (shared, []):
        heap.reset_peak()
        temporary = [heap.allocate(size) for size in (*plan.results[:1], plan.temporary)]
        for number in numbers:
            heap.allocate(buffers[number].bytes, -1, number)
        temporary += [heap.allocate(size) for size in plan.results[1:]]
        for buffer in (*temporary, *(buffers[number] for number in numbers)):
            heap.release(buffer)
    return heap


def xla_outcome(
    plan: XlaPlan, variables: Sequence[Variable], batch: tuple[int, ...], layer_of: dict[int, str], names: Attribution
) -> Outcome:
    """Return the peak of the planned step by category and layer.

    Args:
        plan: XLA's plan.
        variables: variables in the order of their creation.
        batch: bytes of each tensor of the batch.
        layer_of: layer of each variable, by its number.
        names: origins of the plan's operations.
    """
    heap = simulate(plan, variables, batch)
    total, spread = heap.peak.in_use, SPREAD["xla"]
    limit = smallest_limit(heap.requests(), descending=True)
    arguments: list[tuple[int, str, str | None]] = [
        (variable.bytes, "optimizer" if variable.kind == "optimizer" else "weights", layer_of.get(number))
        for number, variable in enumerate(variables)
    ]
    arguments.append((sum(batch), "inputs", None))
    requested = sum(size for size, _, _ in arguments) + plan.requested
    outcome = Outcome(
        method="xla",
        execution="xla",
        total=total,
        low=int(total * (1 - spread)),
        high=int(max(total, limit) * (1 + spread)),
        pool=Pool(requested, total, heap.allocator.reserved, limit),
        notes=(f"XLA's buffer assignment for this machine's CPU has {plan.requested:,} B for a step",),
    )
    return plan.divide(outcome, arguments, names)


def jax_outcome(step: ShapedStep) -> Outcome:
    """Compile a step for JAX's first device, and return the outcome.

    As in Keras's trainer, the state is donated to the step, so that new weights replace the old ones in memory.

    Raises:
        ModelError: If the step cannot be prepared, traced or compiled.
    """
    import jax

    device = jax.devices()[0]
    lowered, compiled = lower(step.prepare(True), device)
    # LLVM's optimisations do not change XLA's memory plan, and take half of the time or more.
    options = {"xla_backend_optimization_level": 0} if device.platform == "cpu" else {}
    with _no_compilation_cache(), tempfile.TemporaryDirectory(prefix="kerasmem-") as folder:
        plan = compile_lowered(lowered, options, folder)
    if step.spec.mode == "evaluate":  # Keras on JAX creates the optimizer's slots, though the step does not take them
        slots = tuple(map(variable_bytes, step.opened.model.optimizer.variables))
        compiled = replace(compiled, arguments={**compiled.arguments, "optimizer": slots})
    is_cpu, spread = device.platform == "cpu", SPREAD["xla"]
    total = bytes_in_use(compiled, plan, grows=not is_cpu and jax_grows(os.environ))
    limit = smallest_limit(compiled.requests(plan))
    most, device_name = 0, "this machine's CPU"
    unmodelled: tuple[Unmodelled, ...] = (CPU_SCRATCH,)
    if not is_cpu:  # the next compilation may choose other kernels
        most, device_name = product_bytes((plan,), HOPPER), f"{device.device_kind} ({device.platform})"
        unmodelled = prefetched_batches(sum(compiled.arguments.get("inputs", ()))), XLA_AUTOTUNING
    note = (
        f"Keras on JAX: XLA's plan for {device_name} has {plan.argument:,} B of arguments (weights, optimizer, batch), "
        f"{plan.temporary:,} B of temporary buffers and {sum(plan.results):,} B of results beside the donated state"
    )
    outcome = Outcome(
        method="xla",
        execution="xla",
        total=total,
        low=int(total * (1 - spread)),
        high=int((max(compiled.allocate(plan).in_use, limit) + most) * (1 + spread)),
        pool=Pool(plan.total, total, None, limit),
        unmodelled=unmodelled,
        notes=(note, *compiled.notes),
    )
    names = JaxNames(compiled.layers, compiled.optimizer, step.rows)
    return plan.divide(outcome, compiled.argument_shares(step.weights()), names)


def bytes_in_use(compiled: CompiledStep, plan: XlaPlan, grows: bool) -> int:
    """Return the bytes in use once a plan has all its buffers.

    Args:
        compiled: the step.
        plan: one of its plans.
        grows: whether the allocator's memory grows. Chunks may then be larger than the buffers; otherwise each buffer
            is only rounded up.
    """
    if grows:
        return compiled.allocate(plan).in_use
    return sum(-(-size // GRAIN) * GRAIN for _, size in compiled.requests(plan))


def state_of(step: PreparedStep) -> dict[str, list[Any]]:
    """Return a step's variables by group, as Keras on JAX groups them."""
    model = step.model
    groups = {"trainable": model.trainable_variables, "non_trainable": model.non_trainable_variables}
    if step.mode == "train":
        groups["optimizer"] = model.optimizer.variables
    if step.mode != "inference":
        groups["metrics"] = model.metrics_variables
    return groups


def step_batch(step: PreparedStep) -> tuple[Any, ...]:
    """Return a step's batch: (x, y), or (x,) without targets."""
    return step.data if isinstance(step.data, tuple) else (step.data,)


def lower(step: PreparedStep, device: Any) -> tuple[Any, CompiledStep]:
    """Lower a step for one device, with its state donated, as Keras does.

    Args:
        step: the step.
        device: a device of JAX, or a description of one.

    Returns:
        The lowered step, and a `CompiledStep` without plans.

    Raises:
        ModelError: If JAX cannot trace the step.
    """
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device)

    def to_shape(tensor: Any) -> Any:
        dtype = jax.dtypes.canonicalize_dtype(tensor.dtype)
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype, sharding=sharding)

    def infer(state: Any, data: Any) -> Any:
        return model.predict_step(state, data)[0]

    model, groups = step.model, state_of(step)
    state, data = import_keras().tree.map_structure(to_shape, (tuple(groups.values()), step_batch(step)))
    function = {"train": model.train_step, "evaluate": model.test_step, "inference": infer}[step.mode]
    options = {} if step.mode == "inference" else {"donate_argnums": 0}
    try:
        lowered = jax.jit(function, **options).lower(state, data)
    except KerasmemError:
        raise
    except Exception as error:  # the model's own code may raise anything
        raise ModelError(
            f"the step of model {model.name!r} cannot be traced on JAX: {type(error).__name__}: {first_line(error)}"
        ) from error
    named = zip((*groups, "inputs"), (*state, data), strict=True)
    return lowered, CompiledStep(
        arguments={name: tuple(map(variable_bytes, jax.tree.leaves(group))) for name, group in named},
        plans=(),
        layers=tuple({str(layer.name) for layer in flatten_layers(model, include_self=False)}),
        optimizer=str(model.optimizer.name) if step.mode == "train" else None,
        notes=(),
    )


def compile_lowered(lowered: Any, options: dict[str, Any], folder: str) -> XlaPlan:
    """Compile a lowered step and return XLA's plan.

    Args:
        lowered: the lowered step.
        options: options of the compiler.
        folder: an empty folder for XLA's dumps.

    Raises:
        ModelError: If XLA refuses.
    """
    import jax

    try:
        lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_proto": True, **options})
    except jax.errors.JaxRuntimeError as error:
        raise ModelError(f"XLA cannot compile the step: {first_line(error)}") from error
    if (plan := dumped_plan(folder)) is None:
        raise ModelError("this version of XLA writes no plan for this device")
    return plan


def dumped_plan(folder: str) -> XlaPlan | None:
    """Return the plan in XLA's dumps, or None if still incomplete."""
    for dump in Path(folder).glob("*_after_optimizations.hlo.pb"):
        with contextlib.suppress(DecodeError):  # the rest is still being written
            return read_plan(dump.read_bytes())
    return None


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Disable JAX's compilation cache, as a cached program comes without its plan."""
    import jax

    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    try:
        yield
    finally:
        jax.config.update(name, before)
