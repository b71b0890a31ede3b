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
_NO_LIMIT = 2**60  # version 1 has a very large number instead of "max"
_ROOTS = {1: "/sys/fs/cgroup/memory", 2: "/sys/fs/cgroup"}
_SLURM = (
    ("SLURM_MEM_PER_NODE",),
    ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
)
_CACHE = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)  # in memory.stat; freed if a job needs more
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class HostMemory(Record, what="host memory"):
    """Memory of this machine.

    Attributes:
        total_bytes: RAM in bytes.
        available_bytes: RAM in bytes that is available without swapping.
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
    """Read the sizes in a process's status file, or {} if it cannot be read.

    Args:
        folder: /proc/PID.
    """
    try:
        return parse_status((folder / "status").read_bytes())
    except OSError:
        return {}


def parse_status(text: bytes) -> dict[str, int]:
    r"""Parse the sizes in /proc/PID/status, in bytes.

    Examples:
        >>> parse_status(b"VmHWM:\t    12 kB\nVmRSS:\t    10 kB\nVmSwap:\t     0 kB\n")
        {'VmHWM': 12288, 'VmRSS': 10240, 'VmSwap': 0}
    """
    return {name.decode(): int(size) * 1024 for name, size in _SIZE.findall(text)}


def held_bytes() -> int:
    """Release free heap memory, and return the bytes of this process's anonymous pages in RAM and swap.

    Pages of files, such as libraries, do not count. If the system does not distinguish them, the result is the resident
    size. It takes milliseconds.

    Examples:
        >>> before = held_bytes()
        >>> block = b"x" * 2**24
        >>> held_bytes() - before >= 2**24
        True
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    status = process_status(_SELF)
    sizes = [size for name, size in status.items() if name in ("RssAnon", "VmSwap")]
    if sizes:
        return sum(sizes)
    import psutil

    return int(psutil.Process().memory_info().rss)


class TreeReading(NamedTuple):
    """Memory of a process and its children, in bytes.

    Attributes:
        rss_bytes: resident memory of the process.
        tree_bytes: resident memory of the process and its descendants. Shared pages count for each process.
        high_water_bytes: largest resident memory of the process so far; None if unknown.
        swap_bytes: swapped memory of the process; None if unknown.
    """

    rss_bytes: int
    tree_bytes: int
    high_water_bytes: int | None
    swap_bytes: int | None


class TreeReader:
    """Reads the memory of this process and its children. A reading takes about 20 µs, plus 10 µs per child.

    Listing the children takes milliseconds. It is repeated after a second, or after 200 times its duration if that is
    longer.

    Args:
        clock: monotonic clock in seconds. Defaults to `time.monotonic`.

    Examples:
        >>> reading = TreeReader().read()
        >>> reading.tree_bytes >= reading.rss_bytes > 0
        True
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        import psutil

        self._process = psutil.Process()
        self._unreadable = psutil.Error
        self._clock = clock
        self._children: list[Any] = []
        self._due = clock()

    def read(self) -> TreeReading:
        """Return a reading. Children that have exited count as 0.

        Raises:
            psutil.Error: If the process cannot be read.
        """
        now = self._clock()
        if now >= self._due:
            self._children = self._process.children(recursive=True)
            self._due = now + max(1.0, 200 * (self._clock() - now))
        status = process_status(_PROC / str(self._process.pid))
        rss = status["VmRSS"] if "VmRSS" in status else int(self._process.memory_info().rss)
        sizes = []
        for child in self._children:
            with contextlib.suppress(self._unreadable):
                sizes.append(resident_bytes(child.pid) or int(child.memory_info().rss))
        return TreeReading(rss, rss + sum(sizes), status.get("VmHWM"), status.get("VmSwap"))


@dataclass(frozen=True)
class MemoryLimit:
    """Limit of this job's host memory.

    Attributes:
        limit_bytes: the limit in bytes.
        used_bytes: bytes that count against the limit, without cached files, or None if unknown.
        source: origin of the limit, such as "cgroup v2 /system.slice/job.scope" or "Slurm (SLURM_MEM_PER_NODE)".
    """

    limit_bytes: int
    used_bytes: int | None
    source: str


def parse_limit(text: str) -> int | None:
    """Parse the limit of a control group, or return None if unlimited.

    Examples:
        >>> parse_limit("8589934592"), parse_limit("max"), parse_limit("9223372036854771712")
        (8589934592, None, None)
    """
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and int(text) < _NO_LIMIT else None


def _group_folders(cgroup: str) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield version and folder of the control groups that may limit this process, the innermost first.

    In a container, the process's group is often the root folder, but has the host's name.

    Args:
        cgroup: content of /proc/self/cgroup.
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
    """Return Slurm's limit of the job on this node, or None if unlimited.

    Examples:
        >>> slurm_limit({"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "4"}).limit_bytes
        8589934592
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    for names in _SLURM:
        texts = [environ.get(name, "") for name in names]
        if all(text.isascii() and text.isdigit() and int(text) > 0 for text in texts):  # 0 means the whole node
            return MemoryLimit(math.prod(map(int, texts)) * MIB, None, f"Slurm ({' × '.join(names)})")
    return None


def tightest_limit() -> MemoryLimit | None:
    """Return the lowest limit of this job's host memory, or None if it may use the whole machine.

    Examples:
        >>> limit = tightest_limit()
        >>> limit is None or limit.limit_bytes < host_memory().total_bytes
        True
    """
    limits = []
    for version, folder in dict.fromkeys(_group_folders(_text("/proc/self/cgroup"))):
        limit, used = (parse_limit(_text(f"{folder}/{name}")) for name in _FILES[version])
        if limit is not None:
            if used is not None:
                used = max(used - max(map(int, _CACHE.findall(_text(f"{folder}/memory.stat"))), default=0), 0)
            limits.append(MemoryLimit(limit, used, f"cgroup v{version} {folder}"))
    if (slurm := slurm_limit(os.environ)) is not None:
        limits.append(slurm)
    tightest = min(limits, key=lambda limit: limit.limit_bytes, default=None)
    return tightest if tightest and tightest.limit_bytes < host_memory().total_bytes else None


def limit_note() -> str | None:
    """Describe the limit of this job's host memory, or return None."""
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


def available_memory() -> int:
    """Return the machine's free memory in bytes, or what the job's limit leaves if that is less."""
    limit, free = tightest_limit(), host_memory().available_bytes
    return free if limit is None else max(min(free, limit.limit_bytes - (limit.used_bytes or 0)), 0)


def default_memory_limit() -> int:
    """Return 80 % of the memory available to this job, the default limit for reading untrusted files."""
    limit = tightest_limit()
    return int(0.8 * (host_memory().total_bytes if limit is None else limit.limit_bytes))
