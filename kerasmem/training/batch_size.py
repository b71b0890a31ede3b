"""Batch sizes that fit: `kerasmem.find_executable_batch_size` tries them, `kerasmem.require_fit` estimates one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from kerasmem import checks
from kerasmem.devices.training_devices import allocator_limit, training_memory
from kerasmem.diagnosis.explaining import read_exception
from kerasmem.errors import DoesNotFitError, ModelError, UsageError, warn_user
from kerasmem.estimation.estimating import estimate
from kerasmem.estimation.report import DOES_NOT_FIT, MemoryReport
from kerasmem.models.freeing import collect, drop_frames
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.spec import DEFAULT_BATCH_SIZE
from kerasmem.training.isolation import run_isolated
from kerasmem.units import format_size


def find_executable_batch_size(
    function: Callable[..., Any] | None = None, *, starting_batch_size: int = 128, isolated: bool = False
) -> Callable[..., Any]:
    """Decorate a function to retry with half the batch size whenever memory runs out.

    The batch size is the function's first argument, which callers leave out. The function must start over each time and
    build its model inside: changes outside of it are not undone. The memory of a failed try is freed before the next.
    Other exceptions pass through.

    If memory runs out under XLA, the process cannot be trusted, so there is no retry. With `isolated=True` each try
    runs in a separate process (`kerasmem.run_isolated`).

    Args:
        function: a function with the batch size as its first argument.
        starting_batch_size: samples in the first try. Defaults to 128.
        isolated: run each try in a separate process; the function must then return plain values, arrays or a Keras
            model. Defaults to False.

    Returns:
        The function without its first argument.

    Raises:
        UsageError: If the function takes no argument or is called with a batch size, or `starting_batch_size` is wrong.

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
        raise UsageError(f"find_executable_batch_size: {_name(function)}() must take the batch size as first argument")

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if parameters[0] in named or len(arguments) >= len(parameters):
            raise UsageError(f"{_name(function)}: leave {parameters[0]} out; find_executable_batch_size chooses it")
        size = starting_batch_size
        while True:
            summary, value = _try(functools.partial(function, size, *arguments, **named), isolated)
            if summary is None:
                return value
            if size == 1:
                raise ModelError(f"{_name(function)}: not even a batch of 1 fits: {summary}")
            text = f"a batch of {size} ran out of memory ({summary.rstrip('.')}); retrying with {size // 2}"
            warn_user(f"{_name(function)}: {text}", RuntimeWarning)
            size //= 2

    return call


def _try(function: Callable[[], Any], isolated: bool) -> tuple[str | None, Any]:
    """Call the function and return None and its value, or the summary if memory ran out."""
    if isolated:
        run = run_isolated(function)
        ran_out = run.out_of_memory or run.killed
        return (run.reason or "memory ran out", None) if ran_out else (None, run.get())
    try:
        return None, function()
    except Exception as error:
        diagnosis = read_exception(error)
        if not diagnosis.out_of_memory:
            raise
        if diagnosis.family == "xla":
            raise ModelError(
                f"{diagnosis.summary} Under XLA a failed step destroys the weights; use "
                "find_executable_batch_size(isolated=True), with a process for each try"
            ) from error
        drop_frames(error)
    collect()
    return diagnosis.summary, None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "the function")


def require_fit(
    model: Any, *, batch_size: int = DEFAULT_BATCH_SIZE, device: str | int | None = None, **options: Any
) -> MemoryReport:
    """Estimate a model before it trains, and raise an error if it cannot fit.

    Args:
        model: as for `kerasmem.estimate`.
        batch_size: samples per batch. Defaults to 32.
        device: a card ("t4") or a size ("16GB", or bytes). Defaults to the memory available to TensorFlow here.
        **options: other arguments of `kerasmem.estimate`.

    Returns:
        The `MemoryReport`. The verdict "too close to call" raises no error.

    Raises:
        DoesNotFitError: If the lower end of the estimate is more than the device has.
        KerasmemError: If `kerasmem.estimate` raises one.

    Examples:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(100_000)])
        >>> model.compile("adam", "mse")
        >>> kerasmem.require_fit(model, device="8MB")
        Traceback (most recent call last):
        ...
        kerasmem.errors.DoesNotFitError: model ... at batch 32 needs ... by the estimate (...), of 7.63 MiB available
    """
    available = _available(model) if device is None else device
    report = estimate(model, batch_size=batch_size, device=available, **options)
    if report.device is not None and report.device.verdict == DOES_NOT_FIT:
        raise DoesNotFitError(
            f"model {report.model.name!r} at batch {batch_size:,} needs {format_size(report.bytes.total)} by the "
            f"estimate ({report.settings.method}), of {format_size(report.device.available_bytes)} available"
        )
    return report


def _available(model: Any) -> int:
    """Return the bytes available to TensorFlow here, including those in use by the model."""
    limit = allocator_limit()
    if limit is not None:
        return limit
    optimizer_variables = getattr(getattr(model, "optimizer", None), "variables", None) or ()
    variables = [*getattr(model, "variables", ()), *optimizer_variables]
    in_use = sum({id(variable): variable_bytes(variable) for variable in variables}.values())  # part of the estimate
    return training_memory() + in_use
