"""A process that has loaded TensorFlow and Keras, touched nothing of them, and forks itself for each call.

Loading TensorFlow takes seconds, a fork of a process that has loaded it milliseconds. TensorFlow starts its devices and
threads with its first operation, so a fork before it is a fresh process to it; this process never runs one.

Requests come over a socket: JSON, and the descriptors of four files, `call`, `answer`, standard output and standard
error, and of a pipe. Into the pipe go the number of the forked process, and at its end its exit status and the most
memory it had. When the socket is closed, all that was forked is ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from kerasmem.processes.children import end_group

MOST_BYTES = 2**20  # of a request: folders and arguments, not the call
_FILES = 5


def serve(control: socket.socket) -> None:
    """Answer requests until the socket is closed."""
    _load(("tensorflow", "keras") if os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow" else ())
    forked: dict[int, tuple[int, int]] = {}  # the descriptor of a process -> its number, its pipe
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                selector.unregister(key.fileobj)
                _report(key.fd, *forked.pop(key.fd))
                continue
            request, files, _, _ = socket.recv_fds(control, MOST_BYTES, _FILES)
            if not request:
                for pid, _ in forked.values():
                    end_group(pid)
                return
            call, answer, out, err, pipe = files
            settings = json.loads(request)
            _load(settings["modules"])
            pid = os.fork()
            if pid == 0:
                selector.close()
                control.close()
                for descriptor, (_, other) in forked.items():
                    os.close(descriptor)
                    os.close(other)
                os.close(pipe)
                _become_the_child(settings, call, answer, out, err)
            with contextlib.suppress(OSError):  # the child does so too; whoever comes first
                os.setpgid(pid, pid)
            _write(pipe, {"pid": pid})
            for descriptor in (call, answer, out, err):
                os.close(descriptor)
            watched = os.pidfd_open(pid)
            forked[watched] = (pid, pipe)
            selector.register(watched, selectors.EVENT_READ)


def _load(modules: Iterable[str]) -> None:
    """Import modules, once for all calls."""
    missing = [name for name in modules if name not in sys.modules]
    for name in missing:
        with contextlib.suppress(Exception):  # the call itself will say what is wrong
            importlib.import_module(name)
    if missing:
        gc.freeze()  # a collection in a fork need not copy every page of what was loaded here


def _become_the_child(settings: dict[str, Any], call: int, answer: int, out: int, err: int) -> NoReturn:
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, errors="backslashreplace")
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
        from kerasmem.processes.forked_call import run

        with open(call, "rb") as request, open(answer, "wb") as result:
            run(request, result, settings)
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)  # TensorFlow's own end may hang or crash after a failure


def _report(descriptor: int, pid: int, pipe: int) -> None:
    """Say how a process ended."""
    end_group(pid)  # what it has started itself, while its number still is its own
    _, status, used = os.wait4(pid, 0)
    os.close(descriptor)
    _write(pipe, {"code": os.waitstatus_to_exitcode(status), "host_peak": used.ru_maxrss * 1024})
    os.close(pipe)


def _write(pipe: int, report: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # nobody is listening any more
        os.write(pipe, json.dumps(report).encode() + b"\n")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
