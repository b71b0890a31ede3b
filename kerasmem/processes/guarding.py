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
from kerasmem.processes.children import SIGKILL, ChildFailure, Limits, die_with_parent, exit_reason

_POLL_SECONDS = 0.05
_OWN_TIME, _PATIENCE = 0.3, 2.0  # seconds after Ctrl-C until a child is told of it, and until it is ended
_NEVER = (float("inf"), SIGKILL)
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
    told, _stages = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(told)
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)  # it has ended meanwhile
        return None
    os.close(_stages)
    _stages = None
    with open(told, "rb", buffering=0) as stages:
        return _watch(pid, stages.fileno(), stage, limits)


def _watch(pid: int, stages: int, stage: str, limits: Limits) -> int:
    started = time.monotonic()
    failure: ChildFailure | None = None
    signals: list[tuple[float, int]] = []  # to be sent after Ctrl-C, and when
    while True:
        try:
            if select.select([stages], [], [], _POLL_SECONDS)[0]:
                said = os.read(stages, 2**16)
                stage = said.decode(errors="replace").splitlines()[-1] if said else stage
                time.sleep(0 if said else 0.001)  # its end of the pipe is closed: it ends
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            if failure is None and not signals:
                failure = limits.exceeded(pid, started, with_children=True)
                signals = [] if failure is None else [(0, SIGKILL), _NEVER]
            if signals and time.monotonic() > signals[0][0]:
                os.kill(pid, signals.pop(0)[1])
        except KeyboardInterrupt:  # a terminal has told the child too; a program may have told this process alone
            now = time.monotonic()
            again = bool(signals)
            signals = [(now, SIGKILL), _NEVER]
            if not again:
                signals = [(now + _OWN_TIME, signal.SIGINT), (now + _PATIENCE, SIGKILL), _NEVER]
    return _exit_code(os.waitstatus_to_exitcode(status), stage, failure, bool(signals))


def _exit_code(code: int, stage: str, failure: ChildFailure | None, interrupted: bool) -> int:
    """Return the exit code of a child, or raise if it was ended."""
    if failure is not None:
        raise GuardedFailure(stage, failure.reason, timed_out=failure.timed_out)
    if code < 0 and interrupted:
        raise KeyboardInterrupt
    if code < 0:
        raise GuardedFailure(stage, f"the process was ended by {exit_reason(code)}", crashed=True)
    return code
