"""`measure` and `profile`: real training steps in a subprocess, read from TensorFlow's allocator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from typing_extensions import Unpack

from kerasmem import checks
from kerasmem.errors import UsageError
from kerasmem.estimation.estimating import estimate_spec
from kerasmem.estimation.methods import backend_refusal
from kerasmem.estimation.probe.profile_worker import profiled_step
from kerasmem.estimation.probe.running import DEFAULT_TIMEOUT, call_with_steps, measured_notes, run_steps
from kerasmem.estimation.report import Bytes, MemoryReport, Pool, device_verdict
from kerasmem.models.backend import require_tensorflow
from kerasmem.models.spec import EstimateSettings, StepSpec, shows_settings
from kerasmem.profiling.results import StepProfile


@shows_settings("method", "replicas")
def measure(
    model: Any, *, steps: int = 10, timeout: float = DEFAULT_TIMEOUT, **settings: Unpack[EstimateSettings]
) -> MemoryReport:
    """Return how much memory training a model takes, by running some steps of it in a process of its own.

    The process has real weights, a batch of zeros, and the GPU's allocator where the machine has a GPU; otherwise the
    same allocator for the CPU. The report has the layout of an estimate: `bytes.total` is the median of the steps'
    peaks in use, `low` and `high` the least and the most of them; graph mode runs operations in parallel, so that
    identical steps differ.

    Args:
        model: as for `kerasmem.estimate`.
        steps: steps that are measured, after a first one that sets things up.
        timeout: seconds for the whole process.
        **settings: as for `kerasmem.estimate` but for `method` and `replicas`.

    Raises:
        UsageError: an argument is wrong, or the model cannot be sent to another process.
        ModelError: a step failed, or ran out of memory.
        KerasmemError: the process gave no answer in time, or was ended by the system.

    Examples:
        >>> import kerasmem
        >>> kerasmem.measure("keras.applications:MobileNetV2", batch_size=8).settings.method  # doctest: +SKIP
        'measure'
    """
    planned, spec = planned_step(StepSpec(model, **settings), steps)
    run = run_steps(spec, spec.batch_size, steps, timeout=timeout)
    need = Bytes(run.median, min(run.peaks), max(run.peaks), planned.bytes.weights, run.optimizer, inputs=run.inputs)
    ran = f"{len(run.peaks)} steps of {run.seconds:.2g} s after a first one that had its peak at {run.first:,} B"
    return replace(
        planned,
        settings=replace(planned.settings, method="measure", execution=run.execution),
        bytes=need,
        layers=tuple(replace(row, bytes=None) for row in planned.layers),
        device=None if planned.device is None else device_verdict(planned.device, need),
        unmodelled=(),
        notes=measured_notes(run.device, ran, *run.notes, way=run.way),
        pool=Pool(requested=None, in_use=run.median, reserved=None),
        instant=None,
    )


def planned_step(spec: StepSpec, steps: int) -> tuple[MemoryReport, StepSpec]:
    """Return the formula's report of a step that is to be run, and the spec for the process that runs it.

    Args:
        spec: the step; if the model fixes its own batch size, the spec for the process has that one.
        steps: number of steps to run.

    Raises:
        UsageError: an argument is wrong, or the model cannot be sent to another process.
    """
    checks.whole("steps", steps)
    if spec.method != "auto" or spec.replicas != 1:
        raise UsageError("method and replicas are for kerasmem.estimate; here real steps run on one device")
    if (reason := backend_refusal("measure", spec.jit_compile)) is not None:
        raise UsageError(reason)
    planned = estimate_spec(replace(spec, method="formula"))
    return planned, spec.portable(batch_size=planned.settings.batch_size)


@shows_settings("method", "replicas")
def profile(
    model: Any, *, steps: int = 5, timeout: float = DEFAULT_TIMEOUT, **settings: Unpack[EstimateSettings]
) -> StepProfile:
    """Profile the memory of one real training step at its peak, by layer and category.

    The process has real weights, a batch of zeros, and the GPU's allocator where the machine has a GPU; otherwise the
    same allocator for the CPU. TensorFlow's profiler records every allocation from the process's start on. In graph
    mode operations run in parallel, so that identical steps differ: the step with the median peak is the one shown.

    Args:
        model: as for `kerasmem.estimate`.
        steps: steps that are recorded, after those that warm up.
        timeout: seconds for the whole process.
        **settings: as for `measure`; `mode` may be "evaluate", too.

    Raises:
        UsageError: an argument is wrong, or the model cannot be sent to another process.
        ModelError: a step failed, or ran out of memory.
        KerasmemError: the process gave no answer in time, or was ended by the system.

    Examples:
        >>> profile("keras.applications:MobileNetV2", batch_size=8).named_share > 0.95  # doctest: +SKIP
        True
    """
    require_tensorflow("profile", "estimate and measure work on JAX")
    planned, spec = planned_step(StepSpec(model, **settings), steps)
    runs = [(spec.batch_size, steps, spec.mode)]
    result: StepProfile = call_with_steps(profiled_step, spec, runs, planned, timeout=timeout)
    return result
