"""A Python that has loaded TensorFlow and Keras already: to be run, from a test, in place of `sys.executable`.

Loading both takes seconds of a processor, a fork milliseconds; TensorFlow starts its devices and threads with its first
operation, so that a fork before it is a new process to it. `executable()` returns a command that takes the arguments of
`python`. It is a small program (`run_in_fork`) that asks a process that has loaded both (`serve`) to fork, hands its
descriptors, variables and folder on, passes signals on, and ends as the fork does. When it is killed, the fork is.
Where Python or TensorFlow have to start in another way than the forks do, it becomes a new Python.

The fork is a child of the server, not of the program that is waited for: tests of memory, of process trees and of what
is imported run `sys.executable`.
"""

from __future__ import annotations

import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

# Read when Python, TensorFlow, Keras and what they use are loaded; each set of them has a server of its own.
_READ_AT_START = ("PYTHON", "TF_", "KERAS_", "XLA_", "JAX_", "OMP_", "MKL_", "OPENBLAS_", "LD_")
# Read later, or, as for Keras's backend, the same for all forks.
_READ_LATER = ("PYTHONPATH", "PYTHONSAFEPATH", "KERAS_BACKEND", "TF_CONFIG", "TF_CPU_", "TF_GPU_", "TF_FORCE_GPU_")
_OTHERS = ("TF_CLI_",)  # Terraform's
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # forks are as quiet as all tests, but for those that ask for the whole log
_MOST_BYTES, _MOST_FILES = 2**20, 64


# In the tests

NEW_PYTHON = sys.executable


def executable() -> str:
    """Return the path of the command; what it starts ends with this process."""
    if not _made or _made[0] != os.getpid():
        import shlex
        import tempfile

        # The workers of pytest-xdist share one folder, and thereby the servers.
        shared = os.environ.get("PYTEST_XDIST_TESTRUNUID")
        owner = os.getppid() if shared else os.getpid()
        folder = os.path.join(tempfile.gettempdir(), f"loaded-{shared}") if shared else tempfile.mkdtemp("-loaded")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, "python")
        command = [NEW_PYTHON, "-I", "-S", os.path.abspath(__file__), folder, str(owner)]
        with open(f"{path}-{os.getpid()}", "w") as file:
            file.write(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        os.chmod(file.name, 0o700)
        os.rename(file.name, path)
        _made[:] = [os.getpid(), path]
    return str(_made[1])


def fork_of(pid: int) -> int | None:
    """Return the number of the fork that a program which was started so has asked for, if it has one yet."""
    try:
        with open(os.path.join(os.path.dirname(executable()), f"fork-{pid}")) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


_made: list[object] = []


# In the program that is started


def run_in_fork(folder: str, owner: str, words: list[str]) -> NoReturn:
    """Do what `python WORDS…` does, in a fork of a process that has loaded TensorFlow."""
    import json
    import signal

    if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")) or _other_backend():
        os.execv(sys.executable, [sys.executable, *words])
    server = _connected(folder, owner)
    given = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_inherited(number)]
    request = {"words": words, "environ": dict(os.environ), "cwd": os.getcwd(), "files": given}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: server.send(bytes([number])))
    path = os.path.join(folder, f"request-{os.getpid()}")  # variables and code may be longer than a message
    with open(path, "w") as file:
        json.dump(request, file)
    socket.send_fds(server, [path.encode()], given)
    ended = server.recv(64)
    code = int(ended) if ended else 1
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _other_backend() -> bool:
    return os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow"


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # of the listing itself
        return False


def _connected(folder: str, owner: str) -> socket.socket:
    """Return a connection to the server for these variables, which is started if there is none."""
    import fcntl
    import hashlib
    import subprocess

    read = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_READ_AT_START) and not name.startswith((*_READ_LATER, *_OTHERS))
    }
    read[_LOG_LEVEL] = "0" if os.environ.get(_LOG_LEVEL) == "0" else "3"
    path = os.path.join(folder, hashlib.sha256(repr(sorted(read.items())).encode()).hexdigest()[:16])
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            environ = {name: value for name, value in os.environ.items() if not name.startswith(_READ_LATER)} | read
            command = [sys.executable, __file__, "serve", path, owner, os.path.join(folder, "python")]
            started = subprocess.Popen(command, start_new_session=True, env=environ, cwd="/", **quiet)
            assert started.stdout is not None
            started.stdout.readline()
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.connect(path)
    return made


