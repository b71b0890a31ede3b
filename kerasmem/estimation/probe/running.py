"""Start a worker that runs real steps, limit it, and turn its failures into messages."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from kerasmem.devices.host import host_memory
from kerasmem.errors import KerasmemError, OutOfMemoryError, UsageError
from kerasmem.estimation.probe.worker import MeasuredSteps, work
from kerasmem.estimation.search import Trial
from kerasmem.models.backend import runs_on_jax
from kerasmem.models.spec import StepSpec
from kerasmem.processes.children import ChildFailure, Limits, child_environment
from kerasmem.processes.forking import run_child

DEFAULT_TIMEOUT = 600.0
_SHARE_OF_HOST = 0.95  # of the memory that is free when the worker starts; beyond that the host would swap
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
# On JAX blocks from 64 KiB on are pages of their own, which glibc gives back when they are freed: what is resident is
# in use. A program from JAX's cache on disk would not be the one that is measured.
_ON_JAX = {**_QUIET, "MALLOC_MMAP_THRESHOLD_": "65536", "JAX_ENABLE_COMPILATION_CACHE": "false"}
_LESS = "take a smaller batch, or estimate without real steps (kerasmem estimate; max-batch without --confirm)"
# Some of TensorFlow's kernels end the process with these if memory runs out.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, getattr(signal, "SIGBUS", signal.SIGSEGV))


def run_steps(
    request: StepSpec,
    runs: Sequence[tuple[int, int]],
    *,
    timeout: float = DEFAULT_TIMEOUT,
    memory_limit: int | None = None,
    seconds: float | None = None,
) -> MeasuredSteps:
    """Train some steps at each batch size in one subprocess and return their peaks.

    Args:
        request: the model and how it is trained.
        runs: (batch size, steps after the first one) pairs, run one after another.
        timeout: seconds for the whole process.
        memory_limit: bytes of host memory for the process. Defaults to nearly all that is free.
        seconds: no further step begins after that many seconds at a batch size, once two are done.

    Raises:
        UsageError: If the timeout is not positive.
        ModelError: If a step failed, or ran out of memory.
        KerasmemError: If the process was too slow or was ended by the system.
    """
    answer = ask_worker(work, request, runs, timeout=timeout, memory_limit=memory_limit, seconds=seconds)
    return MeasuredSteps.from_dict(answer)


def ask_worker(
    work: Callable[[dict[str, Any]], dict[str, Any]],
    request: StepSpec,
    runs: Sequence[tuple[Any, ...]],
    *,
    timeout: float,
    memory_limit: int | None = None,
    device_bytes: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Run a function that trains real steps in a subprocess, and return its answer.

    Args:
        work: the function.
        request: the model and how it is trained.
        runs: (batch size, steps, mode) of each run; the mode defaults to the request's.
        timeout: seconds for the whole process.
        memory_limit: bytes of host memory for the process, whatever limit its device has. Defaults to nearly all that
            is free.
        device_bytes: that TensorFlow may allocate on the first GPU or, without one, on the CPU. Defaults to no limit.
        **more: further fields of the function's argument.

    Raises:
        UsageError: If the timeout is not positive.
        OutOfMemoryError: If a step ran out of memory.
        ModelError: If a step failed.
        KerasmemError: If the process gave no answer.
    """
    if not timeout > 0:
        raise UsageError(f"timeout {timeout!r}: give seconds, more than 0")
    available = host_memory().available_bytes
    if memory_limit is None and available is not None:
        memory_limit = int(available * _SHARE_OF_HOST)
    data = {"request": request.to_dict(), "runs": runs, **more}
    environ = child_environment(**(_ON_JAX if runs_on_jax() else _QUIET))
    if device_bytes is not None:  # one region, as TensorFlow has it on a GPU unless it is told otherwise
        environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    limits = Limits(timeout, memory_limit)
    try:
        answer: dict[str, Any] = run_child(work, data, limits=limits, environ=environ, device_bytes=device_bytes)
        return answer
    except ChildFailure as failure:
        sizes = ", ".join(str(size) for size, *_ in runs)
        message = (
            f"the process that runs real steps of {request.label} at batch size {sizes} gave no "
            f"answer: {failure.reason}"
        )
        if failure.signal in _CRASHES:
            raise OutOfMemoryError(f"{message}; TensorFlow may end so where memory runs out: {_LESS}") from failure
        more_time = "allow more time (--timeout, timeout=…), " if failure.timed_out else ""
        raise KerasmemError(f"{message}; {more_time}{_LESS}") from failure


def measured_notes(device: str, steps: str, *more: str, way: str | None = None) -> tuple[str, ...]:
    """Return the notes on a measurement: device, steps, and the caveat for other devices."""
    is_gpu = device.startswith("GPU")
    usual = "TensorFlow's allocator" if is_gpu else "the GPUs' allocator, on the CPU"
    caveat = () if is_gpu else ("a GPU runs other kernels, which may take other scratch memory",)
    return (f"measured on {device} through {way or usual}: {steps}", *more, *caveat)


def try_batch(request: StepSpec, batch_size: int, limit_bytes: int, *, steps: int, last: int, timeout: float) -> Trial:
    """Train and evaluate at a batch size, with the last batch of an epoch, under a limit.

    Args:
        request: the model and how it is trained.
        batch_size: samples.
        limit_bytes: for TensorFlow's allocator, on the first GPU or, without one, on the CPU.
        steps: training steps.
        last: samples of the last batch; 0 for none.
        timeout: seconds for the process.

    Raises:
        KerasmemError: If the model failed otherwise, or the process was too slow or took too much host memory.
    """
    begin = time.monotonic()
    runs = [(batch_size, steps - 1, request.mode), (last, 0, request.mode)]  # each beside a first step
    if request.mode == "train":
        runs += [(batch_size, 0, "evaluate"), (last, 0, "evaluate")]
    runs = [run for run in runs if run[0]]
    peak = reason = None
    try:
        answer = ask_worker(work, request, runs, timeout=timeout, device_bytes=limit_bytes)
        peak = max(size for run in answer["runs"] for size in (run["first"], *run["peaks"]))
    except OutOfMemoryError as error:
        reason = str(error)
    return Trial(batch_size, reason is None, peak, limit_bytes, time.monotonic() - begin, reason)
