"""Kernels and threads of an estimate: chosen, shown, and the same on every machine."""

from __future__ import annotations

import json

import keras
import pytest

import kerasmem
from kerasmem.devices.kernels import cpu_kernels
from kerasmem.errors import UsageError
from kerasmem.estimation.estimating import estimate
from kerasmem.recovery.estimator import StepEstimator

pytestmark = pytest.mark.usefixtures("loaded_python")

# With oneDNN, Grappler fuses swish into one operation.
ESTIMATES = """
import json, keras, kerasmem
def build():
    layers = keras.layers
    hidden = [layers.Conv2D(16, 3, activation="swish", name="conv"), layers.MaxPooling2D(name="pool")]
    model = keras.Sequential([keras.Input((24, 24, 3)), *hidden, layers.Flatten(), layers.Dense(4, name="head")])
    model.compile("adam", "mse")
    return model
settings = {"batch_size": 64, "method": "graph", "threads": 4}
print(json.dumps([kerasmem.estimate(build, kernels=kind, **settings).to_dict() for kind in ("onednn", "eigen")]))
"""


@pytest.mark.usefixtures("onednn_kernels")
def test_estimates_for_named_kernels_are_the_same_in_all_processes(program):
    reports = []
    for onednn in "01":
        result = program("-c", ESTIMATES, env={"TF_ENABLE_ONEDNN_OPTS": onednn})
        assert result.code == 0, result.err
        reports.append(json.loads(result.out))
    first, second = ([report["bytes"] for report in pair] for pair in reports)
    assert first == second and first[0] != first[1]
    assert [report["settings"]["kernels"] for report in reports[0]] == ["onednn", "eigen"]


def dense():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


def test_an_estimate_says_if_its_threads_are_not_this_machines():
    here = cpu_kernels()
    same, other = (estimate(dense, method="graph", threads=here.inter_op_threads + more) for more in (0, 30))
    assert not any("this process has" in note for note in same.notes)
    assert any(f"in {here.inter_op_threads + 30} threads; this process has" in note for note in other.notes)
    assert (same.settings.kernels, same.settings.threads) == (here.kind, here.inter_op_threads)


@pytest.mark.parametrize(("method", "device"), [("formula", None), ("graph", "t4"), ("xla", None)])
def test_a_method_without_cpu_kernels_says_that_it_does_not_use_them(method, device):
    report = estimate(dense, method=method, device=device, kernels="eigen", threads=3)
    assert (report.settings.kernels, report.settings.threads) == (None, None)
    assert any("kernels and threads are not used" in note for note in report.notes)


@pytest.mark.parametrize(("name", "value"), [("kernels", "cuda"), ("threads", 0), ("threads", 1.5)])
def test_wrong_profiles_are_refused(name, value):
    with pytest.raises(UsageError, match=name):
        estimate(dense, **{name: value})


def test_searches_and_remedies_keep_the_profile(monkeypatch):
    found = kerasmem.max_batch_size(dense, device="4MB", method="graph", kernels="eigen", threads=3)
    assert (found.report.settings.kernels, found.report.settings.threads) == ("eigen", 3)
    seen = []
    options = StepEstimator.step_options
    monkeypatch.setattr(StepEstimator, "step_options", lambda *args: seen.append(options(*args)) or seen[-1])
    kerasmem.advise(dense, device="1MiB", batch_size=4096, method="graph", threads=3, budget_seconds=1)
    assert seen and all((one["kernels"], one["threads"]) == (None, 3) for one in seen)


def test_the_command_line_chooses_and_shows_the_profile(cli, tmp_path):
    (tmp_path / "net.py").write_text(
        "import keras\ndef build():\n"
        "    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(2)])\n"
    )
    options = (f"{tmp_path}/net.py:build", "--method", "graph", "--kernels", "eigen", "--threads", 3)
    shown = cli("estimate", *options, "-v").out
    assert "TensorFlow's own CPU kernels (Eigen), threads: 3" in shown
    saved = tmp_path / "base.json"
    saved.write_text(cli("estimate", *options, "--json").out)
    assert json.loads(saved.read_text())["settings"]["threads"] == 3
    compared = cli("compare", saved, options[0], "--max-increase", "0%", "--markdown")
    assert compared.code == 0 and "threads: 3" in compared.out, compared.err
    shown = cli("compare", saved, options[0]).out.splitlines()[:2]
    assert all(line.endswith("(Eigen), threads: 3") for line in shown)
    refused = cli("compare", saved, options[0], "--threads", 2)
    assert refused.code == 2 and "the numbers of threads differ: 3 and 2" in refused.err
