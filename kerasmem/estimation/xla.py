"""The xla method: compile the step for this machine, never run it, and read XLA's buffer assignment.

XLA plans one large temporary buffer for the whole step, and TensorFlow asks its allocator for exactly that, beside
the variables and the batch. So the plan goes through the allocator's rules and the result is the peak in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kerasmem.compat import xla
from kerasmem.devices.room import cpu_allocator_room
from kerasmem.errors import KerasmemError, first_line
from kerasmem.estimation.allocator import smallest_limit
from kerasmem.estimation.graph.memory import Heap, make_variables
from kerasmem.estimation.report import SPREAD, Outcome, Pool, Shares
from kerasmem.models.op_names import CATEGORIES, Attribution
from kerasmem.models.step import TracedStep
from kerasmem.units import format_size


class XlaRefused(KerasmemError):
    """XLA cannot compile the step, which may still train in graph mode."""


@dataclass(frozen=True)
class Plan:
    """XLA's buffer assignment.

    Attributes:
        outputs: bytes of each buffer that the step returns and that no argument lends it.
        temporary: bytes of the one buffer in which everything else lives.
        live: what lies in it when most of it is in use: (bytes, the operation that made it), in no order.
        at: the operation that runs then.
    """

    outputs: tuple[int, ...]
    temporary: int
    live: tuple[tuple[int, str], ...]
    at: str | None

    @property
    def requested(self) -> int:
        """The bytes that TensorFlow asks its allocator for in one step."""
        return self.temporary + sum(self.outputs)


def check_room(held_bytes: int) -> None:
    """Refuse a plan if the limit of TensorFlow's CPU allocator may be too small for the variables.

    XLA's compiler wants variables that exist, so their addresses are reserved. A chunk may take nearly twice what is
    asked for, and where nothing is left TensorFlow ends the process.

    Args:
        held_bytes: of the model's variables and the optimizer's.

    Raises:
        XlaRefused: it may be too small.
    """
    room = cpu_allocator_room()
    if room is not None and 2 * held_bytes > room:
        raise XlaRefused(
            f"XLA's plan reserves the addresses of {format_size(held_bytes)} of variables, twice that at most, and "
            f"TensorFlow's allocator for the CPU has {format_size(room)} left of its limit (TF_CPU_BFC_MEM_LIMIT_IN_MB)"
        )


def compile_plan(traced: TracedStep) -> Plan:
    """Compile a step that was traced with `keep_alive` and return XLA's plan.

    Raises:
        XlaRefused: XLA has no kernel for something in it.
    """
    return _planned("the step", xla.compile_function, traced.function, list(traced.flat))


def compile_function(name: str, inputs: list[tuple[tuple[int, ...], str]]) -> Plan:
    """Return XLA's plan for a function of the traced step that it compiles by itself.

    Args:
        name: of the function.
        inputs: shape and dtype of each of its arguments.

    Raises:
        XlaRefused: it cannot be compiled alone.
    """
    import tensorflow as tf

    return _planned(f"{name} alone", xla.compile_named, name, [tf.TensorSpec(shape, dtype) for shape, dtype in inputs])


def _planned(what: str, compiled: Callable[..., Any], *arguments: Any) -> Plan:
    try:
        return read_plan(compiled(*arguments))
    except Exception as error:
        raise XlaRefused(f"XLA cannot compile {what}: {first_line(error)}") from error


def read_plan(module: Any) -> Plan:
    """Return the plan in an `HloProto`."""
    outputs, temporary = [], 0
    for buffer in module.buffer_assignment.buffer_allocations:
        if buffer.is_entry_computation_parameter or buffer.is_constant or buffer.is_thread_local:
            continue
        if buffer.maybe_live_out:
            outputs.append(int(buffer.size))
        else:
            temporary += int(buffer.size)
    live, at = _fullest(module)
    return Plan(tuple(outputs), temporary, live, at)


def _fullest(module: Any) -> tuple[tuple[tuple[int, str], ...], str | None]:
    """Replay XLA's trace of the temporary buffer, and return its contents at the peak."""
    names = _operations(module)
    buffers = {each.id: each for each in module.buffer_assignment.logical_buffers}

    def made_by(number: int) -> str:
        defined = buffers[number].defined_at
        return str(names.get(defined.instruction_name) or names.get(defined.instruction_id) or defined.instruction_name)

    traces = module.buffer_assignment.heap_simulator_traces
    if not traces:
        return (), None
    events = max(traces, key=lambda each: len(each.events)).events
    live: dict[int, int] = {}
    total = most = 0
    fullest: dict[int, int] = {}
    at: int | None = None
    for event in events:
        if event.kind == event.ALLOC:
            live[event.buffer_id] = int(buffers[event.buffer_id].size)
            total += live[event.buffer_id]
        elif event.kind == event.FREE:
            total -= live.pop(event.buffer_id, 0)
        if total > most:
            most, fullest, at = total, dict(live), event.buffer_id
    found = tuple((size, made_by(number)) for number, size in fullest.items())
    return found, None if at is None else made_by(at)


