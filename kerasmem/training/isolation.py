"""`kerasmem.run_isolated`: call a function in a separate process, and return running out of memory as a value."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kerasmem import checks
from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.diagnosis.explaining import explain_oom, explain_stream
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.processes.children import SIGKILL, Limits, exit_name, exit_reason
from kerasmem.processes.forking import ForkedCall, call_in_fork
from kerasmem.units import MIB, parse_size

DONE, OUT_OF_MEMORY, TIMED_OUT, DIED = "done", "out of memory", "timed out", "died"


@dataclass(frozen=True)
class IsolatedRun:
    """The result of a call in a separate process.

    Attributes:
        status: "done", "out of memory", "timed out" or "died" (the process ended without an answer).
        value: return value of the function; None unless the status is "done".
        reason: one line on why there is no value; None if there is one.
        diagnosis: diagnosis of the failure, if a message shows that memory ran out.
        device: device of `peak_bytes`, such as "GPU:0"; None if TensorFlow was not used.
        peak_bytes: peak of the allocator of `device`; None if unknown.
        host_peak_bytes: peak of the resident memory of the process; None if unknown.
        seconds: from the call to the end of the process.
        killed: whether SIGKILL ended the process, as the kernel does when the host's memory runs out.
    """

    status: str
    value: Any = None
    reason: str | None = None
    diagnosis: Diagnosis | None = None
    device: str | None = None
    peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    seconds: float = 0.0
    killed: bool = False

    @property
    def out_of_memory(self) -> bool:
        """Whether memory ran out, the device's or the host's."""
        return self.status == OUT_OF_MEMORY

    def get(self) -> Any:
        """Return the value.

        Raises:
            KerasmemError: If there is none; the message has the reason.
        """
        if self.status != DONE:
            raise KerasmemError(f"no result: {self.status}" + ("" if self.reason is None else f" ({self.reason})"))
        return self.value


def run_isolated(
    function: Callable[..., Any],
    /,
    *arguments: Any,
    device_memory_limit: int | str | None = None,
    host_memory_limit: int | str | None = None,
    timeout: float | None = None,
    output: bool = True,
    **named: Any,
) -> IsolatedRun:
    """Call a function in a separate process, such as one trial of a grid search.

    All its memory on the card and on the host is freed when it ends. If memory runs out or the process dies, the result
    has that status; any other exception is raised here. The first call starts a process that loads TensorFlow, and each
    call is a fork of it, so a call costs milliseconds, not the seconds of an import. Function, arguments and result are
    sent by cloudpickle: lambdas, and functions of a script or notebook, work, and a script needs no
    `if __name__ == "__main__"`. It is thread-safe.

    Args:
        function: function to call; it returns plain values, arrays (`model.get_weights()`), or a Keras model.
        *arguments: arguments of the function.
        device_memory_limit: memory of each device for TensorFlow, in bytes or as "4GB"; without a GPU, host memory that
            TensorFlow allocates. Defaults to no limit.
        host_memory_limit: maximum resident memory, checked 20 times a second. Defaults to no limit.
        timeout: maximum seconds from the start of the process. Defaults to no limit.
        output: show the output of the function. Defaults to True.
        **named: keyword arguments of the function; pass its own `timeout`, for one, by `functools.partial`.

    Returns:
        An `IsolatedRun`: status, value, peaks of device and host in bytes, seconds.

    Raises:
        UsageError: If an argument is wrong, or the function cannot be sent to another process.
        KerasmemError: If the result cannot be sent back, or no process can be started.
        Exception: Any exception of the function other than out of memory; its cause has the traceback.

    Examples:
        >>> from kerasmem import run_isolated
        >>> run_isolated(lambda width: 2 * width, 21).value
        42
    """
    if not callable(function):
        raise UsageError(f"run_isolated: function must be callable; got {type(function).__name__}")
    limits, device_bytes = _read_limits(device_memory_limit, host_memory_limit, timeout)
    begin = time.monotonic()
    call = call_in_fork(function, arguments, named, limits=limits, device_bytes=device_bytes, output=output)
    common: dict[str, Any] = {"host_peak_bytes": call.host_peak or None, "seconds": time.monotonic() - begin}
    if call.failure is not None:
        status = TIMED_OUT if call.failure.timed_out else OUT_OF_MEMORY
        return IsolatedRun(status, reason=call.failure.reason, **common)
    return _explain_death(call, common) if call.answer is None else _read_answer(call.answer, common)


def _read_limits(device_memory_limit: Any, host_memory_limit: Any, timeout: Any) -> tuple[Limits, int | None]:
    """Return the limits of host memory and time, and the bytes of device memory."""
    sizes: list[int | None] = []
    for name, value in (("device_memory_limit", device_memory_limit), ("host_memory_limit", host_memory_limit)):
        if value is not None:
            value = parse_size(value if isinstance(value, bool) else str(value), field=name)
            if value < MIB:
                raise UsageError(f"{name} must be at least {MIB:,} bytes, or a size such as '4GB'; got {value:,}")
        sizes.append(value)
    if timeout is not None and not checks.number("timeout", timeout) > 0:
        raise UsageError(f"timeout must be above 0 seconds; got {timeout!r}")
    if device_memory_limit is not None and os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
        raise UsageError("device_memory_limit needs the TensorFlow backend, as it limits TensorFlow's allocator")
    return Limits(timeout, sizes[1]), sizes[0]


def _read_answer(answer: dict[str, Any], common: dict[str, Any]) -> IsolatedRun:
    """Return the result of an answer, or raise the exception of the function."""
    common = {**common, "device": answer.get("device"), "peak_bytes": answer.get("peak")}
    if "value" in answer:
        return IsolatedRun(DONE, answer["value"], **common)
    error = answer["error"]
    diagnosis = explain_oom(answer["traceback"] if type(error) is KerasmemError else error)
    if diagnosis.out_of_memory:
        return IsolatedRun(OUT_OF_MEMORY, reason=diagnosis.summary, diagnosis=diagnosis, **common)
    raise error from _Traceback(answer["traceback"])


def _explain_death(call: ForkedCall, common: dict[str, Any]) -> IsolatedRun:
    """Return the result of a process that ended without an answer."""
    diagnosis = explain_stream(io.BytesIO(call.errors))
    if diagnosis.out_of_memory:
        reason = f"{diagnosis.summary} ({exit_name(call.code)})"
        return IsolatedRun(OUT_OF_MEMORY, reason=reason, diagnosis=diagnosis, **common)
    reason = f"the process was ended by {exit_reason(call.code)}"
    return IsolatedRun(DIED, reason=reason, killed=call.code == -SIGKILL, **common)


class _Traceback(Exception):
    """The traceback in the other process, shown as the cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"
