"""Runs in forked processes, which can really be killed. For scripts in which TensorFlow has not done anything yet."""

from __future__ import annotations

import os
import sys
import traceback


def start(function, *arguments, **named):
    """Call the function in a process of its own; return its number."""
    child = os.fork()
    if not child:
        try:
            function(*arguments, **named)
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def end_of(child):
    """Return how a process ended: 0, or the signal."""
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
