"""The line of a probe through measured peaks, and the process that measures them."""

from __future__ import annotations

import pytest

from kerasmem.devices import host
from kerasmem.devices.host import HostMemory, MemoryLimit
from kerasmem.errors import KerasmemError
from kerasmem.estimation import probing
from kerasmem.estimation.probing import probe, run_steps, try_batch
from kerasmem.estimation.real_steps import MeasuredSteps
from kerasmem.models.spec import StepSpec
from kerasmem.processes.children import ChildFailure
from kerasmem.units import GIB


@pytest.fixture
def outcome(monkeypatch):
    """Return the outcome of a probe from peaks by batch size."""

    def ask(peaks, target, *, execution="graph", optimizer=60, **options):
        def run_steps(request, size, steps, **_):
            return MeasuredSteps(
                "CPU:0", execution, size, 30, optimizer, 5 * size, first=0, peaks=peaks[size], seconds=0.1,
                notes=("assumed",),
            )  # fmt: skip

        monkeypatch.setattr(probing, "run_steps", run_steps)
        return probe(StepSpec("m.keras", batch_size=target), **options)

    return ask


def test_a_fixed_or_small_batch_is_run_itself(outcome):
    measured = outcome({512: (95, 100, 110)}, 512, is_fixed=True)
    assert (measured.method, measured.execution) == ("probe", "graph")
    assert (measured.total, measured.low, measured.high) == (100, 95, 110)
    assert (measured.weights, measured.inputs, measured.optimizer) == (30, 5 * 512, 60)
    assert measured.notes[1] == "assumed"
    assert outcome({8: (100,)}, 8, optimizer=None).optimizer is None


def line(batch):
    return 1000 + 10 * batch


def test_probe_extrapolates_linearly(outcome):
    peaks = {batch: (line(batch) - 1, line(batch), line(batch) + 1) for batch in (16, 48)}
    measured = outcome(peaks, 64)
    assert (measured.total, measured.pool.in_use) == (line(64), line(64))
    assert (measured.low, measured.high) == (int(line(64) * 0.91), int(line(64) * 1.09))
    assert measured.inputs == 5 * 64


def test_probe_interval_covers_the_extrapolated_spread(outcome):
    measured = outcome({16: (900, 1100), 48: (1200, 1600)}, 64)
    assert measured.low == 1200 + (1200 - 1100) / 2
    assert measured.high == 1600 + (1600 - 900) / 2


def test_a_plan_of_xla_is_not_extrapolated(outcome):
    with pytest.raises(KerasmemError, match="use method xla"):
        outcome({16: (1,)}, 64, execution="xla")
    assert outcome({64: (9,)}, 64, execution="xla", is_fixed=True).total == 9


@pytest.mark.parametrize(
    ("free", "limit", "available"),
    [
        (10 * GIB, None, 10 * GIB),
        (10 * GIB, MemoryLimit(4 * GIB, None, "Slurm"), 4 * GIB),
        (10 * GIB, MemoryLimit(4 * GIB, GIB, "cgroup"), 3 * GIB),
        (2 * GIB, MemoryLimit(4 * GIB, GIB, "cgroup"), 2 * GIB),
        (2 * GIB, MemoryLimit(4 * GIB, 5 * GIB, "cgroup"), 0),
    ],
)
def test_real_steps_are_limited_by_the_memory_of_the_job(monkeypatch, free, limit, available):
    tried = []

    def run_child(function, *arguments, limits, **_):
        tried.append(limits.host_bytes)
        raise ChildFailure("it took 9.6 GiB of host memory, more than the limit of 9.5 GiB")

    monkeypatch.setattr(probing, "run_child", run_child)
    monkeypatch.setattr(host, "host_memory", lambda: HostMemory(16 * GIB, free))
    monkeypatch.setattr(host, "tightest_limit", lambda: limit)
    monkeypatch.setattr(probing, "runs_on_jax", lambda: False)
    request = StepSpec("m.keras")
    with pytest.raises(KerasmemError, match=r"host memory.* --confirm"):
        try_batch(request, 64, 80 * GIB, steps=2, last=0, timeout=9)
    with pytest.raises(KerasmemError, match="host memory"):
        run_steps(request, 64, 2)
    assert tried == [int(available * 0.95)] * 2


def test_kernels_and_threads_reach_the_process_of_real_steps(monkeypatch):
    environments = []

    def run_child(function, *arguments, environ, **_):
        environments.append(environ)
        raise ChildFailure("no process is started")

    monkeypatch.setattr(probing, "run_child", run_child)
    with pytest.raises(KerasmemError):
        run_steps(StepSpec("m.keras", kernels="eigen", threads=3), 64, 2)
    names = ("TF_ENABLE_ONEDNN_OPTS", "TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS")
    assert [environments[0][name] for name in names] == ["0", "3", "3"]
