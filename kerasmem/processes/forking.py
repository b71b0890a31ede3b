"""A function called in a fork of a process that has loaded TensorFlow: one such process, as long as it suits."""

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
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from kerasmem.errors import KerasmemError, UsageError
from kerasmem.processes.children import (
    ChildFailure,
    Limits,
    child_environment,
    end_group,
    import_paths,
    start_module,
)

MODULE = "kerasmem.processes.fork_server"
ON_LINUX_ALONE = (
    "a call in a forked process (measure, probe, profile, run_isolated, isolated=True) works on Linux alone; "
    "use method='graph' for an estimate, and keras's own fit in a process that you start yourself"
)
_POLL_SECONDS = 0.05
_KEPT_ERRORS = 2**26  # bytes of standard error that are kept to be explained
# Variables that Python, TensorFlow and their libraries read when they are loaded; a call brings all others along.
_READ_AT_START = ("TF_", "KERAS_", "XLA_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_", "PYTHON", "LD_", "PATH")


class ServerEnded(KerasmemError):
    """The process that starts the others is gone."""


class Server:
    """A running server.

    Attributes:
        has_ended: it was found to be gone.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self.read, self.owner = _read_at_start(os.environ), os.getpid()
        try:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except (AttributeError, OSError) as error:
            raise KerasmemError(ON_LINUX_ALONE) from error
        with theirs:
            self.process = start_module(
                MODULE,
                str(theirs.fileno()),
                environ=child_environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what TensorFlow says when it is loaded; a call has its own
                pass_fds=(theirs.fileno(),),
            )

    def ask(self, settings: Mapping[str, object], descriptors: Sequence[int]) -> None:
        """Send a request.

        Raises:
            ServerEnded: If it is gone.
        """
        try:
            socket.send_fds(self._socket, [json.dumps(settings).encode()], list(descriptors))
        except OSError as error:
            self.has_ended = True
            raise ServerEnded(f"the process that starts others cannot be asked: {error.strerror or error}") from None

    def is_good_for(self, environ: Mapping[str, str]) -> bool:
        """Return whether it runs, belongs to this process, and has these variables."""
        runs = not self.has_ended and self.owner == os.getpid() and self.process.poll() is None
        return runs and self.read == _read_at_start(environ)


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_START)}


_servers: list[Server] = []


def current_server() -> Server:
    """Return a server that was started with those of today's environment variables that are read at a start.

    Raises:
        KerasmemError: If none can be started.
    """
    for server in _servers:
        if server.is_good_for(os.environ):
            return server
    # Calls of other threads may still run under the others: those end with this process.
    _servers[:] = [each for each in _servers if each.owner == os.getpid()]
    server = Server()
    _servers.append(server)
    return server


class ForkedCall:
    """A function, called in a fork.

    Args:
        function: to be called; it, its arguments and its result travel by cloudpickle.
        arguments: positional ones.
        named: keyword arguments.
        limits: of time, from the start of the fork, and of resident memory, looked at 20 times a second.
        device_bytes: that TensorFlow may allocate on each device; None for no limit.
        output: whether to show the function's output.
        modules: of this package, to be loaded before the fork and kept for later ones; such that load, and do, nothing
            of TensorFlow.

    Attributes:
        failure: the limit that was exceeded; None if none was.
        code: the fork's exit code, as `subprocess` has it.
        host_peak: the most that it had resident, in bytes.
        errors: its standard error.

    Raises:
        UsageError: If the function or an argument cannot be sent to another process.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        named: Mapping[str, Any],
        *,
        limits: Limits,
        device_bytes: int | None = None,
        output: bool = True,
        modules: Sequence[str] = (),
    ) -> None:
        self.failure: ChildFailure | None = None
        self.code: int | None = None
        self.host_peak = 0
        self._limits, self._device_bytes, self._output = limits, device_bytes, output
        self._modules = list(modules)
        self._pid: int | None = None
        self._started = time.monotonic()
        with contextlib.ExitStack() as files:
            self._call, self._answer, self.errors = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            _write_call(self._call, function, arguments, named)
            self._files = files.pop_all()

    def __enter__(self) -> ForkedCall:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def run(self) -> None:
        """Make the call, and wait until the fork has ended.

        Raises:
            KerasmemError: If no process can be started, or the server has ended.
        """
        try:
            self._run()
        except ServerEnded:  # before the function was called; a new one is started
            self._call.seek(0)
            self._run()

    def answer(self) -> dict[str, Any] | None:
        """Return the fork's answer (see `fork_server`), or None.

        Raises:
            KerasmemError: If the answer cannot be read.
        """
        if not self._answer.seek(0, os.SEEK_END):
            return None
        self._answer.seek(0)
        try:
            found: dict[str, Any] = pickle.load(self._answer)
        except (EOFError, pickle.UnpicklingError):  # it was ended while writing
            return None
        except Exception as error:
            raise KerasmemError(
                f"the result cannot be read here ({type(error).__name__}: {error}); return plain values or arrays"
            ) from error
        return found

    def _run(self) -> None:
        server = current_server()
        settings = {
            "cwd": os.getcwd(), "path": import_paths(), "argv": sys.argv, "environ": dict(os.environ),
            "device_bytes": self._device_bytes, "modules": self._modules,
        }  # fmt: skip
        with contextlib.ExitStack() as pipes:
            (reports, out, err), writing = zip(*(os.pipe() for _ in range(3)), strict=True)
            for descriptor in (reports, out, err):
                pipes.callback(os.close, descriptor)
            try:
                server.ask(settings, (self._call.fileno(), self._answer.fileno(), *writing[1:], writing[0]))
            finally:
                for descriptor in writing:
                    os.close(descriptor)
            try:
                self._follow(server, reports, {out: "stdout", err: "stderr"})
            except BaseException:  # also on Ctrl-C
                self._end()
                raise

    def _follow(self, server: Server, reports: int, streams: dict[int, str]) -> None:
        """Pass on the output until the fork has ended, and hold it to its limits."""
        while self.code is None:
            for descriptor in select.select([reports, *streams], [], [], _POLL_SECONDS)[0]:
                if descriptor == reports:
                    self._read_report(descriptor, server)
                else:
                    self._pass_on(descriptor, streams)
            if self._pid is not None and self.failure is None:
                self.failure = self._limits.exceeded(self._pid, self._started)
                if self.failure is not None:
                    self._end()
        while streams and (ready := select.select(list(streams), [], [], 0)[0]):
            for descriptor in ready:
                self._pass_on(descriptor, streams)

    def _read_report(self, reports: int, server: Server) -> None:
        text = os.read(reports, 4096)
        if not text and self._pid is None:
            server.has_ended = True
            raise ServerEnded("no process could be started: the one that starts them has ended")
        if not text:
            raise KerasmemError("the process that starts the others has ended; call run_isolated again")
        for line in text.decode().splitlines():
            data = json.loads(line)
            if "pid" in data:
                self._pid, self._started = data["pid"], time.monotonic()
            else:
                self.code, self.host_peak = data["code"], data["host_peak"]

    def _pass_on(self, descriptor: int, streams: dict[int, str]) -> None:
        """Show the function's output, and keep its standard error."""
        data = os.read(descriptor, 2**16)
        if not data:
            del streams[descriptor]
            return
        name = streams[descriptor]
        if name == "stderr" and self.errors.tell() < _KEPT_ERRORS:
            self.errors.write(data)
        stream = getattr(sys, name)
        if self._output and stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.write(data.decode("utf-8", "backslashreplace"))
                stream.flush()

    def _end(self) -> None:
        if self._pid is not None and self.code is None:
            end_group(self._pid)


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
