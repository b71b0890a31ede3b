"""`measure` and `profile`: real training steps in a subprocess, read from TensorFlow's allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kerasmem import checks
from kerasmem.checks import Method
from kerasmem.errors import KerasmemError
from kerasmem.estimation.arguments import DEFAULT_BATCH_SIZE
from kerasmem.estimation.choice import check_backend
from kerasmem.estimation.facade import estimate
from kerasmem.estimation.probe.running import DEFAULT_TIMEOUT, MeasuredSteps, ask_worker, measured_notes, run_steps
from kerasmem.estimation.report import Bytes, MemoryReport, Pool
from kerasmem.estimation.verdict import device_verdict
from kerasmem.models.backend import require_tensorflow
from kerasmem.models.request import ModelRequest, request_for
from kerasmem.profiling.results import StepProfile

PROFILE_WORKER = "kerasmem.estimation.probe.profile_worker"


def measure(
    model: Any,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    steps: int = 10,
    timeout: float = DEFAULT_TIMEOUT,
    **options: Any,
) -> MemoryReport:
    """Return how much memory training a model takes, by running some steps of it in a process of its own.

    The process has real weights, a batch of zeros, and the GPU's allocator where the machine has a GPU; otherwise the
    same allocator for the CPU. The report has the layout of an estimate: `bytes.total` is the median of the steps'
    peaks in use, `low` and `high` the least and the most of them; graph mode runs operations in parallel, so that
    identical steps differ.

    Args:
        model: as for `kerasmem.estimate`; a function or class must be importable from another process.
        batch_size: samples in a batch.
        steps: steps that are measured, after a first one that sets things up.
        timeout: seconds for the whole process.
        **options: arguments of `kerasmem.estimate`: `optimizer`, `loss`, `jit_compile`, `mode`, `dtype_policy`,
            `device`, `input_shape`, `target_shape`, `target_dtype`, `factory`, `factory_args`, `custom_objects`,
            `trust`.

    Raises:
        UsageError: an argument is wrong, or the model exists in this process only.
        ModelError: a step failed, or ran out of memory.
        KerasmemError: the process gave no answer in time, or was ended by the system.

    Examples:
        >>> import kerasmem
        >>> kerasmem.measure("keras.applications:MobileNetV2", batch_size=8).settings.method  # doctest: +SKIP
        'measure'
    """
    with planned_request(model, batch_size, steps, options) as (planned, request):
        answer = run_steps(request, [(request.batch_size, steps)], timeout=timeout)
    return measured_report(planned, answer)


@contextlib.contextmanager
def planned_request(
    model: Any, batch_size: int, steps: int, options: Mapping[str, Any]
) -> Iterator[tuple[MemoryReport, ModelRequest]]:
    """Return the formula's report of a step that is to be run, and the request for a process that runs it.

    Args:
        model: as for `measure`.
        batch_size: samples; where the model fixes its own, the request has that one.
        steps: that are to be run.
        options: arguments of `kerasmem.estimate`.

    Raises:
        UsageError: an argument is wrong, or the model exists in this process only.
    """
    checks.whole("steps", steps)
    check_backend("measure", options.get("jit_compile", "auto"))
    planned = estimate(model, batch_size=batch_size, method="formula", **options)
    own = {name: value for name, value in options.items() if name != "device"}
    with request_for(model, batch_size=planned.settings.batch_size, **own) as request:
        yield planned, request


def measured_report(planned: MemoryReport, answer: MeasuredSteps) -> MemoryReport:
    """Return the report of an estimate with measured bytes in place of estimated ones."""
    run = answer.runs[0]
    low, high = min(run.peaks), max(run.peaks)
    need = Bytes(run.median, low, high, planned.bytes.weights, answer.optimizer, inputs=run.inputs)
    what = (
        f"{len(run.peaks)} steps of {run.seconds:.2g} s after a first one that had its peak at {run.first:,} B; "
        f"{run.before:,} B were in use before them"
    )
    return replace(
        planned,
        settings=replace(planned.settings, method="measure", execution=answer.execution),
        bytes=need,
        layers=tuple(replace(row, bytes=None) for row in planned.layers),
        device=None if planned.device is None else device_verdict(planned.device, need),
        unmodelled=(),
        notes=measured_notes(answer.device, what, *answer.notes, way=answer.way),
        pool=Pool(requested=None, in_use=run.median, reserved=None),
        instant=None,
    )


def profile(
    model: Any,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    steps: int = 5,
    timeout: float = DEFAULT_TIMEOUT,
    **options: Any,
) -> StepProfile:
    """Profile the memory of one real training step at its peak, by layer and category.

    The process has real weights, a batch of zeros, and the GPU's allocator where the machine has a GPU; otherwise the
    same allocator for the CPU. TensorFlow's profiler records every allocation from the process's start on. In graph
    mode operations run in parallel, so that identical steps differ: the step with the median peak is the one shown.

    Args:
        model: as for `kerasmem.estimate`; a function or class must be importable from another process.
        batch_size: samples in a batch.
        steps: steps that are recorded, after those that warm up.
        timeout: seconds for the whole process.
        **options: the other arguments of `measure`; `mode` may be "evaluate", too.

    Raises:
        UsageError: an argument is wrong, or the model exists in this process only.
        ModelError: a step failed, or ran out of memory.
        KerasmemError: the process gave no answer in time, or was ended by the system.

    Examples:
        >>> profile("keras.applications:MobileNetV2", batch_size=8).named_share > 0.95  # doctest: +SKIP
        True
    """
    require_tensorflow("profile", "estimate and measure work on JAX")
    with planned_request(model, batch_size, steps, options) as (planned, request):
        more = {"planned": planned.to_dict()}
        found = ask_worker(PROFILE_WORKER, request, [(request.batch_size, steps)], more, timeout=timeout)
        return StepProfile.from_dict(found)


def predicted(model: Any, profile: StepProfile, **arguments: Any) -> tuple[MemoryReport | None, str | None]:
    """Return the estimate of the step that was profiled, by the method that models how it ran, or why there is none.

    Args:
        model: as for `profile`.
        profile: what was measured.
        **arguments: those of `kerasmem.estimate` that `profile` was given.
    """
    method: Method = "xla" if profile.settings.execution == "xla" else "graph"
    try:
        return with_names_of(estimate(model, method=method, **arguments), profile), None
    except KerasmemError as error:
        return None, str(error)


def with_names_of(estimate: MemoryReport, profile: StepProfile) -> MemoryReport:
    """Return the estimate with the profile's names of layers, if both have the same layers in the same order.

    Code that builds a model twice in one process gets other names for layers that it does not name itself.
    """
    own, theirs = estimate.layers, profile.layers
    if [(row.class_name, row.output_shape) for row in own] != [(row.class_name, row.output_shape) for row in theirs]:
        return estimate
    return replace(
        estimate, layers=tuple(replace(row, name=other.name) for row, other in zip(own, theirs, strict=True))
    )
