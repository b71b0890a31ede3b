"""The line of a probe through measured peaks, and the process that measures them."""

from __future__ import annotations

import pytest

from kerasmem.errors import KerasmemError
from kerasmem.estimation.probe import probing, running
from kerasmem.estimation.probe.probing import default_batch_sizes, probe
from kerasmem.estimation.probe.running import MeasuredSteps, Run, run_steps, try_batch
from kerasmem.models.spec import StepSpec
from kerasmem.processes.children import ChildFailure
from kerasmem.units import GIB


def test_batch_sizes():
    assert default_batch_sizes(25) == (8, 16, 24)
    assert default_batch_sizes(100) == (16, 32, 48)
    assert default_batch_sizes(4096) == (64, 128, 192)
    assert default_batch_sizes(6000, is_xla=True) == (1000, 2000, 3000)


@pytest.fixture
def outcome(monkeypatch):
    """Return the outcome of a probe from peaks by batch size."""

    def ask(peaks, target, *, execution="graph", optimizer=60, **options):
        runs = tuple(Run(batch, 5 * batch, 0, 0, sizes, 0.1) for batch, sizes in peaks.items())
        measured = MeasuredSteps("CPU:0", execution, 30, optimizer, ("assumed",), runs)
        monkeypatch.setattr(probing, "run_steps", lambda request, runs, **_: measured)
        return probe(StepSpec("m.keras", batch_size=target), **options)

    return ask


def test_a_fixed_or_small_batch_is_run_itself(outcome):
    measured = outcome({512: (95, 100, 110)}, 512, is_fixed=True)
    assert (measured.method, measured.execution) == ("probe", "graph")
    assert (measured.total, measured.low, measured.high) == (100, 95, 110)
    assert measured.categories == {"weights": 30, "inputs": 5 * 512, "optimizer": 60}
    assert measured.notes[1] == "assumed"
    assert "optimizer" not in outcome({8: (100,)}, 8, optimizer=None).categories


def line(batch):
    return 1000 + 10 * batch


def test_the_peak_lies_on_the_line_through_the_measured_ones(outcome):
    peaks = {batch: (line(batch) - 1, line(batch), line(batch) + 1) for batch in (24, 16, 8)}
    measured = outcome(peaks, 512)
    assert (measured.total, measured.pool.in_use) == (line(512), line(512))
    assert (measured.low, measured.high) == (int(line(512) * 0.91), int(line(512) * 1.09))
    assert measured.categories["inputs"] == 5 * 512


def test_the_interval_covers_what_the_spread_of_the_peaks_grows_to(outcome):
    measured = outcome({24: (1230, 1440), 16: (1160, 1160), 8: (1060, 1100)}, 104)
    assert measured.low == 1230 + 5 * (1230 - 1100)
    assert measured.high == 1440 + 5 * (1440 - 1060)


def test_the_upper_end_follows_the_last_two_batches_if_growth_increases(outcome):
    measured = outcome({24: (1300,), 16: (1200,), 8: (1180,)}, 104)
    assert measured.high >= 1300 + 10 * (1300 - 1200)


def test_memory_that_does_not_grow_in_proportion_is_refused(outcome):
    peaks = {batch: (100 + batch * batch,) for batch in (24, 16, 8)}
    with pytest.raises(KerasmemError, match=r"batches 8, 16, 24 .*graph mode.*measure batch 512 itself"):
        outcome(peaks, 512)
    bent = {24: (3000,), 16: (2100,), 8: (1000,)}
    assert outcome(bent, 512).total > 3000
    with pytest.raises(KerasmemError, match="xla mode"):
        outcome(bent, 512, execution="xla")


@pytest.mark.parametrize("available", [10 * GIB, 2 * GIB])
def test_real_steps_leave_the_host_memory_whatever_the_device_has(monkeypatch, available):
    limits = []

    def run_child(worker, data, *, memory_limit, **_):
        limits.append(memory_limit)
        raise ChildFailure("it took 9.6 GiB of host memory, more than the 9.5 GiB it may have")

    monkeypatch.setattr(running, "run_child", run_child)
    monkeypatch.setattr(running, "host_memory", lambda: type("Host", (), {"available_bytes": available}))
    monkeypatch.setattr(running, "runs_on_jax", lambda: False)
    request = StepSpec("m.keras")
    with pytest.raises(KerasmemError, match=r"host memory.* --confirm"):
        try_batch(request, 64, 80 * GIB, steps=2, last=0, timeout=9)
    with pytest.raises(KerasmemError, match="host memory"):
        run_steps(request, [(64, 2)])
    assert limits == [int(available * 0.95)] * 2
