"""Real failures, by TensorFlow's real allocator, NumPy and a signal, are read as what they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kerasmem

pytestmark = pytest.mark.usefixtures("loaded_python")

HERE = Path(__file__).resolve().parent
LIMIT = 64 * 2**20
CASES = ["forward graph", "backward graph", "optimizer graph", "backward xla"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(HERE.parent.parent),
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "64",
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # its operations crash where memory runs out
    "CUDA_VISIBLE_DEVICES": "-1",
}


@pytest.fixture(scope="module")
def failures():
    """Each case's diagnosis from the exception, and from its log; they run side by side."""
    command = [sys.executable, str(HERE / "failing.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT}
    running = {case: subprocess.Popen([*command, *case.split()], **pipes) for case in CASES}
    found = {}
    for case, process in running.items():
        out, log = process.communicate(timeout=240)
        found[case] = json.loads(out.splitlines()[-1]), kerasmem.explain_oom(log).to_dict()
    return found


@pytest.mark.parametrize("source", [0, 1], ids=["exception", "log"])
@pytest.mark.parametrize("case", CASES)
def test_layer_and_phase_are_right(failures, case, source):
    data = failures[case][source]
    assert data is not None, "it did not run out"
    where, mode = case.split()
    assert data["out_of_memory"] and data["requested_bytes"] > 2**20
    if mode == "xla":
        assert data["family"] == "xla" and data["warnings"] and data["layer"] is None
    else:
        assert data["family"] == "tensorflow" and not data["warnings"]
        assert data["pass"] == where and data["device"] == "CPU:0"
        shape = data["tensor_shape"]
        if where == "optimizer":
            assert data["layer"] is None and shape in ([1024, 2048], [2048, 1024])
        else:
            assert data["layer"] in ("conv_0", "conv_1", "conv_2", "pool")
            assert shape[0] == {"forward": 100, "backward": 44}[where]
            assert "instead of" in data["suggestions"][0]["what"]


@pytest.mark.parametrize("case", CASES)
def test_the_log_has_the_allocators_figures(failures, case):
    data = failures[case][1]
    assert data["limit_bytes"] == LIMIT and 0 < data["in_use_bytes"] <= LIMIT
    assert data["free_bytes"] is not None and data["reserved_bytes"] <= LIMIT
    assert abs(data["free_bytes"] - (LIMIT - data["in_use_bytes"])) < 0.01 * LIMIT  # text is rounded, pieces are exact
    enough = data["free_bytes"] >= data["requested_bytes"]
    assert data["cause"] == ("fragmentation" if enough else "capacity")


def test_numpy_and_python(program):
    done = program(HERE / "failing.py", "host", env={"OPENBLAS_NUM_THREADS": "1"})
    data = json.loads(done.out)
    assert (data["family"], data["dtype"], data["tensor_shape"]) == ("host", "float64", [3000, 224, 224, 3])
    assert data["requested_bytes"] == 3000 * 224 * 224 * 3 * 8
    assert kerasmem.explain_oom(done.err).family == "host" and "MemoryError" in done.err


def test_a_kill(tmp_path):
    done = subprocess.run(["bash", "-c", "bash -c 'kill -9 $$'; echo exit code $?"], capture_output=True, text=True)
    found = kerasmem.explain_oom(done.stdout)
    assert "137" in done.stdout and found.out_of_memory and found.cause == "unknown"
    error = subprocess.CalledProcessError(-signal.SIGKILL, ["python", "train.py"])
    assert kerasmem.explain_oom(error).family == "host" and "killed" in kerasmem.explain_oom(error).summary
