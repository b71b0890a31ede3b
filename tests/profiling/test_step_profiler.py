"""`MemoryLogger(profile_batch=)` in real `model.fit`, under TensorFlow's real BFC allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onednn
import pytest

from kerasmem.profiling.results import PeakBytes

pytestmark = pytest.mark.usefixtures("loaded_python")

SCRIPT = Path(__file__).with_name("step_profiles.py")
ROOT = Path(__file__).resolve().parents[2]
NAMES = ("own_step", "a_convnet", "by_xla", "too_few", "another_profiler", "after_a_failure")


def run(names, folder, allocator="true"):
    """Run scenarios in a fresh process, with oneDNN: TensorFlow chooses its allocator and kernels when it starts."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "CUDA_VISIBLE"))}
    chosen = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *names], cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={**kept, **chosen, **onednn.ENVIRONMENT, "TF_CPU_ALLOCATOR_USE_BFC": allocator},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(NAMES, tmp_path_factory.mktemp("profiles"))


def adds_up(profile):
    need = profile["bytes"]
    assert sum(need[name] for name in PeakBytes.CATEGORIES) == need["total"]
    in_layers = sum(row["bytes_at_peak"] for row in profile["layers"])
    assert in_layers + sum(each["bytes"] for each in profile["shares"]) == need["total"]
    return need


@onednn.needed
def test_the_layers_of_a_batch(found):
    result = found["a_convnet"]
    profile = result["profile"]
    need = adds_up(profile)
    assert (result["failure"], result["warnings"], result["same"]) == (None, [], True)
    assert result["file"] == need
    # What the runs before have left behind waits to be let go, and is nobody's that can be named.
    left = sum(each["bytes"] for each in profile["unmodelled"])
    assert need["unnamed"] - left < 0.01 * need["total"]
    rows = {row["name"]: row for row in profile["layers"]}
    assert list(rows) == ["net", "eyes", "norm", "pool", "out"]
    assert rows["eyes"]["parts"]["weights"] == (27 * 16 + 16) * 4
    assert rows["eyes"]["parameters"] == 27 * 16 + 16
    output = 32 * 22 * 22 * 16 * 4
    assert sum(rows["eyes"]["parts"].values()) >= output
    assert need["activations"] + need["gradients"] >= 2 * output
    settings = profile["settings"]
    assert (settings["batch_size"], settings["execution"], settings["optimizer"]) == (32, "graph", "adam")
    assert profile["instant"]["text"].startswith("while ")
    assert 2 < profile["points"] <= 2000
    assert need["optimizer"] > 2 * 4 * 458
    assert need["inputs"] >= 32 * 24 * 24 * 3 * 4  # the batches that are ready, and the data set if it was copied


def test_a_step_of_the_models_own(found):
    profile = found["own_step"]["profile"]
    adds_up(profile)
    assert profile["named_share"] > 0.95
    assert {row["name"] for row in profile["layers"]} == {"own", "wide", "out"}
    wide = next(row for row in profile["layers"] if row["name"] == "wide")
    assert wide["parts"]["weights"] == (64 + 1) * 1024 * 4


def test_under_xla_the_buffer_is_one_piece(found):
    profile = found["by_xla"]["profile"]
    adds_up(profile)
    assert profile["settings"]["execution"] == "xla"
    shares = {each["name"]: each["bytes"] for each in profile["shares"]}
    assert shares["XLA's buffer for the whole step"] > 32 * 22 * 22 * 16 * 4
    assert any("kerasmem profile --jit-compile" in each["why"] for each in profile["unmodelled"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [("too_few", "batch 50 was to be profiled, and training had 2"), ("another_profiler", "another one running")],
)
def test_what_cannot_be_profiled_is_a_warning(found, name, reason):
    result = found[name]
    assert result["profile"] is None
    assert reason in result["failure"]
    assert len(result["warnings"]) == 1


def test_the_next_run_is_profiled_after_one_that_failed(found):
    assert found["after_a_failure"]["profile"]["bytes"]["total"] > 0
    assert found["after_a_failure"]["failure"] is None


def test_without_the_bfc_allocator_it_says_what_to_set(tmp_path):
    result = run(["own_step"], tmp_path, allocator="false")["own_step"]
    assert result["profile"] is None
    assert "TF_CPU_ALLOCATOR_USE_BFC=true" in result["failure"]
