"""The probe method and batch size trials: real steps under limits."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from kerasmem.devices.host import available_memory
from kerasmem.devices.kernels import kernel_variables
from kerasmem.errors import KerasmemError, OutOfMemoryError, UsageError
from kerasmem.estimation.real_steps import MeasuredSteps, real_steps
from kerasmem.estimation.report import SPREAD, Outcome, Pool
from kerasmem.estimation.search import Trial
from kerasmem.models.backend import runs_on_jax
from kerasmem.models.spec import StepSpec
from kerasmem.processes.children import ChildFailure, Limits, child_environment
from kerasmem.processes.forking import run_child

DEFAULT_TIMEOUT = 600.0
LEAST_BATCH = 8
PROBED_STEPS = 10
_SECONDS_A_RUN = 30.0
_SHARE_OF_HOST = 0.95  # of the memory available to this job; beyond that the host would swap
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
# On JAX glibc maps blocks of 64 KiB and more, and unmaps them when they are freed, so that resident memory is in use.
# A program from JAX's cache on disk would differ from the measured one.
_ON_JAX = {**_QUIET, "MALLOC_MMAP_THRESHOLD_": "65536", "JAX_ENABLE_COMPILATION_CACHE": "false"}
_LESS = "use a smaller batch, or estimate without real steps (kerasmem estimate; max-batch without --confirm)"
# Some of TensorFlow's kernels crash with these signals if memory runs out.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, getattr(signal, "SIGBUS", signal.SIGSEGV))


def run_steps(
    request: StepSpec,
    batch_size: int,
    steps: int,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    seconds: float | None = None,
) -> MeasuredSteps:
    """Measure real steps at a batch size in a subprocess.

    Args:
        request: the model and its training.
        batch_size: samples.
        steps: number of steps after the first one.
        timeout: seconds for the whole subprocess. Defaults to 600.
        seconds: time after which no further step begins, once two are done. Defaults to no limit.

    Raises:
        UsageError: If the timeout is not positive.
        ModelError: If a step failed, or ran out of memory.
        KerasmemError: If the subprocess was too slow or was killed.
    """
    runs = [(batch_size, steps, request.mode)]
    measured: list[MeasuredSteps] = call_with_steps(real_steps, request, runs, seconds, timeout=timeout)
    return measured[0]


def call_with_steps(
    function: Callable[..., Any],
    request: StepSpec,
    runs: Sequence[tuple[int, int, str]],
    *arguments: Any,
    timeout: float,
    device_bytes: int | None = None,
) -> Any:
    """Call a function of real steps in a subprocess with limits.

    Args:
        function: the function.
        request: its first argument: the model and its training.
        runs: its second argument: (batch size, steps, mode) of each run.
        *arguments: its further arguments.
        timeout: seconds for the whole subprocess.
        device_bytes: limit of TensorFlow's allocator on the first GPU or, without one, on the CPU. Defaults to no
            limit.

    Raises:
        UsageError: If the timeout is not positive.
        OutOfMemoryError: If a step ran out of memory.
        ModelError: If a step failed.
        KerasmemError: If the subprocess gave no answer.
    """
    if not timeout > 0:
        raise UsageError(f"timeout must be more than 0 seconds; got {timeout!r}")
    limits = Limits(timeout, int(available_memory() * _SHARE_OF_HOST))
    environ = child_environment(
        **(_ON_JAX if runs_on_jax() else _QUIET), **kernel_variables(request.kernels, request.threads)
    )
    if device_bytes is not None:  # one region, TensorFlow's default on a GPU
        environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    try:
        return run_child(function, request, runs, *arguments, limits=limits, environ=environ, device_bytes=device_bytes)
    except ChildFailure as failure:
        sizes = ", ".join(str(size) for size, *_ in runs)
        message = (
            f"the subprocess for real steps of {request.label} at batch size {sizes} gave no answer: {failure.reason}"
        )
        if failure.signal in _CRASHES:
            raise OutOfMemoryError(f"{message}; TensorFlow may crash if memory runs out: {_LESS}") from failure
        more_time = "allow more time (--timeout, timeout=…), " if failure.timed_out else ""
        raise KerasmemError(f"{message}; {more_time}{_LESS}") from failure


def measurement_notes(device: str, steps: str, *more: str, way: str | None = None) -> tuple[str, ...]:
    """Return a measurement's notes: device, steps, caveat for other devices."""
    is_gpu = device.startswith("GPU")
    usual = "TensorFlow's allocator" if is_gpu else "the GPUs' allocator, on the CPU"
    caveat = () if is_gpu else ("a GPU's kernels may need more or less scratch memory",)
    return (f"measured on {device} through {way or usual}: {steps}", *more, *caveat)


