"""What the figures of `kerasmem.advise` hold for, the copy of the data in them, and real steps of the winner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import advised_models
import pytest

import kerasmem
from kerasmem.devices.catalogue import resolve_device
from kerasmem.devices.kernels import EIGEN, ONEDNN, assumed
from kerasmem.errors import KerasmemError
from kerasmem.estimation.search import Trial
from kerasmem.models.sizes import Bytes
from kerasmem.models.spec import StepSpec
from kerasmem.recovery import plans as winner
from kerasmem.recovery.advice import Advice, Remedy
from kerasmem.recovery.changes import make_change
from kerasmem.recovery.estimator import StepEstimator
from kerasmem.recovery.traits import SampleBytes, traits_of
from kerasmem.rendering.advice_table import advice_table
from kerasmem.rendering.layout import plain_text

pytestmark = pytest.mark.usefixtures("loaded_python")

MODELS = Path(advised_models.__file__)
BATCH = 256
MICRO = {"kind": "micro_batches", "value": 4}


def estimator(device="16GB", source=None, **options):
    named = StepSpec(f"{MODELS}:residual", factory_args={"blocks": 2})
    origin = named if source is None else StepSpec(source)
    asked = (resolve_device(device), BATCH, "train", False, "graph", None)
    return StepEstimator(origin, *asked, **options)


def plan(name, verdict="fits", changes=(MICRO,)):
    return Remedy(name, changes, "same", "", 1.0, 10, 9, 11, 20, verdict, "graph", "model.fit()", kernels="Eigen, CPU")


def test_whose_kernels_figures_hold_for():
    asked = estimator("t4")
    assert [asked.kernels(method) for method in ("formula", "xla")] == [None, "XLA, this CPU"]
    assert asked.kernels("gpu-target") == f"XLA, {resolve_device('t4').name}"
    assert asked.kernels("graph") == f"CUDA, {resolve_device('t4').name}"
    for kind, said in ((ONEDNN, "oneDNN, CPU"), (EIGEN, "Eigen, CPU")):
        with assumed(kind):
            assert estimator("16GB").kernels("graph") == said


def test_the_copy_of_the_arrays_counts_in_all_figures(tmp_path):
    saved = str(tmp_path / "residual.keras")  # with its layers' names: Grappler puts operations in their order
    advised_models.residual(blocks=2).save(saved)
    asked = estimator(source=saved, samples=10 * BATCH)
    without = asked.estimate_current()
    asked.count_arrays(traits_of(asked.origin, BATCH).sample)
    assert asked.data_bytes == 10 * BATCH * (16 + 2) * 4  # inputs and targets, whatever is held at the peak
    for name in ("total", "low", "high", "inputs"):
        added = getattr(asked.current.bytes, name) - getattr(without.bytes, name)
        expected = asked.data_bytes * (2 if name == "high" else 1)  # its chunk may be larger than the copy
        assert added == expected, name
    halved = asked.add([make_change("batch_size", BATCH // 2)], Bytes(100, 90, None), "graph")
    assert halved.bytes.total == 100 + asked.data_bytes and halved.bytes.high is None
    assert asked.estimate([make_change("stream", "train")]).bytes == without.bytes


@pytest.mark.parametrize(("step", "total"), [(Bytes(100, 90, None, 10), 2010), (Bytes(5000, 90, None, 10), 6200)])
def test_predict_keeps_all_outputs_and_joins_them(step, total):
    asked = estimator(samples=100)
    asked.mode = "inference"
    asked.current = kerasmem.estimate(f"{MODELS}:residual", method="formula", mode="inference")
    asked.add((), asked.current.bytes, "graph")
    asked.count_arrays(SampleBytes(inputs=4, targets=9, outputs=8))
    assert asked.add([make_change("batch_size", 8)], step, "graph").bytes.total == total
    streamed = [make_change("batch_size", 8), make_change("stream", "inference")]
    assert asked.estimate(streamed).bytes == step


def test_arrays_larger_than_the_device_come_in_batches():
    samples = 10**9
    advice = kerasmem.advise(f"{MODELS}:residual", device="16GB", method="graph", budget_seconds=0, samples=samples)
    assert (advice.device.verdict, advice.verdict) == ("does not fit", "fits")
    assert advice.data_bytes == samples * (16 + 2) * 4
    assert [each["kind"] for each in advice.plans[0].changes] == ["stream"]
    assert "H5ChunkSequence" in advice.plans[0].code
    head = plain_text(advice_table(advice, 120, is_brief=True), 120).split("Now:")[0]
    assert "67.1 GiB" in head and "model.fit keeps" in head


def test_data_in_batches_is_what_comes_nearest_without_time():
    advice = kerasmem.advise(f"{MODELS}:residual", device="2MiB", method="graph", budget_seconds=0, samples=10**9)
    assert [each["kind"] for each in advice.plans[0].changes] == ["stream"]
    assert advice.plans[0].verdict == advice.verdict == "does not fit"


def test_the_next_plan_is_run_where_the_first_runs_out(monkeypatch):
    asked = estimator("64MB", samples=BATCH)
    asked.data_bytes = 4_000_000
    tried = []

    def steps(request, batch_size, limit, **options):
        tried.append((request.factory_args["changes"], batch_size, limit, request.jit_compile))
        return Trial(batch_size, len(tried) == 2, None if len(tried) == 1 else 7, limit, "OOM")

    monkeypatch.setattr(winner, "try_batch", steps)
    plans = [plan("a"), plan("b", "too close to call", ({"kind": "batch_size", "value": 64},)), plan("c")]
    found = winner.confirmed(asked, plans, notes := [])
    assert [(each.name, each.verdict) for each in found] == [("b", "fits"), ("c", "fits"), ("a", "does not fit")]
    assert [each.trial is None for each in found] == [False, True, False] and notes == []
    assert tried == [([MICRO], 64, 60_000_000, False), ([], 64, 60_000_000, False)]
    tried.clear()
    monkeypatch.setattr(winner, "_ran", lambda *_: (_ for _ in ()).throw(KerasmemError("it lives here only")))
    assert winner.confirmed(asked, plans, notes) == plans
    assert notes == ["a: its steps were not run: it lives here only"]
    hopeless = [plan("d", "does not fit")]
    assert winner.confirmed(asked, hopeless, notes) == hopeless and len(notes) == 1


def test_real_steps_of_the_winner():
    asked = estimator("200MB")
    (found,) = winner.confirmed(asked, [plan("4 micro-batches of 64", "too close to call")], notes := [])
    assert notes == [] and found.verdict == "fits"
    assert found.trial.size == 64 and 0 < found.trial.peak_bytes < found.trial.limit_bytes == 200_000_000
    current = asked.estimate_current()
    advice = Advice(current.model, current.settings, current.bytes, replace(current.device, verdict="does not fit"),
                    plans=(found, plan("b")), kernels="Eigen, CPU")  # fmt: skip
    assert Advice.from_dict(advice.to_dict()) == advice
    told = advice.to_dict()
    assert (told["kernels"], told["plans"][0]["trial"]["fits"]) == ("Eigen, CPU", True)
    text = plain_text(advice_table(advice, 120), 120)
    assert "on kernels of Eigen, CPU" in text and "; real steps took " in text
