"""Processes of this machine: what they and those under them hold, which files they have open, who is on the cards.

Another's cannot all be seen.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kerasmem.devices.host import process_status
from kerasmem.devices.nvml import Nvml, NvmlApi, NvmlDevice
from kerasmem.errors import UsageError
from kerasmem.processes.children import resident_bytes
from kerasmem.records import Record

_PROC = Path("/proc")


class TreeReading(NamedTuple):
    """One reading of a process and of those under it, in bytes.

    Attributes:
        rss_bytes: resident in the process itself.
        tree_bytes: resident in it and in all processes under it; a page that several share counts for each.
        processes: how many processes that is.
        high_water_bytes: the largest that the process itself held at once since it began; None where the system
            does not tell.
        swap_bytes: what of the process itself is in swap; None where the system does not tell.
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
        process: of psutil; default: this one.

    Examples:
        >>> reading = TreeReader().read()
        >>> reading.tree_bytes >= reading.rss_bytes > 0
        True
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, process: Any = None) -> None:
        import psutil

        self._process = psutil.Process() if process is None else process
        self._unseen = psutil.Error
        self._clock = clock
        self._children: list[Any] = []
        self._due = clock()

    def read(self) -> TreeReading:
        """Return a reading; a child that has ended since counts nothing.

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

    Examples:
        >>> import os
        >>> view_process(os.getpid()).rss_bytes > 0
        True
    """
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            name, started = process.name(), process.create_time()
            if process.status() == psutil.STATUS_ZOMBIE:
                raise psutil.NoSuchProcess(pid)
        read = TreeReader(process=process).read()
    except (psutil.Error, ValueError, OverflowError) as error:
        kind = "cannot be seen from here" if isinstance(error, psutil.AccessDenied) else "is not running"
        raise UsageError(f"PID: process {pid} {kind}; name one that `ps` lists") from error
    seconds = time.time() - started
    return ProcessView(pid, name, read.rss_bytes, read.tree_bytes, read.processes, read.swap_bytes, seconds)


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


@dataclass(frozen=True)
class CardProcess(Record, what="process on a card"):
    """A process with memory on a card.

    Attributes:
        device: the card's name.
        uuid: the card.
        pid: of the process, as the driver counts them (another number inside some containers).
        name: of the program; None where it cannot be seen from here.
        user: who runs it; None where it cannot be seen from here.
        used_bytes: what it has there; None where the driver does not tell.
        share: that, as a part of the card's memory from 0 to 1; None where either is not known.
        own: whether it is this process.
    """

    device: str | None
    uuid: str | None
    pid: int
    name: str | None
    user: str | None
    used_bytes: int | None
    share: float | None
    own: bool


def card_processes(nvml: Nvml, device: NvmlDevice, total_bytes: int | None) -> tuple[list[CardProcess], str | None]:
    """Return who has memory on a card, the largest first, and why that is not known. Takes milliseconds.

    Args:
        nvml: the open connection that the device came from.
        device: the card.
        total_bytes: the card's memory, where it is known.
    """
    found, why_not = nvml.processes(device)
    rows = []
    for pid, used in found or ():
        share = used / total_bytes if used is not None and total_bytes else None
        name, user = _program(pid)
        rows.append(CardProcess(device.name, device.uuid, pid, name, user, used, share, pid == os.getpid()))
    return sorted(rows, key=lambda row: row.used_bytes or 0, reverse=True), why_not


def _program(pid: int) -> tuple[str | None, str | None]:
    """Return the name and the user of a process, where they can be seen."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.name(), process.username()
    except (psutil.Error, KeyError, OSError):  # gone, another's, or of a user without a name
        return None, None


def all_card_processes(api: NvmlApi | None = None) -> list[CardProcess]:
    """Return who has memory on the cards of this machine; empty where there is no driver.

    Args:
        api: what to ask in place of nvidia-ml-py, such as a recording.

    Examples:
        >>> all(process.pid > 0 for process in all_card_processes())
        True
    """
    nvml, _ = Nvml.open(api)
    if nvml is None:
        return []
    with contextlib.closing(nvml):
        found = []
        for device in nvml.devices:
            memory, _ = nvml.memory(device)
            found += card_processes(nvml, device, None if memory is None else memory.total_bytes)[0]
        return found