# In the server


def serve(path: str, owner: str, command: str) -> None:
    """Fork for each connection, until the process `owner` has ended."""
    import gc
    import importlib
    import selectors
    import shutil

    gc.disable()
    for name in ("tensorflow", "keras", "h5py"):
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # a collection in a fork need not copy every page of what was loaded here
    sys.executable = command
    sys.modules["loaded_python"] = sys.modules["__main__"]  # which knows the new Python
    selector = selectors.DefaultSelector()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    selector.register(listener, selectors.EVENT_READ, "client")
    selector.register(os.pidfd_open(int(owner)), selectors.EVENT_READ, "owner")
    os.write(1, b"listening\n")
    forks: dict[socket.socket, int] = {}
    while True:
        for key, _ in selector.select():
            if key.data == "owner":
                for pid in forks.values():
                    _send(pid, 9)
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
                os._exit(0)
            elif key.data == "client":
                client = listener.accept()[0]
                pid = _forked(*socket.recv_fds(client, _MOST_BYTES, _MOST_FILES)[:2])
                forks[client] = pid
                selector.register(client, selectors.EVENT_READ, pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, client)
            elif isinstance(key.data, int):  # a signal for a fork; or the program that waits for it has ended
                if key.data in forks.values():  # it has not ended in the same moment
                    said = _received(key.fileobj)
                    _send(key.data, said[0] if said else 9)
                    if not said:
                        selector.unregister(key.fileobj)
            else:
                client = key.data
                _end(client, forks.pop(client))
                selector.unregister(key.fileobj)
                os.close(key.fd)
                if client in {each.fileobj for each in selector.get_map().values()}:
                    selector.unregister(client)
                client.close()


def _received(client: socket.socket) -> bytes:
    try:
        return client.recv(64)
    except OSError:
        return b""


def _send(pid: int, number: int) -> None:
    import contextlib

    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number) if number == 9 else os.kill(pid, number)


def _end(client: socket.socket, pid: int) -> None:
    import contextlib

    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        client.send(str(code).encode())


def _forked(path: bytes, files: list[int]) -> int:
    """Fork; in the fork, become the program that a request is about, and end."""
    import fcntl
    import json
    import signal
    import threading

    pid = os.fork()
    if pid:
        for descriptor in files:
            os.close(descriptor)
        with open(path.replace(b"request-", b"fork-"), "w") as file:
            file.write(str(pid))
        return pid
    os.setsid()
    code = 1
    try:
        with open(path) as file:
            request = json.load(file)
        os.unlink(path)
        kept = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 500) for each in files]
        os.closerange(3, 500)
        for number, descriptor in zip(request["files"], kept, strict=True):
            os.dup2(descriptor, number)
        os.closerange(500, 500 + 2 * _MOST_FILES)
        code = _run_main(request["words"], request["environ"], request["cwd"])
        threading._shutdown()
        import atexit

        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        os._exit(code)


def _run_main(words: list[str], environ: dict[str, str], cwd: str) -> int:
    """Do what `python WORDS…` does but for its end; return the exit code, or of a signal the negative."""
    import traceback

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        number = ("stdin", "stdout", "stderr").index(name)
        errors = "backslashreplace" if name == "stderr" else None
        setattr(sys, name, open(number, mode, closefd=False, errors=errors))  # noqa: SIM115
    sys.stderr.reconfigure(line_buffering=True)
    sys.modules["numpy"].random.seed()  # forks of one process would draw the same numbers
    here = [] if environ.get("PYTHONSAFEPATH") else [_first_path(words)]
    sys.path[:] = [*here, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    sys.argv[:] = words if not words[0].startswith("-") else [words[0], *words[2:]]
    try:
        _program(words)()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException as error:
        traceback.print_exc()
        return -2 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _first_path(words: list[str]) -> str:
    return {"-c": "", "-m": os.getcwd()}.get(words[0], os.path.dirname(os.path.realpath(words[0])))


def _program(words: list[str]) -> Callable[[], object]:
    import runpy
    import types

    if words[0] == "-m":
        return lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        return lambda: exec(compile(words[1], "<string>", "exec"), main.__dict__)
    main.__file__ = words[0]
    with open(words[0], "rb") as file:
        code = compile(file.read(), words[0], "exec")
    return lambda: exec(code, main.__dict__)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        run_in_fork(sys.argv[1], sys.argv[2], sys.argv[3:])
