"""Which method answers for one of several devices, and how it is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

from kerasmem.errors import UsageError
from kerasmem.estimation.outcome import Outcome
from kerasmem.estimation.parallel.parallelism import Parallelism
from kerasmem.models.request import ModelRequest

SHARDED_METHOD = "xla"
WHY = "Keras divides weights and slots on JAX alone, which compiles with XLA"


def check_method(method: str, asked: Parallelism | None) -> None:
    """Refuse a method that cannot answer.

    Raises:
        UsageError: it knows nothing of weights or slots in shards.
    """
    if asked is not None and asked.is_sharded and method not in ("auto", SHARDED_METHOD):
        raise UsageError(f"method {method!r} looks at one device with the whole model: {WHY}; take xla, or auto")


def one_of_several(
    method: str,
    asked: Parallelism,
    mode: str,
    alone: Callable[[], Outcome],
    request: AbstractContextManager[ModelRequest],
    rows: Collection[str],
    weights: Mapping[str, Sequence[tuple[int, str | None]]],
) -> Outcome:
    """Return what a method finds for one of several devices.

    Args:
        method: "graph", "xla", "gpu-target" or "probe".
        asked: how many devices, and what is divided.
        mode: "train", "evaluate" or "inference".
        alone: asks the method as if there were one device, with its share of the batch.
        request: the model with the batch of all devices.
        rows: names of the layers in the report.
        weights: for "trainable" and "non_trainable" each weight's bytes and row, in the model's order.

    Raises:
        KerasmemError: it has no answer; the message says why.
    """
    check_method(method, asked)
    if method == SHARDED_METHOD:
        from kerasmem.estimation.parallel.plan import device_outcome, device_plan

        with request as described:
            return device_outcome(device_plan(described, asked), asked, rows, weights)
    if mode != "train":
        return alone()
    from kerasmem.estimation.parallel.exchange import gradients_exchanged, not_exchanged, with_exchange

    if method != "graph":
        return not_exchanged(alone())
    with gradients_exchanged(asked.replicas) as exchanged:
        found = alone()
    return with_exchange(found, asked.replicas, exchanged)
