"""A decoder of seven billion parameters, its layers unrolled, is estimated in little memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kerasmem.units import GIB

ROOT = Path(__file__).resolve().parent.parent.parent
DECODER = ROOT / "tests" / "support" / "big_decoder.py"


@pytest.mark.slow
def test_seven_billion_parameters_stay_under_four_gib_of_host_memory():
    done = subprocess.run(
        [sys.executable, "-m", "kerasmem", "estimate", f"{DECODER}:decoder", "--batch-size", "4", "--method", "graph",
         "--optimizer", "adam", "--loss", "sparse_categorical_crossentropy", "--json"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    parameters = report["model"]["parameters"]
    assert parameters > 6.5e9
    assert report["settings"]["method"] == "graph"
    # weights and Adam's two moments are there from beginning to end, and in the end every gradient too
    assert report["bytes"]["total"] > 4 * 4 * parameters
    # the largest of this process's children so far, of which no other is as large
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 4 * GIB
