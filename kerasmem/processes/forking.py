"""Call functions in forks of a process that has imported TensorFlow.

Python's `forkserver` would run the user's script again for each call, and it has one server per program, with the
environment variables of its start.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TextIO

from kerasmem.errors import KerasmemError, UsageError
from kerasmem.processes.children import ChildFailure, Limits, end_group, exit_reason, import_variables, start_module

ON_LINUX_ALONE = (
    "calls in forked processes (measure, probe, profile, run_isolated, isolated=True) need Linux; "
    "use method='graph' for an estimate, and the fit of Keras in a process that you start yourself"
)
_KEPT_ERRORS = 2**26  # bytes of standard error that are kept
# Prefixes of variables that Python, TensorFlow and their libraries read at import. Each call sends all others.
_READ_AT_START = ("TF_", "KERAS_", "XLA_", "JAX_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "MALLOC_", "PYTHON", "LD_")
_READ_LATER = ("TF_FORCE_GPU_ALLOW_GROWTH", *import_variables())


class Server(NamedTuple):
    """A running `fork_server`, and the socket for requests."""

    process: subprocess.Popen[bytes]
    control: socket.socket


_servers: dict[tuple[int, frozenset[tuple[str, str]]], Server] = {}  # by client process and variables


def start_server(environ: Mapping[str, str]) -> Server:
    """Return a server for calls with some environment variables. A new server imports TensorFlow in the background.

    Raises:
        KerasmemError: If the system cannot run servers.
    """
    variables = {item for item in environ.items() if item[0].startswith(_READ_AT_START) and item[0] not in _READ_LATER}
    key = os.getpid(), frozenset(variables)
    server = _servers.get(key)
    if server is not None and server.process.poll() is None:
        return server
    if not hasattr(os, "pidfd_open"):
        raise KerasmemError(ON_LINUX_ALONE)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = start_module(
            "kerasmem.processes.fork_server",
            str(theirs.fileno()),
            environ={**environ, **import_variables()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # TensorFlow logs at import; each call has its own standard error
            pass_fds=(theirs.fileno(),),
        )
    _servers[key] = Server(process, ours)
    return _servers[key]


@dataclass(frozen=True)
class ForkedCall:
    """The outcome of a call in a fork.

    Attributes:
        answer: answer of the fork (see `fork_server`), or None if it ended without one.
        failure: failure if a limit was exceeded, otherwise None.
        code: exit code of the fork, negative for a signal.
        host_peak: peak resident memory in bytes.
        errors: standard error.
    """

    answer: dict[str, Any] | None
    failure: ChildFailure | None
    code: int
    host_peak: int
    errors: bytes


def run_child(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Call a function in a fork, hide its output, and return its value.

    Args:
        function: the function.
        *arguments: positional arguments.
        **settings: `limits`, `environ` and `device_bytes` of `call_in_fork`.

    Raises:
        ChildFailure: If the child ended without an answer, or the function raised another error than a `KerasmemError`.
        KerasmemError: If the function raised it.
    """
    call = call_in_fork(function, arguments, {}, output=False, **settings)
    if call.failure is not None:
        raise call.failure
    if call.answer is None:
        lines = call.errors.decode("utf-8", "replace").split("\n")
        last = next((f": {line.strip()[:300]}" for line in reversed(lines) if line.strip()), "")
        reason = f"it was ended by {exit_reason(call.code)}{last}"
        raise ChildFailure(reason, signal=-call.code if call.code < 0 else None)
    if "value" in call.answer:
        return call.answer["value"]
    error = call.answer["error"]
    if isinstance(error, KerasmemError):
        raise error
    lines = [type(error).__name__, *filter(None, map(str.strip, str(error).splitlines()))]
    raise ChildFailure(": ".join(lines[:2])[:300])


def call_in_fork(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    *,
    limits: Limits,
    environ: Mapping[str, str] | None = None,
    device_bytes: int | None = None,
    output: bool = True,
) -> ForkedCall:
    """Call a function in a fork, and wait until the fork has ended.

    Args:
        function: the function. It, its arguments and its result are sent by cloudpickle.
        arguments: positional arguments.
        named: keyword arguments.
        limits: limits of the fork, checked 20 times per second.
        environ: environment variables. Defaults to those of this process.
        device_bytes: maximum bytes that TensorFlow may allocate per device. Defaults to None: unlimited.
        output: whether to show the function's output. Defaults to True.

    Raises:
        UsageError: If the function or an argument cannot be sent to another process.
        KerasmemError: If the system cannot run servers.
    """
    settings: dict[str, Any] = {
        "cwd": os.getcwd(), "path": import_variables()["PYTHONPATH"], "argv": sys.argv, "device_bytes": device_bytes,
        "environ": dict(os.environ if environ is None else environ),
    }  # fmt: skip
    server = start_server(settings["environ"])
    with contextlib.ExitStack() as stack:
        call, answer, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        _write_call(call, settings, (function, arguments, named))
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(report)  # closing it, as on Ctrl-C, ends the fork
        with theirs:
            files = [file.fileno() for file in (call, answer, out, err, theirs)]
            socket.send_fds(server.control, [b"call"], files)
        (pid,) = _receive(report)
        streams = [(name, stack.enter_context(_reopen(file))) for name, file in (("stdout", out), ("stderr", err))]

        def has_ended(seconds: float) -> bool:
            is_over = bool(select.select([report], [], [], seconds)[0])
            for name, file in streams if output else ():
                with contextlib.suppress(OSError, ValueError):
                    if text := file.read():
                        print(text, end="", file=getattr(sys, name), flush=True)
            return is_over

        failure = limits.watch(pid, has_ended, lambda: end_group(pid))
        code, host_peak = _receive(report)
        err.seek(0)
        return ForkedCall(_read_answer(answer), failure, code, host_peak, err.read(_KEPT_ERRORS))


def _reopen(file: BinaryIO) -> TextIO:
    """Open a file once more, to read it while another process writes to it."""
    return open(f"/proc/self/fd/{file.fileno()}", encoding="utf-8", errors="backslashreplace")


def _receive(report: socket.socket) -> list[int]:
    numbers = report.recv(100).split()
    if not numbers:
        raise KerasmemError("the server of child processes has ended; call again")
    return [int(number) for number in numbers]


def _read_answer(answer: BinaryIO) -> dict[str, Any] | None:
    answer.seek(0)
    try:
        return dict(pickle.load(answer))
    except (EOFError, pickle.UnpicklingError):  # missing, or incomplete because the fork was killed
        return None


def _write_call(file: BinaryIO, settings: Mapping[str, Any], call: Sequence[Any]) -> None:
    import cloudpickle

    pickle.dump(settings, file)
    try:
        cloudpickle.dump(call, file)
    except Exception as error:  # `__reduce__` methods may raise anything
        raise UsageError(
            f"{getattr(call[0], '__qualname__', call[0])!s} or an argument of it cannot be sent to another process "
            f"({type(error).__name__}: {error}); build models, open files and hold locks inside the function"
        ) from error
    file.flush()
    file.seek(0)
