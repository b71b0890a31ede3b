"""`kerasmem.require_fit`: refuse a model that cannot fit, before it trains."""

from __future__ import annotations

from typing import Any

from kerasmem.devices.training_devices import allocator_limit, training_memory
from kerasmem.errors import DoesNotFitError
from kerasmem.estimation.estimating import estimate
from kerasmem.estimation.report import DOES_NOT_FIT, MemoryReport
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.spec import DEFAULT_BATCH_SIZE
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
        kerasmem.errors.DoesNotFitError: model ... at batch 32 takes ... by the estimate (...), and there are 7.63 MiB
    """
    available = _available(model) if device is None else device
    report = estimate(model, batch_size=batch_size, device=available, **options)
    if report.device is not None and report.device.verdict == DOES_NOT_FIT:
        raise DoesNotFitError(
            f"model {report.model.name!r} at batch {batch_size:,} takes {format_size(report.bytes.total)} by the "
            f"estimate ({report.settings.method}), and there are {format_size(report.device.available_bytes)}"
        )
    return report


def _available(model: Any) -> int:
    """Return the bytes available to TensorFlow here, including those in use by the model."""
    limit = allocator_limit()
    if limit is not None:
        return limit
    parts = [*getattr(model, "variables", ()), *(getattr(getattr(model, "optimizer", None), "variables", None) or ())]
    own = sum({id(each): variable_bytes(each) for each in parts}.values())  # it is no longer free, and in the estimate
    return training_memory() + own
