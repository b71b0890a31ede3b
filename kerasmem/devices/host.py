"""Host memory of this process, of those under it, and of this machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kerasmem.processes.children import resident_bytes
from kerasmem.records import Record

_PROC, _SELF = Path("/proc"), Path("/proc/self")
_SIZE = re.compile(rb"^(VmRSS|VmHWM|VmSwap|RssAnon):\s+(\d+) kB$", re.MULTILINE)


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class HostMemory(Record, what="host memory"):
    """This machine's memory, in bytes.

    Attributes:
        total_bytes: RAM of the machine.
        available_bytes: RAM available without swapping.
    """

    total_bytes: int
    available_bytes: int


def host_memory() -> HostMemory:
    """Read this machine's memory.

    Examples:
        >>> memory = host_memory()
        >>> 0 < memory.available_bytes <= memory.total_bytes
        True
    """
    import psutil

    machine = psutil.virtual_memory()
    return HostMemory(int(machine.total), int(machine.available))


def process_status(folder: Path) -> dict[str, int]:
    """Read the sizes in a process's /proc/PID/status, or {} if it cannot be read.

    Args:
        folder: of the process: /proc/PID.
    """
    try:
        return parse_status((folder / "status").read_bytes())
    except OSError:
        return {}


def parse_status(text: bytes) -> dict[str, int]:
    r"""Parse the sizes in a /proc/PID/status, in bytes.

    Examples:
        >>> parse_status(b"VmHWM:\t    12 kB\nVmRSS:\t    10 kB\nVmSwap:\t     0 kB\n")
        {'VmHWM': 12288, 'VmRSS': 10240, 'VmSwap': 0}
    """
    return {name.decode(): int(size) * 1024 for name, size in _SIZE.findall(text)}


def held_bytes() -> int:
    """Return the bytes of this process's own pages, in RAM or swap, after free heap went back to the system.

    Pages of files (libraries loaded bit by bit) do not count. If the system does not tell them apart, what is
    resident is returned. Takes milliseconds.

    Examples:
        >>> before = held_bytes()
        >>> block = b"x" * 2**24
        >>> held_bytes() - before >= 2**24
        True
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    status = process_status(_SELF)
    found = [size for name, size in status.items() if name in ("RssAnon", "VmSwap")]
    if found:
        return sum(found)
    import psutil

    return int(psutil.Process().memory_info().rss)


class TreeReading(NamedTuple):
    """One reading of a process and of those under it, in bytes.

    Attributes:
        rss_bytes: resident in the process itself.
        tree_bytes: resident in it and in all processes under it; a page that several share counts for each.
        high_water_bytes: the largest that the process itself held at once since it began; None if the system
            does not tell.
        swap_bytes: swapped bytes of the process itself; None if unknown.
    """

    rss_bytes: int
    tree_bytes: int
    high_water_bytes: int | None
    swap_bytes: int | None


class TreeReader:
    """Reads a process and its children, for a background thread. A reading takes some 20 µs, and 10 µs for each child.

    Which processes there are takes milliseconds to find out, so it is asked again only when a second has passed,
    and 200 times what the last search took.

    Args:
        clock: seconds that only go forward.

    Examples:
        >>> reading = TreeReader().read()
        >>> reading.tree_bytes >= reading.rss_bytes > 0
        True
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        import psutil

        self._process = psutil.Process()
        self._unseen = psutil.Error
        self._clock = clock
        self._children: list[Any] = []
        self._due = clock()

    def read(self) -> TreeReading:
        """Return a reading. A child that has ended since counts nothing.

        Raises:
            psutil.Error: the process itself cannot be read.
        """
        now = self._clock()
        if now >= self._due:
            self._children = self._process.children(recursive=True)
            self._due = now + max(1.0, 200 * (self._clock() - now))
        status = process_status(_PROC / str(self._process.pid))
        rss = status["VmRSS"] if "VmRSS" in status else int(self._process.memory_info().rss)
        sizes = []
        for child in self._children:
            with contextlib.suppress(self._unseen):
                sizes.append(resident_bytes(child.pid) or int(child.memory_info().rss))
        return TreeReading(rss, rss + sum(sizes), status.get("VmHWM"), status.get("VmSwap"))
