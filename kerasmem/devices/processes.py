"""Processes of this machine: what they hold, which files they have open. Another's cannot all be seen."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kerasmem.errors import UsageError
from kerasmem.records import Record


@dataclass(frozen=True)
class ProcessView(Record, what="process"):
    """A process and what it holds of host memory, in bytes.

    Attributes:
        pid: its number.
        name: of the program; any text, chosen by the program.
        rss_bytes: resident in it.
        tree_bytes: resident in it and in all processes under it; shared pages count for each.
        processes: how many processes that is.
        swap_bytes: what of it is in swap; None where the system does not tell.
        seconds: for which it has run.
    """

    pid: int
    name: str
    rss_bytes: int
    tree_bytes: int
    processes: int
    swap_bytes: int | None
    seconds: float


def view_process(pid: int) -> ProcessView:
    """Return what a process holds now.

    Raises:
        UsageError: there is no such process (any more), or it cannot be seen.

    Example:
        >>> import os
        >>> view_process(os.getpid()).rss_bytes > 0
        True
    """
    import time

    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            name, memory, started = process.name(), process.memory_info(), process.create_time()
            if process.status() == psutil.STATUS_ZOMBIE:
                raise psutil.NoSuchProcess(pid)
        swap = None
        with contextlib.suppress(psutil.Error, AttributeError):  # a field of Linux, and of one's own processes alone
            swap = int(process.memory_full_info().swap)
        children = []
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                children.append(int(child.memory_info().rss))
    except (psutil.Error, ValueError, OverflowError) as error:
        kind = "cannot be seen from here" if isinstance(error, psutil.AccessDenied) else "is not running"
        raise UsageError(f"PID: process {pid} {kind}; name one that `ps` lists") from error
    rss = int(memory.rss)
    return ProcessView(pid, name, rss, rss + sum(children), 1 + len(children), swap, time.time() - started)


def open_files(pid: int, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the regular files with such names that a process has open for writing; empty where it cannot be seen."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.lower().endswith(suffixes) and stat.S_ISREG(os.stat(target).st_mode):
                    found[target] = Path(target)
    return list(found.values())


def python_processes() -> list[int]:
    """Return the numbers of all Python processes that can be seen, without this one."""
    import psutil

    names = ((process.pid, process.info["name"] or "") for process in psutil.process_iter(["name"]))
    return sorted(pid for pid, name in names if "python" in name.lower() and pid != os.getpid())
