"""Real steps in processes of their own: measured, foretold, refused."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

import kerasmem
from kerasmem.errors import KerasmemError, ModelError, UsageError
from kerasmem.estimation.measuring import measure
from kerasmem.estimation.probing import probe, run_steps
from kerasmem.models.spec import StepSpec
from kerasmem.rendering.estimate_tables import estimate_table
from kerasmem.rendering.formatting import plain_text

pytestmark = pytest.mark.usefixtures("loaded_python")

MODELS = Path(__file__).parents[1] / "support" / "small_models.py"


@pytest.mark.usefixtures("onednn_kernels")
def test_a_probe_predicts_a_larger_batch():
    request = StepSpec(f"{MODELS}:convnet", batch_size=64)
    predicted = probe(request, timeout=300)
    runs = [run_steps(request, 64, 10, timeout=300) for _ in range(3)]
    run, peaks = runs[0], [peak for run in runs for peak in run.peaks]
    assert predicted.low <= statistics.median(peaks) <= predicted.high
    assert predicted.low <= predicted.total <= predicted.high
    assert predicted.inputs == run.inputs == 64 * (24 * 24 * 3 + 1) * 4
    assert predicted.execution == "graph"


def test_running_out_of_memory_is_a_message(monkeypatch):
    monkeypatch.setenv("TF_CPU_BFC_MEM_LIMIT_IN_MB", "32")
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN's kernels end the process in place of raising
    with pytest.raises(ModelError) as caught:
        run_steps(StepSpec(f"{MODELS}:perceptron"), 32768, 2, timeout=300)
    message = str(caught.value)
    assert "batch size 32768 ran out of memory on CPU:0 within its limit of 32 MiB (OOM when allocating" in message
    assert message.endswith("take a smaller batch")


@pytest.mark.usefixtures("new_python")
def test_too_little_time_is_a_message():
    request = StepSpec(f"{MODELS}:convnet")
    with pytest.raises(KerasmemError, match=r"batch size 8 gave no answer: it took longer than 0\.5 s; .*--timeout"):
        run_steps(request, 8, 2, timeout=0.5)
    with pytest.raises(UsageError, match="timeout must be more than 0"):
        run_steps(request, 8, 2, timeout=-1)


def test_measure_uses_the_compiled_settings(mnist_cnn):
    report = measure(mnist_cnn, batch_size=4, steps=3, device="16GB", timeout=300)
    need = report.bytes
    assert report.settings.method == "measure"
    assert (report.settings.execution, report.settings.optimizer) == ("graph", "adam")
    parameters = mnist_cnn.count_params()
    assert need.weights == parameters * 4
    assert 2 * parameters * 4 <= need.optimizer <= 2 * parameters * 4 + 100
    assert need.inputs == 4 * 28 * 28 * 4 + 4 * 4
    assert need.weights + need.optimizer + need.inputs < need.low <= need.total <= need.high
    assert report.pool.in_use == need.total
    assert report.device.verdict == "fits"
    assert {row.bytes for row in report.layers} == {None}
    assert kerasmem.MemoryReport.from_dict(report.to_dict()) == report


def test_a_cpus_measurement_stands_in_for_a_card(mnist_cnn, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    report = measure(mnist_cnn, batch_size=4, steps=3, device="t4", timeout=300)
    need = report.bytes
    assert report.settings.stands_in
    assert need.low == need.weights + need.optimizer + need.inputs
    assert "(measured on this CPU, not on the card)" in str(report)
    assert "\n" not in str(report) and report.device.verdict == "fits"
    assert any("stands in for the card" in note for note in report.notes)
    shown = plain_text(estimate_table(report)).splitlines()[0]
    assert "(measured on this CPU, not on the card)" in shown


@pytest.mark.usefixtures("x86_kernels")
def test_measured_kernels_and_threads_are_those_requested(mnist_cnn):
    settings = measure(mnist_cnn, batch_size=4, steps=2, kernels="eigen", threads=1, timeout=300).settings
    assert (settings.kernels, settings.threads) == ("eigen", 1)


def test_wrong_calls_are_refused_before_a_process_is_started(mnist_cnn):
    for steps in (0, 1.5, True):
        with pytest.raises(UsageError, match="steps"):
            measure(mnist_cnn, steps=steps)
