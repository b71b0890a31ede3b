"""A batch size that fits: for loops of one's own by trial, for `kerasmem.fit` by the estimate."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

from kerasmem import checks
from kerasmem.checks import Method
from kerasmem.diagnosis.explaining import read_exception
from kerasmem.errors import KerasmemError, ModelError, UsageError
from kerasmem.models.freeing import collect, drop_frames
from kerasmem.training.isolation import run_isolated

MAX = "max"


def find_executable_batch_size(
    function: Callable[..., Any] | None = None, *, starting_batch_size: int = 128, isolated: bool = False
) -> Callable[..., Any]:
    """Decorate a function so that it is called with half the batch size each time that memory runs out.

    The batch size is the function's first argument, which callers leave out. The function must start over each time and
    build its model inside: changes outside of it are not undone. The memory of a failed try is freed before the next.
    Other exceptions pass through.

    After an out-of-memory under XLA the process cannot be trusted, so it is not retried; with `isolated=True` each try
    runs in a process of its own (`kerasmem.run_isolated`).

    Args:
        function: a function with the batch size as its first argument.
        starting_batch_size: samples in the first try. Defaults to 128.
        isolated: run each try in a process of its own; the function must then return plain values, arrays or a Keras
            model. Defaults to False.

    Returns:
        The function without its first argument.

    Raises:
        UsageError: If it is called with a batch size, or takes none; or `starting_batch_size` is wrong.

    Examples:
        >>> from kerasmem import find_executable_batch_size
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size, epochs):
        ...     if batch_size > 16:
        ...         raise MemoryError
        ...     return batch_size, epochs
        >>> train(epochs=3)
        (16, 3)
    """
    if function is None:
        return functools.partial(find_executable_batch_size, starting_batch_size=starting_batch_size, isolated=isolated)
    checks.whole("starting_batch_size", starting_batch_size)
    parameters = list(inspect.signature(function).parameters)
    if not parameters:
        raise UsageError(f"find_executable_batch_size: {_name(function)}() takes no batch size as its first argument")

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if parameters[0] in named or len(arguments) >= len(parameters):
            raise UsageError(f"{_name(function)}: leave {parameters[0]} out, it is found by find_executable_batch_size")
        size = starting_batch_size
        while True:
            summary, value = _tried(functools.partial(function, size, *arguments, **named), isolated)
            if summary is None:
                return value
            if size == 1:
                raise ModelError(f"{_name(function)}: not even a batch of 1 fits: {summary}")
            warnings.warn(
                f"{_name(function)}: a batch of {size} ran out of memory ({summary.rstrip('.')}); {size // 2} is tried",
                RuntimeWarning,
                stacklevel=2,
            )
            size //= 2

    return call


def _tried(function: Callable[[], Any], isolated: bool) -> tuple[str | None, Any]:
    """Call the function; return the summary of an out-of-memory, or None and the value."""
    if isolated:
        run = run_isolated(function)
        return (run.reason or "memory ran out", None) if run.out_of_memory else (None, run.get())
    try:
        return None, function()
    except Exception as error:
        found = read_exception(error)
        if not found.out_of_memory:
            raise
        if found.family == "xla":
            raise ModelError(
                f"{found.summary} Under XLA a failed step takes the weights with it, so that nothing in this "
                "process can be tried again: find_executable_batch_size(isolated=True) runs each try in one of its own"
            ) from error
        drop_frames(error)
    collect()
    return found.summary, None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "the function")


def largest_batch_size(model: Any, arguments: dict[str, Any]) -> int:
    """Return the largest batch of arrays that fits beside them by the estimate.

    Args:
        model: compiled; the variables that its first step would make are made.
        arguments: of `model.fit`, by name.

    Raises:
        UsageError: If the data is not arrays, or the estimator has no answer.
    """
    import keras
    import tensorflow as tf

    from kerasmem.devices.room import bytes_in_use, room_for_training
    from kerasmem.estimation.sizing import max_batch_size
    from kerasmem.training.array_source import keras_array
    from kerasmem.training.model_state import byte_count, read_state
    from kerasmem.training.steps.batches import map_arrays
    from kerasmem.training.steps.engine import build_step

    data = keras.utils.pack_x_y_sample_weight(*(arguments.get(name) for name in ("x", "y", "sample_weight")))
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    if not leaves or any(not hasattr(leaf, "__array__") or not getattr(leaf, "shape", ()) for leaf in leaves):
        raise UsageError("batch_size: 'max' is for arrays; other data comes in batches already")
    first = map_arrays(lambda leaf: keras_array(leaf[:1]), data)
    build_step(model, map_arrays(tf.convert_to_tensor, first))
    rows = len(leaves[0]) - math.ceil(len(leaves[0]) * (arguments.get("validation_split") or 0.0))
    copy = len(leaves[0]) * byte_count({"data": keras.tree.flatten(first)})  # of the arrays, which `fit` holds
    other = max(0, (bytes_in_use() or 0) - byte_count(read_state(model)))
    method: Method = "auto" if model.jit_compile else "graph"
    room = max(room_for_training() - copy - other, 1)
    try:
        size = max_batch_size(model, device=room, maximum=rows, method=method).largest
    except KerasmemError as error:
        raise UsageError(f"batch_size: 'max': the estimator has no answer ({error}); give a number") from error
    if not size:
        raise UsageError("batch_size: 'max': not even one row fits by the estimate; see kerasmem.advise")
    return size
