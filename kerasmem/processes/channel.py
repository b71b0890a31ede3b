"""Many requests to one child process, with objects and large arrays: arrays go over a socket as they lie in memory.

The parent holds a `ChannelChild`; the child's module ends with `serve_requests`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, BinaryIO

from kerasmem.errors import KerasmemError
from kerasmem.processes.children import child_environment, die_with_parent, start_module

_HEAD = struct.Struct("!QQ")
_BUFFER_BYTES = 2**22
_SECONDS_TO_END = 5


class ChildEnded(Exception):
    """The child ended before it answered.

    Attributes:
        code: its exit code, as `subprocess` has it.
        messages: its standard error.
    """

    def __init__(self, code: int, messages: BinaryIO) -> None:
        super().__init__(code)
        self.code, self.messages = code, messages


class ChannelChild:
    """A child process that answers requests, one after the other.

    Ctrl-C is left to this process. The child ends with it, however it ends.

    Args:
        module: the child's module; it calls `serve_requests`.
        **environ: environment variables beside this process's own.
    """

    def __init__(self, module: str, **environ: str) -> None:
        if os.name == "nt":
            raise KerasmemError("steps in a process of their own (XLA, isolated=True) need Linux or macOS; use WSL")
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self._process = start_module(
                module,
                str(theirs.fileno()),
                environ=child_environment(**environ),
                own_group=False,
                pass_fds=[theirs.fileno()],
                stderr=self._messages,
            )
        self._socket = ours

    @property
    def pid(self) -> int:
        """The child's number."""
        return self._process.pid

    def ask(self, request: Any) -> Any:
        """Send a request and wait for its answer.

        Raises:
            ChildEnded: If there is none; the child is then closed.
        """
        try:
            _send(self._socket, request)
            return _receive(self._socket)
        except (EOFError, OSError):
            self._socket.close()
            raise ChildEnded(self._process.wait(), self._messages) from None
        except BaseException:  # Ctrl-C in the middle of an answer: nothing can be asked any more
            self._process.kill()
            self.close()
            raise

    def close(self) -> None:
        """Have the child end."""
        self._socket.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._messages.close()


def serve_requests(answer: Callable[[Any], tuple[Any, bool]]) -> None:
    """Answer requests until the other end is closed, and end this process at once.

    Args:
        answer: takes a request, and returns the answer and whether to go on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    end = socket.socket(fileno=int(sys.argv[1]))
    goes_on = True
    with contextlib.suppress(EOFError, OSError):
        while goes_on:
            message, goes_on = answer(_receive(end))
            _send(end, message)
    sys.stdout.flush()
    os._exit(0)


def _send(end: socket.socket, message: Any) -> None:
    """Send an object."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    lengths = struct.pack(f"!{len(views)}Q", *(view.nbytes for view in views))
    end.sendall(_HEAD.pack(len(data), len(views)) + lengths + data)
    for view in views:
        end.sendall(view)


def _receive(end: socket.socket) -> Any:
    """Wait for an object. Both ends are processes of ours, for what is read is unpickled.

    Raises:
        EOFError: If the other end is gone.
    """
    size, count = _HEAD.unpack(_exactly(end, _HEAD.size))
    lengths = struct.unpack(f"!{count}Q", _exactly(end, 8 * count))
    data = _exactly(end, size)
    return pickle.loads(data, buffers=[_exactly(end, length) for length in lengths])


def _exactly(end: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        read = end.recv_into(view)
        if read == 0:
            raise EOFError
        view = view[read:]
    return data
