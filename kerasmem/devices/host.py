"""Host memory of this process, its children and this machine, and the limit on this job.

A container or a batch job often gets a fraction of the machine's memory, and is killed beyond it. Sources: the kernel's
"Control Group v2" and "Memory Resource Controller" (v1, the default of RHEL 8), and the output environment variables of
Slurm's sbatch(1).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from kerasmem.processes.children import resident_bytes
from kerasmem.records import Record
from kerasmem.units import MIB, format_size

_PROC, _SELF = Path("/proc"), Path("/proc/self")
_SIZE = re.compile(rb"^(VmRSS|VmHWM|VmSwap|RssAnon):\s+(\d+) kB$", re.MULTILINE)
_NO_LIMIT = 2**60  # version 1 writes the largest number of pages there is
_ROOTS = {1: "/sys/fs/cgroup/memory", 2: "/sys/fs/cgroup"}
_SLURM = (
    ("SLURM_MEM_PER_NODE",),
    ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
)
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


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


@dataclass(frozen=True)
class MemoryLimit:
    """One limit on this job's host memory.

    Attributes:
        limit_bytes: the limit.
        used_bytes: memory that counts against it now, or None if unknown.
        source: its origin, such as "cgroup v2 /system.slice/job.scope" or "Slurm (SLURM_MEM_PER_NODE)".
    """

    limit_bytes: int
    used_bytes: int | None
    source: str


def parse_limit(text: str) -> int | None:
    """Parse a cgroup's limit file, with None for no limit.

    Examples:
        >>> parse_limit("8589934592"), parse_limit("max"), parse_limit("9223372036854771712")
        (8589934592, None, None)
    """
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and int(text) < _NO_LIMIT else None


def _group_folders(cgroup: str) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield version and folder of the groups that this process's memory may count in, from the inmost outwards.

    A container often shows its own group alone, in the outmost folder, under the name that the host has for it.

    Args:
        cgroup: the text of /proc/self/cgroup.
    """
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        version = 1 if "memory" in controllers.split(",") else 2
        if version == 1 or (number == "0" and not controllers):
            names = [] if ".." in name else name.strip("/").split("/")
            root = PurePosixPath(_ROOTS[version])
            yield from ((version, root.joinpath(*names[:depth])) for depth in range(len(names), -1, -1))


def slurm_limit(environ: Mapping[str, str]) -> MemoryLimit | None:
    """Return Slurm's limit for the job on this node, or None if there is none.

    Examples:
        >>> slurm_limit({"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "4"}).limit_bytes
        8589934592
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    for names in _SLURM:
        texts = [environ.get(name, "") for name in names]
        if all(text.isascii() and text.isdigit() and int(text) > 0 for text in texts):  # 0: all of the node
            return MemoryLimit(math.prod(map(int, texts)) * MIB, None, f"Slurm ({' × '.join(names)})")
    return None


def tightest_limit() -> MemoryLimit | None:
    """Return the lowest limit on this job's host memory, or None if the job may have all of the machine's.

    Examples:
        >>> limit = tightest_limit()
        >>> limit is None or limit.limit_bytes < host_memory().total_bytes
        True
    """
    limits = []
    for version, folder in dict.fromkeys(_group_folders(_text("/proc/self/cgroup"))):
        limit, used = (parse_limit(_text(f"{folder}/{name}")) for name in _FILES[version])
        if limit is not None:
            limits.append(MemoryLimit(limit, used, f"cgroup v{version} {folder}"))
    if (slurm := slurm_limit(os.environ)) is not None:
        limits.append(slurm)
    tightest = min(limits, key=lambda limit: limit.limit_bytes, default=None)
    return tightest if tightest and tightest.limit_bytes < host_memory().total_bytes else None


def limit_note() -> str | None:
    """Return a sentence on the limit of this job's host memory, or None if there is none."""
    limit = tightest_limit()
    if limit is None:
        return None
    used = "" if limit.used_bytes is None else f" ({format_size(limit.used_bytes)} in use)"
    return (
        f"host: the job's limit is {format_size(limit.limit_bytes)}{used}, set by {limit.source}, "
        f"not the machine's {format_size(host_memory().total_bytes)}"
    )


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


def default_memory_limit() -> int:
    """Return 80 % of the memory that this job may have, the default limit for reading untrusted files."""
    limit = tightest_limit()
    return int(0.8 * (host_memory().total_bytes if limit is None else limit.limit_bytes))
