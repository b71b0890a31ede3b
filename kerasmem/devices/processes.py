"""Memory of this process and its children, and the other processes on a card."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kerasmem.devices.host import process_status
from kerasmem.devices.nvml import Nvml, NvmlDevice
from kerasmem.processes.children import resident_bytes
from kerasmem.units import format_size

_PROC = Path("/proc")


class TreeReading(NamedTuple):
    """One reading of a process and of those under it, in bytes.

    Attributes:
        rss_bytes: resident in the process itself.
        tree_bytes: resident in it and in all processes under it; a page that several share counts for each.
        processes: how many processes that is.
        high_water_bytes: the largest that the process itself held at once since it began; None if the system
            does not tell.
        swap_bytes: swapped bytes of the process itself; None if unknown.
    """

    rss_bytes: int
    tree_bytes: int
    processes: int
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
        return TreeReading(rss, rss + sum(sizes), 1 + len(sizes), status.get("VmHWM"), status.get("VmSwap"))


def others_on_card(nvml: Nvml, device: NvmlDevice, total_bytes: int | None) -> list[str]:
    """Describe the other processes with memory on a card, the largest first. Takes milliseconds.

    Args:
        nvml: the open connection that the device came from.
        device: the card.
        total_bytes: the card's memory, or None if unknown.
    """
    import psutil

    others = [(used, pid) for pid, used in nvml.processes(device) if used is not None and pid != os.getpid()]
    found = []
    for used, pid in sorted(others, reverse=True):
        name, share = "", f", {100 * used / total_bytes:.0f} % of the card" if total_bytes else ""
        with contextlib.suppress(psutil.Error, OSError):
            name = f" ({psutil.Process(pid).name()!r})"
        found.append(f"process {pid}{name} has {format_size(used)} there{share}")
    return found
