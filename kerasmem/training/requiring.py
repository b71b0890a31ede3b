"""`kerasmem.require_fit`: refuse a model that cannot fit, before it trains."""

from __future__ import annotations

from typing import Any

from kerasmem.devices.catalogue import resolve_device
from kerasmem.devices.training_device import allocator_limit, training_memory
from kerasmem.errors import DoesNotFitError
from kerasmem.estimation.facade import estimate
from kerasmem.estimation.report import DOES_NOT_FIT, MemoryReport
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.spec import DEFAULT_BATCH_SIZE
from kerasmem.models.training import optimizer_slot_bytes, training_of_model
from kerasmem.units import format_size


def require_fit(
    model: Any, *, batch_size: int = DEFAULT_BATCH_SIZE, device: str | int | None = None, **options: Any
) -> MemoryReport:
    """Estimate a model before it trains, and raise an error if it cannot fit.

    Args:
        model: as for `kerasmem.estimate`.
        batch_size: samples in a batch. Defaults to 32.
        device: a card ("t4") or a size ("16GB", or bytes). Defaults to the memory available to TensorFlow here.
        **options: other arguments of `kerasmem.estimate`.

    Returns:
        The `MemoryReport`. The verdict "too close to call" raises no error.

    Raises:
        DoesNotFitError: If the lower end of the estimate is more than the device has.
        KerasmemError: As `kerasmem.estimate`.

    Examples:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(100_000)])
        >>> model.compile("adam", "mse")
        >>> kerasmem.require_fit(model, device="8MB")
        Traceback (most recent call last):
        ...
        kerasmem.errors.DoesNotFitError: model ...: its weights and its optimizer alone take 10.3 MiB, and there are ...
    """
    room = _memory_for(model) if device is None else resolve_device(str(device)).available_bytes
    held = _held(model) if options.get("mode", "train") == "train" else 0
    if held > room:  # no step need be traced for it
        raise DoesNotFitError(
            f"model {model.name!r}: its weights and its optimizer alone take {format_size(held)}, and there are "
            f"{format_size(room)}"
        )
    if getattr(model, "jit_compile", None) is False:
        # Asked for "auto", XLA would be, too: each compilation leaves memory behind, and may end a process whose CPU
        # allocator has a limit.
        options.setdefault("method", "graph")
    report = estimate(model, batch_size=batch_size, device=room if device is None else device, **options)
    found = report.device
    if found is not None and found.verdict == DOES_NOT_FIT:
        raise DoesNotFitError(
            f"model {report.model.name!r} at batch {batch_size:,} takes {format_size(report.bytes.total)} by the "
            f"estimate ({report.settings.method}), and there are {format_size(found.available_bytes)}"
        )
    return report


def _held(model: Any) -> int:
    """Return the bytes of weights and optimizer, or 0 before the model is built."""
    if not getattr(model, "built", False) or not hasattr(model, "variables"):
        return 0
    slots = optimizer_slot_bytes(training_of_model(model), model.trainable_variables)
    return sum(variable_bytes(each) for each in model.variables) + (slots or 0)


def _memory_for(model: Any) -> int:
    """Return the bytes available to TensorFlow here, including those in use by the model."""
    limit = allocator_limit()
    if limit is not None:
        return limit
    parts = [*getattr(model, "variables", ()), *(getattr(getattr(model, "optimizer", None), "variables", None) or ())]
    own = sum({id(each): variable_bytes(each) for each in parts}.values())  # it is no longer free, and in the estimate
    return training_memory() + own