def _operations(module: Any) -> dict[str | int, str]:
    """Return for each instruction, by name and by number, the operation that it comes from.

    Of a fusion it is the last one inside that says so; an instruction that XLA added counts as what it takes from.
    """
    inside = {computation.id: computation for computation in module.hlo_module.computations}
    names: dict[str | int, str] = {}
    for computation in module.hlo_module.computations:
        of_number: dict[int, str] = {}
        for instruction in computation.instructions:  # each after those it takes from
            called = [each for number in instruction.called_computation_ids for each in inside[number].instructions]
            said = [instruction.metadata.op_name, *(each.metadata.op_name for each in reversed(called))]
            taken = (of_number.get(number) for number in instruction.operand_ids)
            name = next((each for each in (*said, *taken) if each), "")
            of_number[instruction.id] = name
            names[instruction.name] = names[instruction.id] = name or instruction.name
    return names


def simulate(plan: Plan, variables: Any, batch: tuple[int, ...]) -> Heap:
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
    for step in range(2):
        heap.allocator.reset_peak()
        temporary = [heap.allocate(size) for size in plan.outputs[:1]]
        temporary.append(heap.allocate(plan.temporary))
        # What variables share (first fillings) is no longer the same once it was written: each gets its own.
        shared = [number for number, buffer in enumerate(buffers) if buffer.holders > 1] if step == 0 else []
        fresh = {number: heap.allocate(buffers[number].bytes, -1, number) for number in shared}
        temporary += [heap.allocate(size) for size in plan.outputs[1:]]
        for buffer in temporary:
            heap.let_go(buffer)
        for number, buffer in fresh.items():
            heap.let_go(buffers[number])
            buffers[number] = buffer
    return heap


def outcome(
    plan: Plan, variables: Any, batch: tuple[int, ...], layer_of: dict[int, str], attribution: Attribution
) -> Outcome:
    """Return the peak of the planned step, divided by category and layer.

    Args:
        plan: XLA's.
        variables: in the order in which they are made.
        batch: bytes of each tensor of the batch.
        layer_of: variable's number → layer.
        attribution: for the names in the plan.
    """
    heap = simulate(plan, variables, batch)
    allocator = heap.allocator
    total = allocator.peak
    limit = smallest_limit(heap.requests(), descending=True)
    shares = Shares()
    for number, variable in enumerate(variables):
        shares.add(variable.bytes, "optimizer" if variable.kind == "optimizer" else "weights", layer_of.get(number))
    shares.add(sum(batch), "inputs")
    requested = sum(shares.categories.values()) + plan.requested
    for size, name in plan.live:
        origin = attribution.origin(name)
        shares.add(size, CATEGORIES[origin.phase], origin.layer)
    shares.add(plan.requested - sum(size for size, _ in plan.live), "workspace")
    shares.fill(total)
    return Outcome(
        "xla", "xla", total, int(total * (1 - SPREAD["xla"])), int(max(total, limit) * (1 + SPREAD["xla"])),
        Pool(requested, total, allocator.reserved, None, limit),
        shares.categories, shares.layers,
        None if plan.at is None else attribution.instant(plan.at),
        notes=(f"XLA's buffer assignment for this machine's CPU asks for {plan.requested:,} B in a step",),
    )  # fmt: skip
