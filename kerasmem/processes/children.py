"""Start, limit and end child processes, and explain how they ended."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import select
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
SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL
POLL_SECONDS = 0.05
# `python -m` searches the current folder for modules first. PYTHONSAFEPATH prevents that only since Python 3.11.
_RUN_MODULE = """
import sys
sys.path[:] = filter(None, sys.path)
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_outside: dict[str, str] | None = None  # environment variables before `off_the_cards` changed them


class ChildFailure(KerasmemError):
    """A child process ended without an answer.

    Attributes:
        reason: short reason.
        timed_out: whether it exceeded the time limit.
        signal: number of the signal that ended it, or None.
    """

    def __init__(self, reason: str, *, timed_out: bool = False, signal: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.timed_out, self.signal = reason, timed_out, signal


@dataclass(frozen=True)
class Limits:
    """Limits of a child process.

    Attributes:
        seconds: maximum run time. Defaults to None: unlimited.
        host_bytes: maximum resident memory in bytes. Defaults to None: unlimited.
    """

    seconds: float | None = None
    host_bytes: int | None = None

    def watch(self, pid: int, wait: Callable[[float], bool], end: Callable[[], object]) -> ChildFailure | None:
        """Wait until a process has ended, and end it if it exceeds a limit.

        Args:
            pid: process ID.
            wait: function that waits up to the given seconds and returns whether the process has ended.
            end: function that ends the process.

        Returns:
            The failure if a limit was exceeded, otherwise None.
        """
        begin = time.monotonic()
        failure = None
        while not wait(POLL_SECONDS):
            if failure is None and (failure := self._check_limits(pid, time.monotonic() - begin)) is not None:
                end()
        return failure

    def _check_limits(self, pid: int, seconds: float) -> ChildFailure | None:
        if self.seconds is not None and seconds > self.seconds:
            return ChildFailure(f"it took longer than {self.seconds:g} s", timed_out=True)
        if self.host_bytes is None:
            return None
        resident = resident_bytes(pid)
        if resident <= self.host_bytes:
            return None
        size, limit = format_size(resident), format_size(self.host_bytes)
        return ChildFailure(f"it took {size} of host memory, more than the limit of {limit}")


def start_module(
    module: str, *arguments: str, environ: Mapping[str, str] | None = None, own_group: bool = True, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS…` in a child process.

    Args:
        module: name of the module.
        *arguments: command-line arguments.
        environ: all environment variables of the child. Defaults to `child_environment()`.
        own_group: whether it leads a new session and process group, so that Ctrl-C does not reach it, and `end_group`
            also ends its own children. Defaults to True.
        **options: options of `subprocess.Popen`. Standard input is empty by default.
    """
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen(
        [sys.executable, "-c", _RUN_MODULE, module, *arguments],
        env=child_environment() if environ is None else environ,
        start_new_session=own_group,
        **options,
    )


@contextlib.contextmanager
def off_the_cards() -> Iterator[None]:
    """Hide GPUs from TensorFlow and JAX in this process, and let XLA compile without optimization.

    An estimate needs no GPU, which another job may be using. No step runs in this process, so compiled code need not be
    fast. Child processes, which run real steps, see the GPUs and the user's flags.
    """
    global _outside
    from kerasmem.compat.tensorflow_runtime import UNOPTIMISED

    _outside = before = dict(os.environ)
    os.environ.update(
        CUDA_VISIBLE_DEVICES="-1",
        JAX_PLATFORMS=before.get("JAX_PLATFORMS", "cpu"),
        XLA_FLAGS=f"{UNOPTIMISED} {before.get('XLA_FLAGS', '')}".strip(),  # later flags take precedence
    )
    try:
        yield
    finally:
        _outside = None
        for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS"):
            del os.environ[name]
        os.environ.update(before)


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment variables of a child that can import this process's modules."""
    return {**(_outside or os.environ), **import_variables(), **more}


def import_variables() -> dict[str, str]:
    """Return the environment variables that let a child import this process's modules."""
    paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def end_group(pid: int) -> None:
    """Kill the process group that a process leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        getattr(os, "killpg", os.kill)(pid, SIGKILL)


def die_with_parent() -> None:
    """Have the kernel kill this process when the parent thread ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, SIGKILL)  # PR_SET_PDEATHSIG


def end_after_parent() -> None:
    """Exit soon after the parent process has ended in any way.

    Unlike with `die_with_parent`, the thread that started this process may end. If a fork server started this process,
    the parent is the process that requested it.
    """
    forked_by, parent = os.getppid(), multiprocessing.parent_process()

    def watch() -> None:
        while os.getppid() == forked_by and (parent is None or parent.is_alive()):
            time.sleep(10 * POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="kerasmem-parent", daemon=True).start()


def exit_name(code: int) -> str:
    """Describe an exit code: "SIGSEGV" or "exit code 3"."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def exit_reason(code: int) -> str:
    """Describe an exit code, with its usual cause."""
    return exit_name(code) + (", as the system does when memory runs out" if code == -SIGKILL else "")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes, or 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return 0


def continue_in_child(limits: Limits) -> int | None:
    """Fork this program. Return None in the child, and the child's exit code in the parent.

    Commands that read untrusted files continue in a child: a damaged or hostile file can make HDF5, a codec or Keras
    crash, use all memory, or run forever. Call it in a process with one thread, before heavy imports.

    Args:
        limits: limits of the child.

    Raises:
        ChildFailure: If the child exceeded a limit, or a signal ended it.
        KeyboardInterrupt: If Ctrl-C ended it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    ended, running = os.pipe()
    pid = os.fork()
    if not pid:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)  # the parent has ended
        return None
    os.close(running)  # the child's copy is closed when the child ends
    with open(ended, "rb", buffering=0):
        return _watch(pid, ended, limits)


def _watch(pid: int, ended: int, limits: Limits) -> int:
    """Wait for the child. Return its exit code."""
    code: int | None = None

    def has_ended(seconds: float) -> bool:
        nonlocal code
        options = 0 if select.select([ended], [], [], seconds)[0] else os.WNOHANG
        waited, status = os.waitpid(pid, options)
        code = os.waitstatus_to_exitcode(status) if waited else None
        return code is not None

    try:
        failure = limits.watch(pid, has_ended, lambda: os.kill(pid, SIGKILL))
    except KeyboardInterrupt:  # a terminal also signals the child; other programs may not
        if not has_ended(0.3):
            os.kill(pid, signal.SIGINT)
            Limits(seconds=1.7).watch(pid, has_ended, lambda: os.kill(pid, SIGKILL))
        if code is None or code < 0:
            raise
        return code
    assert code is not None
    if failure is None and code < 0:
        failure = ChildFailure(f"the process was ended by {exit_reason(code)}", signal=-code)
    if failure is not None:
        raise failure
    return code
