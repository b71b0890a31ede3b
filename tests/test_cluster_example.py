"""`examples/train_on_cluster.py` as Slurm, torchrun and Ray start it; a run with a killed worker ends as one without.

What decides which worker a process is, `tests/streaming/test_shards.py` holds for each launcher; that workers go on,
`tests/streaming/test_engines.py`.
"""

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
    """A port that is free, and so most likely are those after it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def of_slurm(rank):
    return {
        "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": str(rank),
    }  # fmt: skip


def of_torchrun(rank):
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def launch(variables, folder, *more, python=sys.executable, **others):
    """Start two workers as a launcher does, and end the other where one is lost; return what each said."""
    port = str(free_port())
    workers = []
    for rank in range(2):
        given = environment(MASTER_PORT=port, **variables(rank), **others)
        with (folder / f"out{rank}").open("w") as out:
            command = [python, str(EXAMPLE), "--folder", str(folder), *more]
            workers.append(subprocess.Popen(command, env=given, stdout=out, stderr=subprocess.STDOUT))
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


def weights(said):
    (found,) = re.findall(r"^worker 0 of 2, 93 batches an epoch, weights (\w{8})$", said, re.MULTILINE) or [
        said[-3000:]
    ]
    return found


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory):
    return weights(launch(of_slurm, tmp_path_factory.mktemp("unkilled"))[0])


def test_slurm_starts_killed_workers_again(tmp_path, unkilled):
    first = launch(of_slurm, tmp_path, "--kill")
    assert (tmp_path / "killed").exists() and "weights" not in "".join(first)
    assert weights(launch(of_slurm, tmp_path, "--kill")[0]) == unkilled


def test_torchrun_on_one_machine(tmp_path, unkilled):
    assert weights(launch(of_torchrun, tmp_path)[0]) == unkilled


@pytest.mark.skipif(
    sys.executable == JAX_PYTHON and importlib.util.find_spec("jax") is None, reason="jax is not installed"
)
def test_torchrun_with_jax(tmp_path):
    said = launch(of_torchrun, tmp_path, python=JAX_PYTHON, KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
    assert len(weights(said[0])) == 8, said[0]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_starts_killed_workers_again(tmp_path, unkilled):
    command = [sys.executable, str(EXAMPLE), "--ray", "2", "--kill", "--folder", str(tmp_path)]
    done = subprocess.run(
        command, env=environment(RAY_USAGE_STATS_ENABLED="0"), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists() and weights(done.stdout) == unkilled
