"""Ask the worker: start it, limit it, and turn what goes wrong into a message."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kerasmem.devices.host import host_memory
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.models.request import ModelRequest
from kerasmem.processes.task import ChildFailure, run_child
from kerasmem.records import Record

WORKER = "kerasmem.estimation.probe.worker"
DEFAULT_TIMEOUT = 600.0
_SHARE_OF_HOST = 0.95  # of the memory that is free when the worker starts; what it takes beyond would only swap


@dataclass(frozen=True)
class Run:
    """Steps at one batch size.

    Attributes:
        batch_size: samples.
        inputs: bytes of one batch, targets included.
        before: bytes in use before the first step: weights, optimizer and batch, in chunks.
        first: the peak of the first step, which also sets things up.
        peaks: the peak in use of each further step, in bytes.
        seconds: for each of those.
    """

    batch_size: int
    inputs: int
    before: int
    first: int
    peaks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Answer(Record, what="answer"):
    """What the worker found.

    Attributes:
        device: "CPU:0" or "GPU:0".
        execution: "graph" or "xla".
        weights: bytes of the model's variables.
        optimizer: bytes of the optimizer's, or None where there is none.
        notes: what was assumed.
        runs: in the order in which they were asked for.
    """

    device: str
    execution: str
    weights: int
    optimizer: int | None
    notes: tuple[str, ...]
    runs: tuple[Run, ...]


def run_steps(
    request: ModelRequest,
    runs: Sequence[tuple[int, int]],
    *,
    folder: str | os.PathLike[str] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    seconds: float | None = None,
    memory_limit: int | None = None,
) -> Answer:
    """Run real steps in a process of its own.

    Args:
        request: the model and how it is trained; its batch size is not looked at.
        runs: (batch size, steps) pairs, run one after the other.
        folder: where to record the allocator's events, or None.
        timeout: seconds for the whole process.
        seconds: after which a run with two steps begins no more.
        memory_limit: bytes of host memory that the process may take; None: nearly all that is free.

    Raises:
        UsageError: the timeout is not positive.
        ModelError: a step failed, or ran out of memory.
        KerasmemError: the process gave no answer: it was too slow or was ended by the system.
    """
    data = {
        "request": request.to_dict(),
        "runs": [{"batch_size": size, "steps": steps} for size, steps in runs],
        "folder": None if folder is None else os.fspath(folder),
        "seconds": seconds,
    }
    return Answer.from_dict(ask_worker(WORKER, data, timeout=timeout, memory_limit=memory_limit))


def ask_worker(
    worker: str, data: dict[str, Any], *, timeout: float = DEFAULT_TIMEOUT, memory_limit: int | None = None
) -> dict[str, Any]:
    """Run a worker that trains real steps, and return its answer.

    Args:
        worker: its module.
        data: what it is given: `request` (a `ModelRequest` as data), `runs` (each with a `batch_size`), ….
        timeout: seconds for the whole process.
        memory_limit: bytes of host memory that the process may take; None: nearly all that is free.

    Raises:
        UsageError: the timeout is not positive.
        ModelError: a step failed, or ran out of memory.
        KerasmemError: the process gave no answer.
    """
    if not timeout > 0:
        raise UsageError(f"timeout {timeout!r}: give seconds, more than 0")
    available = host_memory().available_bytes
    if memory_limit is None and available is not None:
        memory_limit = int(available * _SHARE_OF_HOST)
    try:
        return run_child(worker, data, timeout=timeout, memory_limit=memory_limit, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
    except ChildFailure as failure:
        sizes = ", ".join(str(run["batch_size"]) for run in data["runs"])
        model = data["request"]["source"] or data["request"]["factory"]
        raise KerasmemError(
            f"the process that runs real steps of {model} at batch size {sizes} gave no "
            f"answer: {failure.reason}; {_way_out(failure.reason)}"
        ) from failure


def _way_out(reason: str) -> str:
    if "longer than" in reason:
        return "allow more time (--timeout, timeout=…), take a smaller batch, or estimate without running it"
    if "SIGSEGV" in reason or "SIGABRT" in reason:
        return (
            "some of TensorFlow's kernels end so where memory runs out: take a smaller batch, or estimate without "
            "running it (kerasmem estimate)"
        )
    return "take a smaller batch, or estimate without running it (kerasmem estimate)"
