"""The bench that asks a GPU, rehearsed on the CPU: `scripts/test --with jax`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if os.environ.get("KERAS_BACKEND") != "jax":
    pytest.skip("of Keras on JAX: run by `scripts/test --with jax`", allow_module_level=True)

BENCH = Path(__file__).parents[2] / "scripts" / "bench" / "gpu.py"


def test_a_case_is_answered_once(tmp_path):
    output = tmp_path / "answers.json"
    command = [sys.executable, BENCH, "--rehearse", "--only", "card mnist_cnn 16 float32", "--output", output]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    cases = json.loads(output.read_text())["cases"]
    case = cases["card mnist_cnn 16 float32"]
    assert case["status"] == "done", case.get("error")
    assert case["plan"]["argument"] > case["plan"]["alias"] > 0
    assert not case["has_tensorflow"]

    again = subprocess.run([*command, "--seconds", "0"], env=environ, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert json.loads(output.read_text())["cases"] == cases
