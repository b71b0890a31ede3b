"""Run the rest of a program that reads untrusted files in a child process.

A damaged or hostile file can make HDF5, a codec or Keras crash, take all memory, or never end. The program forks
before anything heavy is loaded: the child does the work, and the parent sees to the limits, to Ctrl-C and to a message.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from kerasmem.processes.children import SIGKILL, ChildFailure, Limits, die_with_parent, exit_reason


def go_on_in_child(limits: Limits) -> int | None:
    """Fork, and return None in the child and the child's exit code in the parent.

    Only for a process of one thread that has loaded nothing heavy yet.

    Args:
        limits: of time and of resident memory.

    Raises:
        ChildFailure: If the child exceeded a limit, or a signal ended it.
        KeyboardInterrupt: If it was ended by Ctrl-C.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    ended, runs = os.pipe()
    pid = os.fork()
    if not pid:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)  # it has ended meanwhile
        return None
    os.close(runs)  # the child's own is closed when it ends
    with open(ended, "rb", buffering=0):
        return _watch(pid, ended, limits)


def _watch(pid: int, ended: int, limits: Limits) -> int:
    """Wait for the child, and return its exit code."""
    code: int | None = None

    def has_ended(seconds: float) -> bool:
        nonlocal code
        options = 0 if select.select([ended], [], [], seconds)[0] else os.WNOHANG
        waited, status = os.waitpid(pid, options)
        code = os.waitstatus_to_exitcode(status) if waited else None
        return code is not None

    try:
        failure = limits.watch(pid, has_ended, lambda: os.kill(pid, SIGKILL))
    except KeyboardInterrupt:  # a terminal has told the child too; a program may have told this process alone
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
