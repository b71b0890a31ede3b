"""The xla method: compile the step for this machine, never run it, and read XLA's buffer assignment.

XLA plans one large temporary buffer for the whole step, and TensorFlow asks its allocator for exactly that, beside
the variables and the batch. So the plan goes through the allocator's rules and the result is the peak in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kerasmem.compat import tensorflow_runtime
from kerasmem.compat.borrowing import NotAvailableError
from kerasmem.errors import KerasmemError, first_line
from kerasmem.estimation.allocator import Heap, smallest_limit
from kerasmem.estimation.compiled.assignment import read_plan
from kerasmem.estimation.compiled.plan import XlaPlan
from kerasmem.estimation.graph.memory import make_variables
from kerasmem.estimation.graph.program import Variable
from kerasmem.estimation.report import SPREAD, Outcome, Pool
from kerasmem.models.op_names import Attribution
from kerasmem.models.step import TracedStep


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
