"""Limits on a job's memory, from texts as kernels and Slurm write them."""

import pytest

from kerasmem.devices import host as module
from kerasmem.devices.host import HostMemory, available_memory, limit_note, parse_limit, slurm_limit, tightest_limit

GIB = 2**30

# A Slurm job on a node with cgroup v2: the limit is on a folder above the task's.
SLURM_V2 = {
    "/proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n",
    "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0/memory.max": "max\n",
    "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_4711/step_0/user/memory.max": "max\n",
    "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_4711/step_0/memory.max": f"{16 * GIB}\n",
    "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_4711/memory.max": f"{8 * GIB}\n",
    "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_4711/memory.current": f"{3 * GIB}\n",
    "/sys/fs/cgroup/system.slice/memory.max": "max\n",
}

# Docker under cgroup v1: the group's name is the host's, the mount shows that group alone.
DOCKER_V1 = {
    "/proc/self/cgroup": (
        "12:cpu,cpuacct:/docker/9f86d081\n7:memory:/docker/9f86d081\n1:name=systemd:/docker/9f86d081\n0::/system.slice\n"
    ),
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "4294967296\n",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": "1073741824\n",
}

# Docker under cgroup v2: a namespace hides what is above.
DOCKER_V2 = {
    "/proc/self/cgroup": "0::/\n",
    "/sys/fs/cgroup/memory.max": "2147483648\n",
    "/sys/fs/cgroup/memory.current": "104857600\n",
}

# No limit: version 1's largest number; a memory controller of version 1 beside an empty version 2.
UNLIMITED = {
    "/proc/self/cgroup": "4:memory:/user.slice\n0::/user.slice/session-2.scope\n",
    "/sys/fs/cgroup/memory/user.slice/memory.limit_in_bytes": "9223372036854771712\n",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}


# Cached files count as used, and are freed if the job needs more.
CACHED_V2 = {**DOCKER_V2, "/sys/fs/cgroup/memory.stat": "file 52428800\nactive_file 1\ninactive_file 52428800\n"}
CACHED_V1 = {**DOCKER_V1, "/sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 1073741824\n"}


@pytest.fixture
def limits(monkeypatch):
    """Read limits from the texts of files and from environment variables."""

    def read(files, environ=(), machine=256 * GIB):
        monkeypatch.setattr(module, "_text", lambda path: files.get(path, ""))
        monkeypatch.setattr(module, "host_memory", lambda: HostMemory(machine, machine))
        for name, value in dict(environ).items():
            monkeypatch.setenv(name, value)
        return tightest_limit()

    return read


@pytest.mark.parametrize(
    ("files", "limit", "used", "source"),
    [
        (SLURM_V2, 8 * GIB, 3 * GIB, "cgroup v2 /sys/fs/cgroup/system.slice/slurmstepd.scope/job_4711"),
        (DOCKER_V1, 4 * GIB, GIB, "cgroup v1 /sys/fs/cgroup/memory"),
        (DOCKER_V2, 2 * GIB, 100 * 2**20, "cgroup v2 /sys/fs/cgroup"),
        (CACHED_V2, 2 * GIB, 50 * 2**20, "cgroup v2 /sys/fs/cgroup"),
        (CACHED_V1, 4 * GIB, 0, "cgroup v1 /sys/fs/cgroup/memory"),
    ],
)
def test_the_tightest_limit_of_all_groups_above(limits, files, limit, used, source):
    tightest = limits(files)
    assert (tightest.limit_bytes, tightest.used_bytes, tightest.source) == (limit, used, source)


def test_the_note_says_the_jobs_limit_and_the_machines_memory(limits):
    limits(SLURM_V2)
    note = limit_note()
    assert note.startswith("host: the job's limit is 8.00 GiB (3.00 GiB in use), set by cgroup v2 ")
    assert note.endswith("not the machine's 256 GiB")


def test_without_a_limit_there_is_nothing_to_say(limits):
    assert limits(UNLIMITED) is None and limit_note() is None


def test_a_limit_above_what_the_machine_has_is_none(limits):
    assert limits(SLURM_V2, machine=4 * GIB) is None


@pytest.mark.parametrize(
    ("variables", "size"),
    [
        ({"SLURM_MEM_PER_NODE": "8192"}, 8 * GIB),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "4"}, 8 * GIB),
        ({"SLURM_MEM_PER_GPU": "16384", "SLURM_GPUS_ON_NODE": "2"}, 32 * GIB),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_CPU": "2048"}, None),
        ({"SLURM_MEM_PER_NODE": "lots"}, None),
        ({"SLURM_MEM_PER_NODE": "²"}, None),
        ({}, None),
    ],
)
def test_slurm(variables, size):
    found = slurm_limit({"SLURM_JOB_ID": "4711", **variables})
    assert (found and found.limit_bytes) == size
    assert slurm_limit(variables) is None, "outside a job"


def test_slurms_own_word_counts_where_no_group_holds_it(limits):
    found = limits(UNLIMITED, {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "8192"})
    assert found.source == "Slurm (SLURM_MEM_PER_NODE)"


@pytest.mark.parametrize("text", ["", "max", "nonsense", "-1", "9223372036854771712", "٣"])
def test_what_is_no_limit(text):
    assert parse_limit(text) is None


def test_groups_outside_the_namespace(limits):
    files = {"/proc/self/cgroup": "nonsense\n0::/../../other\n", "/sys/fs/cgroup/memory.max": "4096"}
    assert limits(files).source == "cgroup v2 /sys/fs/cgroup"


def test_the_jobs_limit_bounds_the_available_memory(limits):
    limits(SLURM_V2)
    assert available_memory() == 5 * GIB
    limits(SLURM_V2, machine=9 * GIB)
    assert available_memory() == 5 * GIB
    limits(UNLIMITED)
    assert available_memory() == 256 * GIB
