"""`profile`: one real step, recorded in a process of its own, and divided by layer and category."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kerasmem.errors import KerasmemError
from kerasmem.estimation.arguments import DEFAULT_BATCH_SIZE
from kerasmem.estimation.cache import cached_estimate
from kerasmem.estimation.facade import estimate
from kerasmem.estimation.measuring import planned_request
from kerasmem.estimation.probe.running import DEFAULT_TIMEOUT, ask_worker
from kerasmem.estimation.report import MemoryReport
from kerasmem.profiling.results import StepProfile

WORKER = "kerasmem.estimation.profile.worker"
DEFAULT_STEPS = 5


def profile(
    model: Any,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    steps: int = DEFAULT_STEPS,
    timeout: float = DEFAULT_TIMEOUT,
    optimizer: str | None = None,
    loss: str | None = None,
    jit_compile: bool | str = "auto",
    mode: str = "train",
    dtype_policy: str | None = None,
    input_shape: Any = None,
    **options: Any,
) -> StepProfile:
    """Return what one real step of a model's training holds in memory at its peak, by layer and category.

    The process has real weights, a batch of zeros, and the GPU's allocator where the machine has a GPU; otherwise the
    same allocator for the CPU. TensorFlow's profiler records every allocation from the process's start on. In graph
    mode operations run in parallel, so that identical steps differ: the step with the median peak is the one shown.

    Args:
        model: as for `kerasmem.estimate`; a function or class must be importable from another process.
        batch_size: samples in a batch.
        steps: steps that are recorded, after those that warm up.
        timeout: seconds for the whole process.
        optimizer: a Keras optimizer's name in place of the model's own.
        loss: a loss's name in place of the model's own.
        jit_compile: whether XLA compiles the step; "auto" as Keras does.
        mode: "train", "evaluate" or "inference".
        dtype_policy: a Keras dtype policy in place of the model's own.
        input_shape: open dimensions of the inputs, without the batch.
        **options: the other arguments of `kerasmem.estimate`: `device`, `factory`, `factory_args`,
            `custom_objects`, `trust`.

    Raises:
        UsageError: an argument is wrong, or the model exists in this process only.
        ModelError: a step failed, or ran out of memory.
        KerasmemError: the process gave no answer in time, or was ended by the system.

    Example:
        >>> profile("keras.applications:MobileNetV2", batch_size=8).named_share > 0.95  # doctest: +SKIP
        True
    """
    options.update(
        optimizer=optimizer, loss=loss, jit_compile=jit_compile, mode=mode, dtype_policy=dtype_policy,
        input_shape=input_shape,
    )  # fmt: skip
    with planned_request(model, batch_size, steps, options) as (planned, request):
        data = {
            "request": request.to_dict(),
            "runs": [{"batch_size": request.batch_size, "steps": steps}],
            "planned": planned.to_dict(),
        }
        return StepProfile.from_dict(ask_worker(WORKER, data, timeout=timeout))


def predicted(
    model: Any, profile: StepProfile, *, is_cached: bool = True, **arguments: Any
) -> tuple[MemoryReport | None, str | None]:
    """Return the estimate of the step that was profiled, by the method that models how it ran, or why there is none.

    Args:
        model: as for `profile`.
        profile: what was measured.
        is_cached: whether an earlier answer will do.
        **arguments: those of `kerasmem.estimate` that `profile` was given.
    """
    ask = cached_estimate if is_cached else estimate
    method = "xla" if profile.settings.execution == "xla" else "graph"
    try:
        return with_names_of(ask(model, method=method, **arguments), profile), None
    except KerasmemError as error:
        return None, str(error)


def with_names_of(estimate: MemoryReport, profile: StepProfile) -> MemoryReport:
    """Return the estimate with the layers' names in the profile, where they are the same layers in the same order.

    Code that builds a model twice in one process gets other names for layers that it does not name itself.
    """
    own, theirs = estimate.layers, profile.layers
    if [(row.class_name, row.output_shape) for row in own] != [(row.class_name, row.output_shape) for row in theirs]:
        return estimate
    return replace(
        estimate, layers=tuple(replace(row, name=other.name) for row, other in zip(own, theirs, strict=True))
    )
