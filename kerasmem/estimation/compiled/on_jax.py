"""The training step on Keras's JAX backend, compiled: a function of shapes, of a model without weights."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from kerasmem.errors import KerasmemError, first_line
from kerasmem.estimation.compiled.hlo import assigned_bytes, live_buffers, operation_names, origin, peak_of
from kerasmem.estimation.compiled.planned import instant_of
from kerasmem.models.backend import import_keras
from kerasmem.models.symbolic_step import SymbolicStep
from kerasmem.processes.task import ChildFailure

_POLL_SECONDS = 0.05


def lower(step: SymbolicStep, device: Any) -> tuple[Any, dict[str, Any]]:
    """Lower a step for one device.

    Keras's trainer donates the state to a step that returns a new one; so does this.

    Args:
        step: the step.
        device: JAX's, or a description of one.

    Returns:
        The lowered step, and of its plan "arguments" (sizes in bytes by group) and "notes".

    Raises:
        ChildFailure: If JAX cannot trace the step.
    """
    import jax

    place = jax.sharding.SingleDeviceSharding(device)

    def shaped(tensor: Any) -> Any:
        dtype = jax.dtypes.canonicalize_dtype(tensor.dtype)
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype, sharding=place)

    state, data = import_keras().tree.map_structure(shaped, (step.state(), step.data))
    options = {} if step.keeps_state else {"donate_argnums": 0}
    try:
        lowered = jax.jit(step.function, **options).lower(state, data)
    except KerasmemError:
        raise
    except Exception as error:
        raise ChildFailure(f"the step cannot be traced on JAX: {type(error).__name__}: {first_line(error)}") from error
    groups = zip((*step.variables, "inputs"), (*state, data), strict=True)
    arguments = {name: [_bytes(leaf) for leaf in jax.tree.leaves(group)] for name, group in groups}
    return lowered, {"arguments": arguments, "notes": list(step.notes)}


def _bytes(spec: Any) -> int:
    return int(spec.dtype.itemsize * math.prod(spec.shape))


def dump_to(folder: str) -> dict[str, Any]:
    """Return the compiler's options with which it writes its texts into a folder."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def compile_lowered(lowered: Any, options: dict[str, Any], where: str) -> Any:
    """Compile a lowered step.

    Raises:
        ChildFailure: XLA refuses.
    """
    try:
        return lowered.compile(compiler_options=options)
    except Exception as error:
        raise ChildFailure(f"XLA does not compile the step for {where}: {first_line(error)}") from error


def compile_until_assigned(
    lowered: Any, options: dict[str, Any], where: str, folder: str
) -> tuple[str, dict[str, int]]:
    """Compile a lowered step until XLA has planned its memory; return the optimised module's text and the plan's bytes.

    What follows is machine code, which takes most of the time and changes nothing of the plan. No call stops XLA before
    it, so that goes on in a thread that ends with the process. Where XLA's dumps do not read as expected, it is waited
    for.

    Args:
        lowered: the step.
        options: of the compiler.
        where: for what, in words.
        folder: for XLA's dumps, empty; XLA goes on writing to it.

    Raises:
        ChildFailure: XLA refuses.
    """
    compiled: Future[Any] = Future()

    def compile_all() -> None:
        try:
            compiled.set_result(compile_lowered(lowered, {**dump_to(folder), **options}, where))
        except BaseException as error:
            compiled.set_exception(error)

    threading.Thread(target=compile_all, daemon=True).start()
    while not compiled.done():
        if texts := _texts_of_assignment(Path(folder)):
            module, assignment, usage = texts
            if (found := assigned_bytes(assignment, usage)) is not None:
                return module, found
            break
        wait([compiled], _POLL_SECONDS)
    whole = compiled.result()
    return whole.as_text(), planned_bytes(whole)


def _texts_of_assignment(folder: Path) -> list[str] | None:
    """Return the dumps of an optimised module and of its memory, once XLA has written the last of them."""
    endings = ("", "-buffer-assignment", "-memory-usage-report")
    found = [sorted(folder.glob(f"*_after_optimizations{ending}.txt")) for ending in endings]
    following = sorted(folder.glob("*.debug_options"))
    return [each[0].read_text() for each in found] if all((*found, following)) else None


def planned_bytes(compiled: Any) -> dict[str, int]:
    """Return the bytes of the step's arguments, of what it returns, of what both share, and of all in between."""
    memory = compiled.memory_analysis()
    return {name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}


def at_peak(module: str, folder: str, step: SymbolicStep) -> dict[str, Any]:
    """Return what lives at the peak and when that is; nothing where XLA's dumps do not read as expected.

    Args:
        module: the compiled step's text.
        folder: where XLA wrote its dumps.
        step: the step.
    """
    dumps = sorted(Path(folder).glob("*live-range.txt"), key=lambda path: path.stat().st_size)
    instruction, live = peak_of(dumps[-1].read_text()) if dumps else (None, ())
    names = operation_names(module)
    operation = names.get(instruction or "")
    instant = None
    if operation is not None:
        instant = vars(instant_of(operation, *origin(operation, step.layers, step.optimizer)))
    return {"live": [vars(each) for each in live_buffers(live, names, step.layers, step.optimizer)], "instant": instant}
