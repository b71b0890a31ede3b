"""Whether a batch size fits: real steps under a real limit, in a process of its own."""

from __future__ import annotations

import time
from typing import Any

from kerasmem.devices.catalogue import available_bytes
from kerasmem.devices.host import host_memory
from kerasmem.devices.live import read_machine
from kerasmem.errors import KerasmemError
from kerasmem.estimation.verification import Trial
from kerasmem.models.request import ModelRequest
from kerasmem.processes.task import ChildFailure, run_child

WORKER = "kerasmem.estimation.probe.verify_worker"
DEFAULT_STEPS = 3
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS")


def try_batch(
    request: ModelRequest, batch_size: int, limit_bytes: int, *, steps: int, last: int, timeout: float
) -> Trial:
    """Train and evaluate at a batch size, with the last batch of an epoch, under a limit.

    Args:
        request: the model and how it is trained.
        batch_size: samples.
        limit_bytes: for TensorFlow's allocator, on the first GPU or, without one, on the CPU.
        steps: training steps.
        last: samples of the last batch; 0 for none.
        timeout: seconds for the process.

    Raises:
        KerasmemError: the model failed otherwise, or the process was too slow.
    """
    begin = time.monotonic()
    data: dict[str, Any] = {
        "request": request.to_dict(), "limit": limit_bytes, "batch_size": batch_size, "last": last, "steps": steps,
    }  # fmt: skip
    try:
        answer = run_child(WORKER, data, timeout=timeout, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
        peak, reason = answer["peak"], answer["reason"]
    except ChildFailure as failure:
        if not any(name in failure.reason for name in _CRASHES):
            raise KerasmemError(
                f"real steps at batch size {batch_size} gave no answer: {failure.reason}; allow more time "
                "(--timeout, timeout=…), name a smaller maximum, or leave out --verify"
            ) from failure
        peak, reason = None, f"{failure.reason}; TensorFlow may end so where memory runs out"
    return Trial(batch_size, reason is None, peak, limit_bytes, time.monotonic() - begin, reason)


def room_here() -> tuple[int, str]:
    """Return the bytes that TensorFlow can have on this machine now, and where: its first GPU, or else the host."""
    for device in read_machine().devices:
        if device.cuda_index == 0 and device.free_bytes is not None:
            major, _, minor = (device.compute_capability or "").partition(".")
            capability = (int(major), int(minor)) if major and minor else None
            return available_bytes(device.free_bytes, capability), device.name or "GPU:0"
    return host_memory().available_bytes, "this machine's memory"