def try_batch(request: StepSpec, batch_size: int, limit_bytes: int, *, steps: int, last: int, timeout: float) -> Trial:
    """Train and evaluate at a batch size under a limit.

    Args:
        request: the model and its training.
        batch_size: samples.
        limit_bytes: limit of TensorFlow's allocator, on the first GPU or, without one, on the CPU.
        steps: number of training steps.
        last: samples of an epoch's last batch, or 0 for none.
        timeout: seconds for the subprocess.

    Raises:
        KerasmemError: If the model failed otherwise, or the subprocess exceeded the time or the host memory.
    """
    runs = [(batch_size, steps - 1, request.mode), (last, 0, request.mode)]  # each after a first step
    if request.mode == "train":
        runs += [(batch_size, 0, "evaluate"), (last, 0, "evaluate")]
    runs = [run for run in runs if run[0]]
    peak = reason = None
    try:
        measured = call_with_steps(real_steps, request, runs, timeout=timeout, device_bytes=limit_bytes)
        peak = max(size for run in measured for size in (run.first, *run.peaks))
    except OutOfMemoryError as error:
        reason = str(error)
    return Trial(batch_size, reason is None, peak, limit_bytes, reason)


def probe(request: StepSpec, *, timeout: float = DEFAULT_TIMEOUT, is_fixed: bool = False) -> Outcome:
    """Extrapolate a step's memory from real steps at smaller batches.

    Small batches are run as they are. Otherwise the smaller batches are a quarter and three quarters of the requested
    one. Still smaller ones predict worse, as their peak may be the optimizer's update, which does not grow with the
    batch.

    Args:
        request: the model, its training and the requested batch size.
        timeout: seconds for each subprocess. Defaults to 600.
        is_fixed: whether the model takes no other batch size. Defaults to False.

    Raises:
        ModelError: If a step failed, or ran out of memory.
        KerasmemError: If a subprocess gave no answer, or XLA compiles the step.
    """
    target = request.samples
    least = max(target // 4, LEAST_BATCH)
    if is_fixed or target <= 3 * least:
        run = run_steps(request, target, PROBED_STEPS, timeout=timeout)
        note = f"batch {run.batch_size} is small enough to run: {len(run.peaks)} steps on {run.device}"
        return _outcome(run, run.median, min(run.peaks), max(run.peaks), run.inputs, note)
    # A subprocess for each, since the second batch would reuse the first one's chunks.
    runs = []
    for size in (least, 3 * least):
        runs.append(run_steps(request, size, PROBED_STEPS, timeout=timeout, seconds=_SECONDS_A_RUN))
        if runs[-1].execution == "xla":
            raise KerasmemError(
                f"probe of {request.label}: XLA allocates one large buffer in a chunk of up to twice its size, "
                "so peaks jump from batch to batch; use method xla, or measure the batch itself"
            )
    small, large = runs
    spread = SPREAD[large.execution]

    def on_line(at_small: float, at_large: float) -> int:
        slope = (at_large - at_small) / (large.batch_size - small.batch_size)
        return round(at_large + slope * (target - large.batch_size))

    # Means vary less than medians.
    total = on_line(int(statistics.mean(small.peaks)), int(statistics.mean(large.peaks)))
    return _outcome(
        large,
        total,
        min(on_line(max(small.peaks), min(large.peaks)), int(total * (1 - spread))),
        max(on_line(min(small.peaks), max(large.peaks)), int(total * (1 + spread))),
        on_line(small.inputs, large.inputs),
        f"run at batches {least} and {3 * least} on {large.device}; a line through their peaks gives batch {target}",
    )


def _outcome(run: MeasuredSteps, total: int, low: int, high: int, inputs: int, note: str) -> Outcome:
    return Outcome(
        method="probe",
        execution=run.execution,
        total=total,
        low=low,
        high=high,
        pool=Pool(None, total, None),
        weights=run.weights,
        optimizer=run.optimizer,
        inputs=inputs,
        kernels=run.kernels,
        ran_on=run.device,
        notes=(note, *run.notes),
    )
