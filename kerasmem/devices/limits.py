"""How much host memory this job may take: control groups and Slurm.

A container or a batch job often gets a fraction of the machine, and is killed beyond it. Sources: the kernel's
"Control Group v2" and "Memory Resource Controller" (v1: the default of RHEL 8 and its kin, supported until 2029), and
the output environment variables of Slurm's sbatch(1).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kerasmem.devices.host import host_memory
from kerasmem.units import MIB, format_size

_NO_LIMIT = 2**60  # version 1 writes the largest number of pages there is
_ROOTS = {1: "/sys/fs/cgroup/memory", 2: "/sys/fs/cgroup"}
_SLURM = (
    ("SLURM_MEM_PER_NODE",),
    ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
)
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


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
