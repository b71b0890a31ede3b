"""Send many requests to one child process: objects with large arrays, pickled over a socket without a copy.

The parent process creates a `ChannelChild`; the child's module calls `serve_requests`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, BinaryIO

from kerasmem.errors import KerasmemError
from kerasmem.processes.children import child_environment, die_with_parent, start_module

_BUFFER_BYTES = 2**22
_SECONDS_TO_END = 5
_CLOSED = (EOFError, OSError, pickle.UnpicklingError)


class ChildEnded(Exception):
    """The child ended before it answered.

    Attributes:
        code: exit code, negative for a signal.
        messages: file with its standard error.
    """

    def __init__(self, code: int, messages: BinaryIO) -> None:
        super().__init__(code)
        self.code, self.messages = code, messages


class ChannelChild:
    """A child process that answers requests in order.

    The child ignores Ctrl-C and ends when this process ends.

    Args:
        module: module that the child runs. It calls `serve_requests`.
        **environ: additional environment variables.

    Attributes:
        pid: process ID of the child.
    """

    def __init__(self, module: str, **environ: str) -> None:
        if os.name == "nt":
            raise KerasmemError("steps in a child process (XLA, isolated=True) need Linux or macOS; use WSL")
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
        self.pid = self._process.pid
        with ours:  # the file object keeps the socket open
            self._channel = ours.makefile("rwb")

    def ask(self, request: Any) -> Any:
        """Send a request and wait for its answer.

        Raises:
            ChildEnded: If the child ended without an answer. It is closed.
        """
        try:
            _send(self._channel, request)
            return pickle.load(self._channel)
        except _CLOSED:
            self._close_channel()
            raise ChildEnded(self._process.wait(), self._messages) from None
        except BaseException:  # after Ctrl-C within an answer, the channel is out of step
            self._process.kill()
            self.close()
            raise

    def close(self) -> None:
        """End the child, by force after a few seconds."""
        self._close_channel()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._messages.close()

    def _close_channel(self) -> None:
        with contextlib.suppress(OSError):  # the child has ended
            self._channel.close()


def serve_requests(answer: Callable[[Any], tuple[Any, bool]]) -> None:
    """Answer requests until the parent closes the channel, then exit immediately.

    Args:
        answer: function that takes a request and returns the answer and whether to continue.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    channel = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
    continues = True
    with contextlib.suppress(*_CLOSED):
        while continues:
            message, continues = answer(pickle.load(channel))
            _send(channel, message)
    sys.stdout.flush()
    os._exit(0)


def _send(channel: Any, message: Any) -> None:
    pickle.dump(message, channel, protocol=5)
    channel.flush()
