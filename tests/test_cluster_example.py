"""`examples/train_on_cluster.py` under Slurm, torchrun and Ray; a killed worker does not change the result."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_on_cluster.py"
JAX_PYTHON = os.environ.get("KERASMEM_JAX_PYTHON", sys.executable)


def environment(**variables):
    return {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", **variables}


def free_port():
    """Return a free port; the ports after it are probably free, too."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def slurm_variables(rank):
    return {
        "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": str(rank),
    }  # fmt: skip


def torchrun_variables(rank):
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def launch(variables, folder, *more, python=sys.executable, **others):
    """Start two workers, end both if one is lost, and return their outputs."""
    port = str(free_port())
    workers = []
    for rank in range(2):
        settings = environment(MASTER_PORT=port, **variables(rank), **others)
        with (folder / f"out{rank}").open("w") as out:
            command = [python, str(EXAMPLE), "--folder", str(folder), *more]
            workers.append(subprocess.Popen(command, env=settings, stdout=out, stderr=subprocess.STDOUT))
    try:
        end = time.monotonic() + 300
        while any(worker.poll() is None for worker in workers) and time.monotonic() < end:
            if any(worker.poll() for worker in workers):
                break
            time.sleep(0.2)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [(folder / f"out{rank}").read_text() for rank in range(2)]


def weights(output):
    match = re.search(r"^worker 0 of 2, 46 batches an epoch, weights (\w{8})$", output, re.MULTILINE)
    assert match, output[-3000:]
    return match[1]


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory):
    return weights(launch(slurm_variables, tmp_path_factory.mktemp("unkilled"))[0])


def test_slurm_starts_killed_workers_again(tmp_path, unkilled):
    first = launch(slurm_variables, tmp_path, "--kill")
    assert (tmp_path / "killed").exists() and "weights" not in "".join(first)
    assert weights(launch(slurm_variables, tmp_path, "--kill")[0]) == unkilled


def test_torchrun_on_one_machine(tmp_path, unkilled):
    assert weights(launch(torchrun_variables, tmp_path)[0]) == unkilled


@pytest.mark.skipif(
    sys.executable == JAX_PYTHON and importlib.util.find_spec("jax") is None, reason="jax is not installed"
)
def test_torchrun_with_jax(tmp_path):
    outputs = launch(torchrun_variables, tmp_path, python=JAX_PYTHON, KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
    assert len(weights(outputs[0])) == 8


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_starts_killed_workers_again(tmp_path, unkilled):
    command = [sys.executable, str(EXAMPLE), "--ray", "2", "--kill", "--folder", str(tmp_path)]
    done = subprocess.run(
        command, env=environment(RAY_USAGE_STATS_ENABLED="0"), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists() and weights(done.stdout) == unkilled
