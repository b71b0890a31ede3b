"""Run the rest of a program that reads untrusted files in a child process.

A damaged or hostile file can make HDF5, a codec or Keras crash, take all memory, or never end. The program forks
before anything heavy is loaded: the child does the work, and the parent sees to the limits, to Ctrl-C and to a message.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator

from kerasmem.errors import KerasmemError
from kerasmem.processes.children import POLL_SECONDS, SIGKILL, Limits, die_with_parent, exit_reason

_PATIENCE = ((0.3, signal.SIGINT), (1.7, SIGKILL))  # after Ctrl-C: seconds until the child gets a signal
_listener: Callable[[str], object] | None = None  # shows what is being done
_stages: int | None = None  # in the child: the pipe that tells the parent what it is doing


class GuardedFailure(KerasmemError):
    """The child that did the program's work was ended, or crashed.

    Attributes:
        stage: its stage.
        reason: why it ended, in a few words.
        timed_out: it took longer than it may.
        crashed: it ended by itself, within its limits.
    """

    def __init__(self, stage: str, reason: str, *, timed_out: bool = False, crashed: bool = False) -> None:
        super().__init__(f"while {stage}: {reason}")
        self.stage, self.reason, self.timed_out, self.crashed = stage, reason, timed_out, crashed


@contextlib.contextmanager
def told_of_stages(listener: Callable[[str], object]) -> Iterator[None]:
    """Have a function called with each stage as long as the context lasts: to show it."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def note_stage(text: str) -> None:
    """Report the current stage, such as "opening model.h5", to the parent and the listener."""
    if _listener is not None:
        _listener(text)
    if _stages is not None:
        os.write(_stages, text.replace("\n", " ").encode(errors="replace")[:1000] + b"\n")


def go_on_in_child(stage: str, limits: Limits) -> int | None:
    """Fork, and return None in the child and the child's exit code in the parent.

    Only for a process of one thread that has loaded nothing heavy yet.

    Args:
        stage: the first stage of the child.
        limits: of time and of resident memory, that of processes which the child starts included.

    Raises:
        GuardedFailure: If the child exceeded a limit, or a signal ended it.
        KeyboardInterrupt: If it was ended by Ctrl-C.
    """
    global _stages
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    stages, _stages = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(stages)
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)  # it has ended meanwhile
        return None
    os.close(_stages)
    _stages = None
    with open(stages, "rb", buffering=0):
        return _watch(pid, stages, stage, limits)


def _watch(pid: int, stages: int, stage: str, limits: Limits) -> int:
    """Wait for the child, and return its exit code."""
    code: int | None = None

    def has_ended(seconds: float) -> bool:
        nonlocal code, stage
        if select.select([stages], [], [], seconds)[0]:
            text = os.read(stages, 2**16)
            stage = text.decode(errors="replace").splitlines()[-1] if text else stage
            time.sleep(0 if text else 0.001)  # its end of the pipe is closed: it ends
        ended, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        return bool(ended)

    try:
        failure = limits.watch(pid, has_ended, lambda: os.kill(pid, SIGKILL), with_children=True)
    except KeyboardInterrupt:  # a terminal has told the child too; a program may have told this process alone
        _end_gently(pid, has_ended)
        if code is None or code < 0:
            raise
        return code
    assert code is not None
    if failure is not None:
        raise GuardedFailure(stage, failure.reason, timed_out=failure.timed_out)
    if code < 0:
        raise GuardedFailure(stage, f"the process was ended by {exit_reason(code)}", crashed=True)
    return code


def _end_gently(pid: int, has_ended: Callable[[float], bool]) -> None:
    """Interrupt a process that has not ended after Ctrl-C, and then kill it; at once after a second Ctrl-C."""
    try:
        for seconds, number in _PATIENCE:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if has_ended(POLL_SECONDS):
                    return
            os.kill(pid, number)
    except KeyboardInterrupt:
        os.kill(pid, SIGKILL)
    while not has_ended(POLL_SECONDS):
        pass
