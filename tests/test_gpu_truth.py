"""The bench that needs a GPU: it says so where there is none, and its whole path runs on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil

import pytest

SCRIPT = "scripts/bench/gpu_truth.py"
has_gpu = os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


@pytest.mark.skipif(has_gpu, reason="this machine may have a GPU")
def test_without_a_gpu_it_says_so(program):
    done = program(SCRIPT)
    assert done.code == 2
    assert "no NVIDIA GPU on this machine" in done.err and "--self-check" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_the_whole_path_runs_on_the_cpu(program, framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    done = program(SCRIPT, "--self-check", "--framework", framework)
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)["rows"]
    assert row["model"] == "tiny" and row["device"] == "cpu"
    assert (row["plan"] is not None) == (framework == "jax")
    if framework == "jax":
        assert row["plan"]["argument"] > 3 * 4 * (16 * 32 + 32 + 32 * 10 + 10)  # weights and Adam's two moments
