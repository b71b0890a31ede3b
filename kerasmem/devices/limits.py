"""How much host memory this job may take: control groups, Slurm, and how hard memory is to get just now.

A container or a batch job often may have a fraction of the machine, and is killed beyond it. Sources: the kernel's
"Control Group v2" and "Memory Resource Controller" (v1), "PSI - Pressure Stall Information", proc(5), and the
output environment variables of Slurm's sbatch(1).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kerasmem.records import Record
from kerasmem.units import MIB, format_size

_NO_LIMIT = 2**60  # version 1 writes the largest number of pages there is
_OCTAL = re.compile(r"\\([0-7]{3})")
_PRESSURE = re.compile(r"^(some|full) avg10=([\d.]+) avg60=([\d.]+) avg300=([\d.]+) total=(\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Pressure:
    """The share of time, from 0 to 1, in which tasks waited for memory.

    Attributes:
        some_10s, some_60s: at least one task, over the last 10 and 60 seconds.
        full_10s, full_60s: all tasks at once.
    """

    some_10s: float
    some_60s: float
    full_10s: float
    full_60s: float


@dataclass(frozen=True)
class MemoryLimit:
    """One limit on this job's host memory.

    Attributes:
        limit_bytes: no more than this.
        used_bytes: what counts against it now; None where that is not told.
        source: what sets it, such as "cgroup v2 /system.slice/job.scope" or "Slurm (SLURM_MEM_PER_NODE)".
    """

    limit_bytes: int
    used_bytes: int | None
    source: str


@dataclass(frozen=True)
class HostLimits(Record, what="host limits"):
    """What this job may have of the machine's memory.

    Attributes:
        machine_bytes: RAM of the machine.
        limits: every limit found, the tightest first.
        pressure: how hard memory is to get; None where the kernel does not tell.
    """

    machine_bytes: int
    limits: tuple[MemoryLimit, ...]
    pressure: Pressure | None

    @property
    def tightest(self) -> MemoryLimit | None:
        """The limit that is met first, where it is below what the machine has."""
        return self.limits[0] if self.limits and self.limits[0].limit_bytes < self.machine_bytes else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for people on what is out of the ordinary."""
        said = []
        if (limit := self.tightest) is not None:
            used = "" if limit.used_bytes is None else f" ({format_size(limit.used_bytes)} in use)"
            said.append(
                f"host: the job's limit is {format_size(limit.limit_bytes)}{used}, set by {limit.source}, "
                f"not the machine's {format_size(self.machine_bytes)}"
            )
        if self.pressure is not None and self.pressure.some_60s >= 0.1:
            share = f"{self.pressure.some_60s:.0%}".replace("%", " %")
            said.append(f"host: memory is scarce: tasks waited for it in {share} of the last minute")
        return tuple(said)


def parse_pressure(text: str) -> Pressure | None:
    r"""Return what /proc/pressure/memory says; None where it says something else.

    Examples:
        >>> parse_pressure(
        ...     "some avg10=1.50 avg60=0.50 avg300=0.10 total=99\nfull avg10=0.00 avg60=0.25 avg300=0.00 total=9\n"
        ... )
        Pressure(some_10s=0.015, some_60s=0.005, full_10s=0.0, full_60s=0.0025)
    """
    found = {kind: (float(ten) / 100, float(sixty) / 100) for kind, ten, sixty, _, _ in _PRESSURE.findall(text)}
    if "some" not in found:
        return None
    return Pressure(*found["some"], *found.get("full", (0.0, 0.0)))


def parse_limit(text: str) -> int | None:
    """Return the bytes that a cgroup's limit file states; None where that is no limit.

    Examples:
        >>> parse_limit("8589934592"), parse_limit("max"), parse_limit("9223372036854771712")
        (8589934592, None, None)
    """
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and int(text) < _NO_LIMIT else None


class Group(NamedTuple):
    """A control group that accounts for memory: its version (1 or 2), its name, and its mount point and folders.

    `folders` are that of the group and of those above it as far as they are visible here.
    """

    version: int
    name: str
    folders: tuple[str, ...]


def find_groups(cgroup: str, mountinfo: str) -> list[Group]:
    """Return the groups that this process's memory counts in.

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
    found = []
    for root, point, kind, options in _mounts(mountinfo):
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split(",") else 0
        if version in names:
            name = names.pop(version)
            found.append(Group(version, name, tuple(_folders(name, root, point))))
    return found


def slurm_limit(environ: Mapping[str, str]) -> MemoryLimit | None:
    """Return what Slurm grants the job on this node; None outside Slurm, and where it does not say.

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


def read_limits(
    machine_bytes: int | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    read: Callable[[str], str] | None = None,
) -> HostLimits:
    """Return what this job may have.

    Args:
        machine_bytes: RAM of the machine; default: asked.
        environ: environment variables, for Slurm's among them; default: this process's.
        read: returns the text of a file, or raises OSError; default: the file's own.

    Examples:
        >>> limits = read_limits()
        >>> limits.tightest is None or limits.tightest.limit_bytes < limits.machine_bytes
        True
    """
    if machine_bytes is None:
        import psutil

        machine_bytes = int(psutil.virtual_memory().total)
    text = _reader(read or (lambda path: Path(path).read_text(encoding="utf-8", errors="replace")))
    limits = []
    for group in find_groups(text("/proc/self/cgroup"), text("/proc/self/mountinfo")):
        limit_file, used_file = (
            ("memory.max", "memory.current")
            if group.version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        for folder in group.folders:
            limit = parse_limit(text(f"{folder}/{limit_file}"))
            if limit is not None:
                used = parse_limit(text(f"{folder}/{used_file}"))
                limits.append(MemoryLimit(limit, used, f"cgroup v{group.version} {folder}"))
    slurm = slurm_limit(os.environ if environ is None else environ)
    if slurm is not None:
        limits.append(slurm)
    limits.sort(key=lambda limit: limit.limit_bytes)
    return HostLimits(machine_bytes, tuple(limits), parse_pressure(text("/proc/pressure/memory")))


def default_memory_limit() -> int:
    """Return 80 % of the memory that this job may have: what reads a file of unknown origin takes no more."""
    limits = read_limits()
    return int(0.8 * (limits.machine_bytes if limits.tightest is None else limits.tightest.limit_bytes))


def _reader(read: Callable[[str], str]) -> Callable[[str], str]:
    def text(path: str) -> str:
        with contextlib.suppress(OSError):
            return read(path)
        return ""

    return text


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
    """Yield the folder of a group and of those above it; a container sees the mounted part only."""
    try:
        inside = PurePosixPath(name).relative_to(root)
    except ValueError:
        inside = PurePosixPath()  # the group's name is the host's, and what is mounted is the group itself
    if ".." in inside.parts:
        inside = PurePosixPath()
    for part in (inside, *inside.parents):
        yield str(PurePosixPath(point) / part)
