"""How much host memory this job may take: control groups and Slurm.

A container or a batch job often gets a fraction of the machine, and is killed beyond it. Sources: the kernel's
"Control Group v2" and "Memory Resource Controller" (v1), proc(5), and the output environment variables of Slurm's
sbatch(1).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kerasmem.devices.host import host_memory
from kerasmem.units import MIB, format_size

_NO_LIMIT = 2**60  # version 1 writes the largest number of pages there is
_OCTAL = re.compile(r"\\([0-7]{3})")
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


@dataclass(frozen=True)
class HostLimits:
    """Limits on this job's share of the machine's memory.

    Attributes:
        machine_bytes: RAM of the machine.
        limits: every limit, the tightest first.
    """

    machine_bytes: int
    limits: tuple[MemoryLimit, ...]

    @property
    def tightest(self) -> MemoryLimit | None:
        """The lowest limit, if it is below the machine's memory."""
        return self.limits[0] if self.limits and self.limits[0].limit_bytes < self.machine_bytes else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on anything out of the ordinary."""
        limit = self.tightest
        if limit is None:
            return ()
        used = "" if limit.used_bytes is None else f" ({format_size(limit.used_bytes)} in use)"
        return (
            f"host: the job's limit is {format_size(limit.limit_bytes)}{used}, set by {limit.source}, "
            f"not the machine's {format_size(self.machine_bytes)}",
        )


def parse_limit(text: str) -> int | None:
    """Parse a cgroup's limit file, with None for no limit.

    Examples:
        >>> parse_limit("8589934592"), parse_limit("max"), parse_limit("9223372036854771712")
        (8589934592, None, None)
    """
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and int(text) < _NO_LIMIT else None


def _group_folders(cgroup: str, mountinfo: str) -> Iterator[tuple[int, str]]:
    """Yield version and folder of the groups that this process's memory counts in, and of those above them.

    Args:
        cgroup: the text of /proc/self/cgroup.
        mountinfo: the text of /proc/self/mountinfo.
    """
    names: dict[int, str] = {}
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            names[2] = name
        elif "memory" in controllers.split(","):
            names[1] = name
    for root, point, kind, options in _mounts(mountinfo):
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split(",") else 0
        if version in names:
            yield from ((version, folder) for folder in _folders(names.pop(version), root, point))


def slurm_limit(environ: Mapping[str, str]) -> MemoryLimit | None:
    """Return Slurm's limit for the job on this node, or None if there is none.

    Examples:
        >>> slurm_limit({"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "4"}).limit_bytes
        8589934592
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    for per, count in (
        ("SLURM_MEM_PER_NODE", None),
        ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
        ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
    ):
        size, many = environ.get(per, ""), "1" if count is None else environ.get(count, "")
        if all(text.isascii() and text.isdigit() and int(text) > 0 for text in (size, many)):  # 0: all of the node
            source = f"Slurm ({per}{'' if count is None else ' × ' + count})"
            return MemoryLimit(int(size) * int(many) * MIB, None, source)
    return None


def read_limits() -> HostLimits:
    """Read the limits on this job's host memory.

    Examples:
        >>> limits = read_limits()
        >>> limits.tightest is None or limits.tightest.limit_bytes < limits.machine_bytes
        True
    """
    limits = []
    for version, folder in _group_folders(_text("/proc/self/cgroup"), _text("/proc/self/mountinfo")):
        limit, used = (parse_limit(_text(f"{folder}/{name}")) for name in _FILES[version])
        if limit is not None:
            limits.append(MemoryLimit(limit, used, f"cgroup v{version} {folder}"))
    if (slurm := slurm_limit(os.environ)) is not None:
        limits.append(slurm)
    limits.sort(key=lambda limit: limit.limit_bytes)
    return HostLimits(host_memory().total_bytes, tuple(limits))


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


def default_memory_limit() -> int:
    """Return 80 % of the memory that this job may have, the default limit for reading untrusted files."""
    limits = read_limits()
    return int(0.8 * (limits.machine_bytes if limits.tightest is None else limits.tightest.limit_bytes))


def _mounts(mountinfo: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield root, mount point, file system type and super options of each mount."""
    for line in mountinfo.splitlines():
        first, _, last = line.partition(" - ")
        before, after = first.split(), last.split()
        if len(before) >= 5 and len(after) >= 3:
            yield _unescaped(before[3]), _unescaped(before[4]), after[0], after[2]


def _unescaped(path: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), path)


def _folders(name: str, root: str, point: str) -> Iterator[str]:
    """Yield the folders of a group and of those above it, as far as they are mounted."""
    try:
        inside = PurePosixPath(name).relative_to(root)
    except ValueError:
        inside = PurePosixPath()  # the group's name is the host's, and what is mounted is the group itself
    if ".." in inside.parts:
        inside = PurePosixPath()
    for part in (inside, *inside.parents):
        yield str(PurePosixPath(point) / part)
