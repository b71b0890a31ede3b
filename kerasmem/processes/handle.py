"""The process that starts the others, as seen from here: one for as long as its surroundings stay the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from kerasmem.errors import KerasmemError

MODULE = "kerasmem.processes.server"
# Variables that Python, TensorFlow and what lies beneath read when they are loaded; all others a call takes with it.
_READ_AT_START = ("TF_", "KERAS_", "XLA_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_", "PYTHON", "LD_", "PATH")


class ServerEnded(KerasmemError):
    """The process that starts the others is not there any more."""


class Server:
    """A running server.

    Args:
        environ: its environment variables.

    Attributes:
        has_ended: it was found to be gone.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.has_ended = False
        self.read, self.owner = _read_at_start(environ), os.getpid()
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [os.path.abspath(each) for each in sys.path if isinstance(each, str)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what TensorFlow says when it is loaded; a call has its own
                pass_fds=(there.fileno(),),
                start_new_session=True,  # Ctrl-C is for the process that asks
                env={**environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError as error:
            raise KerasmemError(f"no process can be started: {error.strerror or error}") from error
        finally:
            there.close()

    def ask(self, settings: Mapping[str, object], descriptors: Sequence[int]) -> None:
        """Send a request.

        Raises:
            ServerEnded: it is not there.
        """
        try:
            socket.send_fds(self._here, [json.dumps(settings).encode()], list(descriptors))
        except OSError as error:
            self.has_ended = True
            raise ServerEnded(f"the process that starts others cannot be asked: {error.strerror or error}") from None

    def is_good_for(self, environ: Mapping[str, str]) -> bool:
        """Return whether it runs, belongs to this process, and has these variables."""
        runs = not self.has_ended and self.owner == os.getpid() and self._process.poll() is None
        return runs and self.read == _read_at_start(environ)

    def close(self) -> None:
        """Let it go: it ends what it has started, and itself."""
        self._here.close()
        if self.owner == os.getpid():
            self._process.wait()


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_START)}


_lock = threading.Lock()
_servers: list[Server] = []


def current_server() -> Server:
    """Return a server whose environment variables are, as far as they are read at the start, those of now.

    Raises:
        KerasmemError: none can be started.
    """
    with _lock:
        environ = dict(os.environ)
        for server in _servers:
            if server.is_good_for(environ):
                return server
        # Calls of other threads may still run under the others: those end with this process.
        _servers[:] = [each for each in _servers if each.owner == os.getpid()]
        server = Server(environ)
        _servers.append(server)
        return server


if hasattr(os, "register_at_fork"):

    def _after_fork() -> None:
        global _lock
        _lock = threading.Lock()

    os.register_at_fork(after_in_child=_after_fork)
