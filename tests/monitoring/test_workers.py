"""Several processes that train together: who is who, and a log each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kerasmem.cluster import Worker, find_worker, own_path
from kerasmem.monitoring import read_timeline

pytestmark = pytest.mark.usefixtures("loaded_python")

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "evaluator": ["d:1"]}

FIT = """
import sys
import keras, numpy as np
from kerasmem import MemoryLogger
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
logger = MemoryLogger("run.jsonl", verbose=1)
model.fit(np.ones((24, 4)), np.ones((24, 1)), batch_size=8, verbose=0, callbacks=[logger])
print("rank", logger.rank)
"""

STRATEGY = """
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import keras
from kerasmem.cluster import worker_of
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
from kerasmem.devices.training_devices import tracked_devices
for device in tracked_devices()[0]:
    print("device", device.name, device.allocator is not None and device.allocator.read().in_use_bytes > 0)
worker = worker_of(model.distribute_strategy)
print(f"worker {worker.rank} of {worker.size}")
"""


def tf_config(kind, index, cluster=CLUSTER):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (tf_config("chief", 0), (0, 3)),
        (tf_config("worker", 1), (2, 3)),
        (tf_config("evaluator", 0), None),
        (tf_config("worker", 0, {"worker": ["a:1"]}), None),
        ({"TF_CONFIG": "nonsense"}, None),
        ({"TF_CONFIG": "[]", "RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script's own program, without srun
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "five", "WORLD_SIZE": "8"}, None),
        ({"RANK": "8", "WORLD_SIZE": "8"}, None),
    ],
    ids=str,
)
def test_who_is_who(environ, expected):
    assert find_worker(environ=environ) == expected


@pytest.mark.parametrize(
    ("path", "rank", "expected"),
    [
        ("run.jsonl", 0, "run.rank0.jsonl"),
        ("logs/run.v2.csv", 12, "logs/run.v2.rank12.csv"),
        ("worker_1/run.csv", 1, "worker_1/run.csv"),
        ("rank0/run.csv", 1, "rank0/run.rank1.csv"),  # all were given the same
        ("log", 1, "log.rank1"),
    ],
)
def test_each_has_a_path_of_its_own(path, rank, expected):
    assert own_path(Path(path), Worker(rank, 16)) == Path(expected)
    assert own_path(Path(path), None) == Path(path)


@pytest.fixture
def two_processes(tmp_path):
    """Run a script in two processes at once, as workers of one cluster; return what each printed."""
    from fresh import environment

    def run(script, variables):
        children = [
            subprocess.Popen(
                [sys.executable, "-c", script], cwd=tmp_path, env=environment(**variables(rank)), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        said = [child.communicate(timeout=200) for child in children]
        assert all(child.returncode == 0 for child in children), said[0][1][-3000:] + said[1][1][-3000:]
        return [out for out, _ in said]

    return run


def test_two_processes_write_a_log_each_and_one_prints(two_processes, tmp_path, run_python):
    first, second = two_processes(FIT, lambda rank: {"RANK": str(rank), "WORLD_SIZE": "2"})
    assert "memory, epoch 1" in first and first.endswith("rank 0\n")
    assert second == "rank 1\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.rank0.jsonl", "run.rank1.jsonl"]
    for rank in (0, 1):
        path = tmp_path / f"run.rank{rank}.jsonl"
        head = json.loads(path.read_text().splitlines()[0])
        assert (head["kind"], head["rank"], head["ranks"]) == ("run", rank, 2)
        assert [sample.batch for sample in read_timeline(path)] == [0, 1, 2, None]
    report = json.loads(run_python("-m", "kerasmem", "report", "run.rank0.jsonl", "run.rank1.jsonl", "--json").stdout)
    assert [log["name"] for log in report["logs"]] == ["run.rank0.jsonl", "run.rank1.jsonl"]


def test_a_multi_worker_strategy_is_recognised(two_processes, tmp_path):
    import socket

    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    bfc = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "CUDA_VISIBLE_DEVICES": "-1"}
    said = two_processes(STRATEGY, lambda rank: tf_config("worker", rank, cluster) | bfc)
    own = [["device CPU:0 True", f"worker {rank} of 2"] for rank in (0, 1)]
    assert [out.splitlines()[-2:] for out in said] == own, "each sees its own device, though TensorFlow lists all"
