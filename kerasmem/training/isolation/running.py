"""`kerasmem.run_isolated`: a function in a process of its own, and running out of memory as a value."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from kerasmem.diagnosis.explaining import explain_oom, explain_stream
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.processes.handle import Server, ServerEnded, current_server
from kerasmem.training.isolation.results import DIED, DONE, OUT_OF_MEMORY, TIMED_OUT, IsolatedRun, Limits
from kerasmem.units import format_size, parse_size

_POLL_SECONDS = 0.05
_KEPT_ERRORS = 2**26  # bytes of standard error that are kept to be explained
_PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 2**20


def run_isolated(
    function: Callable[..., Any],
    /,
    *arguments: Any,
    memory_limit: int | str | None = None,
    host_memory_limit: int | str | None = None,
    timeout: float | None = None,
    output: bool = True,
    **named: Any,
) -> IsolatedRun:
    """Call a function in a process of its own, such as one trial of a grid search.

    Whatever it allocates is gone when it ends, on the card and on the host. Running out of memory is a value of the
    result, and so is a process that dies; any other exception is raised here as it was there. The first call starts a
    process that loads TensorFlow, each call is a fork of it, so that a call costs milliseconds, not the seconds of an
    import. The function, its arguments and its result travel by cloudpickle: lambdas, and functions of a script or
    notebook, work, and a script needs no `if __name__ == "__main__"`. Threads may call it at the same time.

    Args:
        function: to be called; return plain values or arrays (`model.get_weights()`), or a Keras model.
        *arguments: for the function.
        memory_limit: of each device's memory for TensorFlow, in bytes or as "4GB": the card's, or without one the
            host's as TensorFlow allocates it.
        host_memory_limit: resident bytes, looked at 20 times a second; beyond it the process is ended.
        timeout: seconds from the start of the process, after which it is ended.
        output: show what the function prints.
        **named: keyword arguments for the function; its own `timeout`, for one, goes in by `functools.partial`.

    Returns:
        An `IsolatedRun`: the value or why there is none, the peak of device and host in bytes, seconds.

    Raises:
        UsageError: an argument is wrong, or the function cannot be sent to another process.
        KerasmemError: the result cannot be sent back, or no process can be started.
        Exception: what the function raised, if it was not for want of memory; its cause has the traceback.

    Example:
        >>> from kerasmem import run_isolated
        >>> run_isolated(lambda width: 2 * width, 21).value
        42
    """
    limits = _read_limits(memory_limit, host_memory_limit, timeout)
    with tempfile.TemporaryFile() as call, tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as errors:
        _write_call(call, function, arguments, named)
        try:
            run = _Run(limits, output, call, answer, errors)
            run.follow()
        except ServerEnded:  # before the function was called; a new one is started
            call.seek(0)
            run = _Run(limits, output, call, answer, errors)
            run.follow()
        return run.result()


def _read_limits(memory_limit: Any, host_memory_limit: Any, timeout: Any) -> Limits:
    sizes: list[int | None] = []
    for name, value in (("memory_limit", memory_limit), ("host_memory_limit", host_memory_limit)):
        if value is not None:
            try:
                value = parse_size(str(value)) if not isinstance(value, bool) else 0
            except ValueError as error:
                raise UsageError(f"{name} {value!r}: {error}") from None
            if value < MIB:
                raise UsageError(f"{name}: give bytes, at least {MIB:,}, or a size such as '4GB'")
        sizes.append(value)
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0):
        raise UsageError(f"timeout {timeout!r}: give seconds, more than 0")
    if memory_limit is not None and os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
        raise UsageError("memory_limit: only TensorFlow's allocator can be limited; use the TensorFlow backend")
    return Limits(sizes[0], sizes[1], timeout)


def _write_call(call: BinaryIO, function: Any, arguments: Any, named: Any) -> None:
    import cloudpickle

    if not callable(function):
        raise UsageError(f"run_isolated: give a function, not a {type(function).__name__}")
    try:
        cloudpickle.dump((function, arguments, named), call)
    except Exception as error:  # an object's own way of being pickled may raise anything
        raise UsageError(
            f"{getattr(function, '__qualname__', function)!s} or an argument of it cannot be sent to another process "
            f"({type(error).__name__}: {error}); build models, open files and hold locks inside the function"
        ) from error
    call.flush()
    call.seek(0)


class _Run:
    """One call, from its start to its end."""

    def __init__(self, limits: Limits, output: bool, call: BinaryIO, answer: BinaryIO, errors: BinaryIO) -> None:
        self.limits, self.output, self.answer, self.errors = limits, output, answer, errors
        self.begin = self.started = time.monotonic()
        self.pid: int | None = None
        self.ended: dict[str, int] | None = None
        self.stopped: tuple[str, str] | None = None  # status and reason where it was ended from here
        self.host_peak = 0
        settings = {
            "cwd": os.getcwd(), "path": [os.path.abspath(each) for each in sys.path if isinstance(each, str)],
            "argv": sys.argv, "environ": dict(os.environ), "device_bytes": limits.device_bytes,
        }  # fmt: skip
        self.server = current_server()
        self.said, self.streams = _start(self.server, settings, call, answer)

    def follow(self) -> None:
        """Pass on what is printed and watch the limits until the process has ended."""
        try:
            while self.ended is None:
                ready, _, _ = select.select([self.said, *self.streams], [], [], _POLL_SECONDS)
                for descriptor in ready:
                    if descriptor == self.said:
                        self._hear()
                    else:
                        self._pass_on(descriptor)
                self._watch()
            while self.streams and (ready := select.select(list(self.streams), [], [], 0)[0]):
                for descriptor in ready:
                    self._pass_on(descriptor)
        except BaseException:  # also on Ctrl-C
            self._kill()
            raise
        finally:
            for descriptor in (self.said, *self.streams):
                os.close(descriptor)

    def result(self) -> IsolatedRun:
        """Return what became of it.

        Raises:
            Exception: what the function raised.
        """
        assert self.ended is not None
        common: dict[str, Any] = {
            "host_peak_bytes": self.ended["host_peak"] or None,
            "seconds": time.monotonic() - self.begin,
        }
        if self.stopped is not None:
            return IsolatedRun(self.stopped[0], reason=self.stopped[1], **common)
        found = self._answer()
        if found is None:
            return self._died(common)
        common.update(device=found.get("device"), peak_bytes=found.get("peak"))
        if "value" in found:
            return IsolatedRun(DONE, found["value"], **common)
        diagnosis = explain_oom(found["error"]) if found["error"] is not None else explain_oom(found["traceback"])
        if diagnosis.out_of_memory:
            return IsolatedRun(OUT_OF_MEMORY, reason=diagnosis.summary, diagnosis=diagnosis, **common)
        where = _Traceback(found["traceback"])
        if isinstance(found["error"], Exception):  # and not SystemExit, which would end this program too
            raise found["error"] from where
        raise KerasmemError(f"the function raised {found['class']}: {found['told']}") from where

    def _hear(self) -> None:
        told = os.read(self.said, 4096)
        if not told and self.pid is None:
            self.server.has_ended = True
            raise ServerEnded("no process could be started: the one that starts them has ended")
        if not told:
            raise KerasmemError("the process that starts the others has ended; call run_isolated again")
        for line in told.decode().splitlines():
            data = json.loads(line)
            if "pid" in data:
                self.pid, self.started = data["pid"], time.monotonic()
            else:
                self.ended = data

    def _pass_on(self, descriptor: int) -> None:
        name = self.streams[descriptor]
        data = os.read(descriptor, 2**16)
        if not data:
            del self.streams[descriptor]
            os.close(descriptor)
            return
        if name == "stderr" and self.errors.tell() < _KEPT_ERRORS:
            self.errors.write(data)
        stream = getattr(sys, name)
        if self.output and stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.write(data.decode("utf-8", "backslashreplace"))
                stream.flush()

    def _watch(self) -> None:
        if self.pid is None or self.stopped is not None:
            return
        took, most = time.monotonic() - self.started, self.limits.host_bytes
        if self.limits.seconds is not None and took > self.limits.seconds:
            self.stopped = (TIMED_OUT, f"it took longer than {self.limits.seconds:g} s")
        elif most is not None and (resident := _resident_bytes(self.pid)) > most:
            reason = f"it took {format_size(resident)} of host memory, more than the {format_size(most)} it may have"
            self.stopped = (OUT_OF_MEMORY, reason)
        if self.stopped is not None:
            self._kill()

    def _kill(self) -> None:
        if self.pid is not None and self.ended is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def _answer(self) -> dict[str, Any] | None:
        self.answer.seek(0, os.SEEK_END)
        if not self.answer.tell():
            return None
        self.answer.seek(0)
        try:
            found: dict[str, Any] = pickle.load(self.answer)
        except (EOFError, pickle.UnpicklingError):  # it was ended while writing
            return None
        except Exception as error:
            raise KerasmemError(
                f"the result cannot be read here ({type(error).__name__}: {error}); return plain values or arrays"
            ) from error
        return found

    def _died(self, common: dict[str, Any]) -> IsolatedRun:
        assert self.ended is not None
        code = self.ended["code"]
        self.errors.seek(0)
        diagnosis = explain_stream(self.errors)
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
        if diagnosis.out_of_memory:
            return IsolatedRun(OUT_OF_MEMORY, reason=f"{diagnosis.summary} ({name})", diagnosis=diagnosis, **common)
        hint = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        return IsolatedRun(DIED, reason=f"the process was ended by {name}{hint}", **common)


class _Traceback(Exception):
    """The traceback in the other process, shown as the cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"


def _start(server: Server, settings: dict[str, Any], call: BinaryIO, answer: BinaryIO) -> tuple[int, dict[int, str]]:
    """Have the server fork; return the descriptor of what it says, and those of what is printed with their names."""
    said, say = os.pipe()
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    try:
        server.ask(settings, (call.fileno(), answer.fileno(), out_end, err_end, say))
    except ServerEnded:
        for descriptor in (said, out, err):
            os.close(descriptor)
        raise
    finally:
        for descriptor in (say, out_end, err_end):
            os.close(descriptor)
    return said, {out: "stdout", err: "stderr"}


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):  # it has just ended
        return 0
