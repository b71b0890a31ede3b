"""Common parts of child processes: start, limits, end and its reason."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kerasmem.errors import KerasmemError
from kerasmem.units import format_size

GOES_ON = "KERASMEM_RUN_GOES_ON"  # set for a script that is run again and resumes
SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # on Windows, which ends a process by the other one
POLL_SECONDS = 0.05
_PARENT_POLL_SECONDS = 0.5
# `python -m` looks for modules in the folder it starts in, before all others. PYTHONSAFEPATH keeps it from that; Python
# 3.10 does not know the variable.
_RUN_MODULE = """
import sys
del sys.path[0]
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_hidden: dict[str, str | None] = {}  # the children's values of variables that this process has set for itself alone


class ChildFailure(KerasmemError):
    """A child process gave no answer.

    Attributes:
        reason: why, in a few words.
        timed_out: it took longer than it may.
        signal: the number of the signal that ended it; None if it ended otherwise.
    """

    def __init__(self, reason: str, *, timed_out: bool = False, signal: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.timed_out, self.signal = reason, timed_out, signal


@dataclass(frozen=True)
class Limits:
    """Limits of a child process.

    Attributes:
        seconds: of time.
        host_bytes: of resident memory.
    """

    seconds: float | None = None
    host_bytes: int | None = None

    def watch(
        self, pid: int, wait: Callable[[float], bool], end: Callable[[], object], *, with_children: bool = False
    ) -> ChildFailure | None:
        """Wait until a process has ended, and end it if it exceeds a limit.

        Args:
            pid: of the process.
            wait: waits up to that many seconds, and returns whether the process has ended.
            end: ends the process.
            with_children: count the memory of processes that it has started.

        Returns:
            The limit that was exceeded, or None.
        """
        begin = time.monotonic()
        failure = None
        while not wait(POLL_SECONDS):
            if failure is None:
                failure = self._exceeded(pid, time.monotonic() - begin, with_children)
                if failure is not None:
                    end()
        return failure

    def _exceeded(self, pid: int, seconds: float, with_children: bool) -> ChildFailure | None:
        if self.seconds is not None and seconds > self.seconds:
            return ChildFailure(f"it took longer than {self.seconds:g} s", timed_out=True)
        if self.host_bytes is None:
            return None
        resident = sum(map(resident_bytes, [pid, *descendants(pid)] if with_children else [pid]))
        if resident <= self.host_bytes:
            return None
        took, most = format_size(resident), format_size(self.host_bytes)
        return ChildFailure(f"it took {took} of host memory, more than the {most} it may have")


def start_module(
    module: str, *arguments: str, environ: Mapping[str, str] | None = None, own_group: bool = True, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS…`.

    Args:
        module: the child's module.
        *arguments: for it.
        environ: all environment variables of the child. Defaults to `child_environment()`.
        own_group: whether it leads a process group and session of its own, so that Ctrl-C does not reach it and
            `end_group` ends what it has started, too.
        **options: for `subprocess.Popen`. Standard input is empty by default.

    Raises:
        KerasmemError: If no process can be started.
    """
    options.setdefault("stdin", subprocess.DEVNULL)
    try:
        return subprocess.Popen(
            [sys.executable, *(["-m"] if sys.version_info >= (3, 11) else ["-c", _RUN_MODULE]), module, *arguments],
            env=child_environment() if environ is None else environ,
            start_new_session=own_group,
            **options,
        )
    except OSError as error:
        raise KerasmemError(f"no process can be started: {error.strerror or error}") from error


@contextlib.contextmanager
def off_the_cards() -> Iterator[None]:
    """Hide the cards from TensorFlow and JAX in this process, and let XLA compile without optimization.

    An estimate needs no GPU, and a job may be running on it. No step runs in this process, so compiled code need not be
    fast. Children, which run real steps, see the cards and the user's flags.
    """
    from kerasmem.compat.tensorflow_runtime import UNOPTIMISED

    variables = {
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
        "XLA_FLAGS": f"{UNOPTIMISED} {os.environ.get('XLA_FLAGS', '')}".strip(),  # the user's own flags override
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    _hidden.update(before)
    try:
        yield
    finally:
        for name, value in before.items():
            del _hidden[name]
            del os.environ[name]
            os.environ.update({} if value is None else {name: value})


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment variables of a child that finds this process's modules."""
    variables = {name: value for name, value in {**os.environ, **_hidden}.items() if value is not None}
    return {**variables, **import_variables(), **more}


def import_variables() -> dict[str, str]:
    """Return the environment variables that let a child find this process's modules."""
    return {"PYTHONPATH": os.pathsep.join(import_paths()), "PYTHONSAFEPATH": "1"}


def import_paths() -> list[str]:
    """Return this process's folders of modules."""
    return [os.path.abspath(path) for path in sys.path if isinstance(path, str)]


def end_group(pid: int) -> None:
    """End a process that leads a group, and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        getattr(os, "killpg", os.kill)(pid, SIGKILL)


def die_with_parent() -> None:
    """Have the system end this process when its parent ends without having time to do so."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, SIGKILL)  # PR_SET_PDEATHSIG


def end_after_parent() -> None:
    """End this process soon after its parent has ended, however that ended.

    Unlike `die_with_parent` this goes by the process: the thread that started this one may end without harm.
    If a fork server started this process, the parent is the process that asked for it.
    """
    forked_by, parent = os.getppid(), multiprocessing.parent_process()

    def watch() -> None:
        while os.getppid() == forked_by and (parent is None or parent.is_alive()):
            time.sleep(_PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="kerasmem-parent", daemon=True).start()


def exit_name(code: int) -> str:
    """Name the end of a process by its exit code: "SIGSEGV" or "exit code 3"."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def is_memory_kill(code: int) -> bool:
    """Return whether a process ended as one that the kernel kills when the host's memory runs out."""
    return code == -SIGKILL


def exit_reason(code: int) -> str:
    """Return `exit_name` with its usual cause."""
    return exit_name(code) + (", as the system does when memory runs out" if is_memory_kill(code) else "")


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process, or 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return 0


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, at any depth."""
    pids: list[int] = []
    pending = [pid]
    while pending:
        for path in glob.glob(f"/proc/{pending.pop()}/task/*/children"):
            with contextlib.suppress(OSError), open(path) as file:  # it may just have ended
                children = [int(text) for text in file.read().split()]
                pids += children
                pending += children
    return pids
