"""What the processes that compile share: the step in JAX's terms, compiled, and its plan as plain data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kerasmem.errors import KerasmemError
from kerasmem.estimation.compiled.hlo import live_buffers, operation_names, origin, peak_of
from kerasmem.estimation.compiled.planned import instant_of
from kerasmem.estimation.compiled.step import JaxStep
from kerasmem.processes.task import ChildFailure


def shaped(tensor: Any, sharding: Any) -> Any:
    """Return the shape and dtype that JAX gives a Keras tensor, placed on its device or devices."""
    import jax

    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax.dtypes.canonicalize_dtype(tensor.dtype), sharding=sharding)


def lower(step: JaxStep, state: Any, data: Any, way_out: str = "", **options: Any) -> Any:
    """Return the step in the compiler's language; its state is given up to it where it makes a new one.

    Args:
        step: the step.
        state: its variables' shapes, placed.
        data: the batch's, placed.
        way_out: what a user can do where JAX cannot trace the step.
        **options: of `jax.jit`, for a step that makes a new state.

    Raises:
        ChildFailure: the step cannot be traced on JAX.
    """
    import jax

    options = {} if step.keeps_state else {"donate_argnums": 0, **options}
    try:
        return jax.jit(step.function, **options).lower(state, data)
    except KerasmemError:
        raise
    except Exception as error:
        reason = f"the step cannot be traced on JAX: {type(error).__name__}: {first_line(error)}{way_out}"
        raise ChildFailure(reason) from error


def argument_bytes(step: JaxStep, state: Any, data: Any, bytes_of: Callable[[Any], int]) -> dict[str, list[int]]:
    """Return the sizes of the step's arguments on a device, by group."""
    import jax

    groups = zip((*step.groups, "inputs"), (*state, data), strict=True)
    return {name: [bytes_of(leaf) for leaf in jax.tree.leaves(group)] for name, group in groups}


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


def planned_bytes(compiled: Any) -> dict[str, int]:
    """Return the bytes of the step's arguments, of what it returns, of what both share, and of all in between."""
    memory = compiled.memory_analysis()
    return {name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}


def at_peak(module: str, folder: str, step: JaxStep) -> dict[str, Any]:
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


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
