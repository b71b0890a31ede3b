"""A function called in a fork of a process that has loaded TensorFlow: one such process, as long as it suits.

Python's `forkserver` would run the user's script again for each call, and has one server for a whole program, with the
environment that it was started in.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from kerasmem.errors import KerasmemError, UsageError
from kerasmem.processes.children import (
    ChildFailure,
    Limits,
    end_group,
    exit_reason,
    import_paths,
    import_variables,
    start_module,
)

ON_LINUX_ALONE = (
    "a call in a forked process (measure, probe, profile, run_isolated, isolated=True) works on Linux alone; "
    "use method='graph' for an estimate, and keras's own fit in a process that you start yourself"
)
_SERVER_ENDED = "the process that starts the others has ended; call again"
_KEPT_ERRORS = 2**26  # bytes of standard error that are kept to be explained
# Variables that Python, TensorFlow and their libraries read when they are loaded; a call brings all others along.
_READ_AT_START = (
    "TF_", "KERAS_", "XLA_", "JAX_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_",
    "PYTHON", "LD_", "PATH",
)  # fmt: skip
_READ_LATER = ("TF_FORCE_GPU_ALLOW_GROWTH", *import_variables())


class Server(NamedTuple):
    """A running `fork_server`, and the socket to ask it."""

    process: subprocess.Popen[bytes]
    control: socket.socket


_servers: dict[tuple[int, frozenset[tuple[str, str]]], Server] = {}  # by process and variables


def start_server(environ: Mapping[str, str]) -> Server:
    """Return a server for calls with these environment variables. A new one loads its libraries in the background.

    Raises:
        KerasmemError: If none can be started.
    """
    variables = {item for item in environ.items() if item[0].startswith(_READ_AT_START) and item[0] not in _READ_LATER}
    key = os.getpid(), frozenset(variables)
    server = _servers.get(key)
    if server is not None and server.process.poll() is None:
        return server
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (AttributeError, OSError) as error:
        raise KerasmemError(ON_LINUX_ALONE) from error
    with theirs:
        process = start_module(
            "kerasmem.processes.fork_server",
            str(theirs.fileno()),
            environ={**environ, **import_variables()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # TensorFlow's lines at its start; a call has its own
            pass_fds=(theirs.fileno(),),
        )
    _servers[key] = Server(process, ours)
    return _servers[key]


@dataclass(frozen=True)
class ForkedCall:
    """The end of a call in a fork.

    Attributes:
        answer: the fork's answer (see `fork_server`); None if it gave none.
        failure: the limit that was exceeded; None if none was.
        code: the fork's exit code, as `subprocess` has it.
        host_peak: the most that it had resident, in bytes.
        errors: its standard error.
    """

    answer: dict[str, Any] | None
    failure: ChildFailure | None
    code: int
    host_peak: int
    errors: bytes


def run_child(
    function: Callable[..., Any],
    *arguments: Any,
    limits: Limits,
    environ: Mapping[str, str] | None = None,
    device_bytes: int | None = None,
) -> Any:
    """Call a function in a fork, without showing its output, and return its value.

    Args:
        function: to be called. A module of kerasmem, which loads nothing of TensorFlow, is imported before the fork.
        *arguments: for it.
        limits, environ, device_bytes: as for `call_in_fork`.

    Raises:
        ChildFailure: If the child gave no answer; the reason says why.
        KerasmemError: If the function raised it.
    """
    modules = [name for name in (function.__module__,) if name.startswith("kerasmem.")]
    call = call_in_fork(
        function, arguments, {}, limits=limits, environ=environ, device_bytes=device_bytes, output=False,
        modules=modules,
    )  # fmt: skip
    if call.failure is not None:
        raise call.failure
    answer = call.answer
    if answer is None:
        lines = call.errors.decode("utf-8", "replace").split("\n")
        last = next((f": {line.strip()[:300]}" for line in reversed(lines) if line.strip()), "")
        crash = -call.code if call.code < 0 else None
        raise ChildFailure(f"it was ended by {exit_reason(call.code)}{last}", signal=crash)
    if "value" in answer:
        return answer["value"]
    error = answer["error"]
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
    modules: Sequence[str] = (),
) -> ForkedCall:
    """Call a function in a fork, and wait until the fork has ended.

    Args:
        function: to be called; it, its arguments and its result travel by cloudpickle.
        arguments: positional ones.
        named: keyword arguments.
        limits: of time, from the start of the fork, and of resident memory, looked at 20 times a second.
        environ: environment variables. Defaults to this process's.
        device_bytes: that TensorFlow may allocate on each device; None for no limit.
        output: whether to show the function's output.
        modules: to be loaded before the fork and kept for later ones; they load nothing of TensorFlow.

    Raises:
        UsageError: If the function or an argument cannot be sent to another process.
        KerasmemError: If no process can be started, or the answer cannot be read.
    """
    environ = dict(os.environ) if environ is None else environ
    settings = {
        "cwd": os.getcwd(), "path": import_paths(), "argv": sys.argv, "environ": environ,
        "device_bytes": device_bytes, "modules": modules,
    }  # fmt: skip
    server = start_server(environ)
    with contextlib.ExitStack() as files:
        call, answer = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        _write_call(call, function, arguments, named)
        (reports, out, err), writing = zip(*(os.pipe() for _ in range(3)), strict=True)
        for descriptor in (reports, out, err):
            files.callback(os.close, descriptor)  # which ends the fork if it runs: on Ctrl-C
        try:
            sent = (call.fileno(), answer.fileno(), *writing[1:], writing[0])
            socket.send_fds(server.control, [json.dumps(settings).encode()], sent)
        except OSError as error:
            raise KerasmemError(_SERVER_ENDED) from error
        finally:
            for descriptor in writing:
                os.close(descriptor)
        return _follow(reports, {out: "stdout", err: "stderr"}, limits, answer, output)


def _follow(reports: int, streams: dict[int, str], limits: Limits, answer: BinaryIO, output: bool) -> ForkedCall:
    """Pass on the output until the fork has ended, and hold it to its limits."""
    report = _read_report(reports)
    errors = bytearray()

    def pass_on(seconds: float) -> bool:
        """Pass on output, if there is any within that many seconds, and return whether there was."""
        sources = [*streams, *([] if "code" in report else [reports])]
        ready = select.select(sources, [], [], seconds)[0]
        for descriptor in ready:
            if descriptor == reports:
                report.update(_read_report(reports))
                continue
            data = os.read(descriptor, 2**16)
            name = streams[descriptor] if data else streams.pop(descriptor)
            if name == "stderr" and len(errors) < _KEPT_ERRORS:
                errors.extend(data)
            if output:
                _show(name, data)
        return bool(ready)

    def has_ended(seconds: float) -> bool:
        pass_on(seconds)
        return "code" in report

    failure = limits.watch(report["pid"], has_ended, lambda: end_group(report["pid"]))
    while streams and pass_on(0):
        pass
    return ForkedCall(_read_answer(answer), failure, report["code"], report["host_peak"], bytes(errors))


def _read_report(reports: int) -> dict[str, Any]:
    """Return the fields that the server has written."""
    fields: dict[str, Any] = {}
    for line in os.read(reports, 4096).splitlines():
        fields.update(json.loads(line))
    if not fields:
        raise KerasmemError(_SERVER_ENDED)
    return fields


def _show(name: str, data: bytes) -> None:
    stream = getattr(sys, name)
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(data.decode("utf-8", "backslashreplace"))
            stream.flush()


def _read_answer(answer: BinaryIO) -> dict[str, Any] | None:
    answer.seek(0)
    try:
        fields: dict[str, Any] = pickle.load(answer)
    except (EOFError, pickle.UnpicklingError):  # there is none, or it was ended while writing
        return None
    except Exception as error:
        raise KerasmemError(
            f"the result cannot be read here ({type(error).__name__}: {error}); return plain values or arrays"
        ) from error
    return fields


def _write_call(call: BinaryIO, function: Any, arguments: Any, named: Any) -> None:
    import cloudpickle

    try:
        cloudpickle.dump((function, arguments, named), call)
    except Exception as error:  # an object's own way of being pickled may raise anything
        raise UsageError(
            f"{getattr(function, '__qualname__', function)!s} or an argument of it cannot be sent to another process "
            f"({type(error).__name__}: {error}); build models, open files and hold locks inside the function"
        ) from error
    call.flush()
    call.seek(0)
