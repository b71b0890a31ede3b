"""The exchange of gradients: in the traced step, and in the report."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from kerasmem.estimation.estimating import estimate

pytestmark = pytest.mark.usefixtures("loaded_python")

ROOT = Path(__file__).resolve().parents[2]
layers = keras.layers
KERNELS = 4 * (64 * 256 + 5 * 256 * 256 + 256 * 8)
WEIGHTS = KERNELS + 4 * (6 * 256 + 8)


def perceptron():
    model = keras.Sequential([keras.Input((64,)), *(layers.Dense(256, "relu") for _ in range(6)), layers.Dense(8)])
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("method", ["graph", "xla"])
def test_all_gradients_and_their_buffer_are_there_at_once(method):
    single = estimate(perceptron(), batch_size=32, method=method)
    shared = estimate(perceptron(), batch_size=64, method=method, replicas=2)
    assert (shared.settings.batch_size, shared.settings.replicas) == (32, 2)
    assert shared.bytes.total == shared.pool.in_use >= 5 * WEIGHTS > single.bytes.total  # two slots, gradients, buffer
    assert f"packed into one buffer of {WEIGHTS:,} B, reduced over 2 replicas" in "; ".join(shared.notes)
    assert shared.instant.text == "while the gradients of all replicas are exchanged"
    assert [entry.what for entry in shared.unmodelled] == ["buffers of the gradient exchange"]


def test_a_peak_in_the_forward_pass_covers_the_exchange():
    def fixed(rows):  # with an open batch, the exchange changes the order of other operations
        return tf.data.Dataset.from_tensors((tf.zeros((rows, 64)), tf.zeros((rows, 8))))

    keras.backend.clear_session()  # layers of the same names, as the simulation draws by them
    single = estimate(perceptron(), data=fixed(20_000), method="graph")
    keras.backend.clear_session()
    shared = estimate(perceptron(), data=fixed(40_000), method="graph", replicas=2)
    assert "exchange" not in shared.instant.text  # updates of the single step may run at its peak
    assert shared.bytes.total == pytest.approx(single.bytes.total, rel=1e-3)  # the exchange has some scalars


def wide():
    hidden = [layers.Dense(1024, "relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def test_no_weight_is_updated_before_all_gradients_are_exchanged():
    weights = 4 * wide().count_params()
    single = estimate(wide, batch_size=1024, method="graph")
    shared = estimate(wide, batch_size=2048, method="graph", replicas=2)
    assert shared.bytes.total > single.bytes.total + weights


WORKER = """
import json, os, statistics, sys
rank, ports = int(sys.argv[1]), sys.argv[2:]
workers = [f"localhost:{port}" for port in ports]
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
from tests.estimation.test_replicas import wide
with strategy.scope():
    model = wide()
batch = tf.zeros((1024, 64)), tf.zeros((1024,), "int64")
device = next(device.name for device in tf.config.list_logical_devices("CPU") if f"task:{rank}" in device.name)
step = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)))
peaks = []
for _ in range(10):
    tf.config.experimental.reset_memory_stats(device)
    tf.nest.map_structure(lambda value: value.numpy(), step(batch))
    peaks.append(tf.config.experimental.get_memory_info(device)["peak"])
print(statistics.median(peaks[3:]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("x86_kernels")
def test_two_real_workers_need_what_is_estimated(tmp_path):
    with socket.socket() as first, socket.socket() as second:
        first.bind(("localhost", 0))
        second.bind(("localhost", 0))
        ports = [str(one.getsockname()[1]) for one in (first, second)]
    environment = {
        **os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), *ports], env=environment, cwd=tmp_path, text=True,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        measured = float(workers[0].communicate(timeout=180)[0])
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    shared = estimate(wide, batch_size=2048, method="graph", replicas=2)
    assert shared.bytes.low <= measured <= shared.bytes.high
    assert shared.bytes.total == pytest.approx(measured, rel=0.05)


def test_under_auto_a_card_does_not_bring_xla():
    shared = estimate(perceptron(), batch_size=64, replicas=4, device="t4")
    assert shared.settings.method == "graph"
    assert any("does not compile with XLA under tf.distribute" in note for note in shared.notes)
    assert shared.device.verdict == "fits"


def test_shares_are_the_largest_and_only_training_exchanges():
    shared = estimate(perceptron(), batch_size=33, method="graph", replicas=2, mode="inference")
    assert shared.settings.batch_size == 17
    assert "17 of the 33 samples of a batch, the largest share" in shared.notes[0]
    assert shared.unmodelled == () and not any("packed" in note for note in shared.notes)
    plain = estimate(perceptron(), batch_size=64, method="formula", replicas=2)
    assert any(entry.what == "gradient exchange" for entry in plain.unmodelled)


def test_an_embeddings_gradient_is_its_rows():
    model = keras.Sequential(
        [keras.Input((16,), dtype="int32"), layers.Embedding(5000, 32), layers.Flatten(), layers.Dense(4)]
    )
    model.compile("sgd", "mse")
    shared = estimate(model, batch_size=16, method="graph", replicas=2)
    assert f"one buffer of {4 * (16 * 32 * 4 + 4):,} B" in "; ".join(shared.notes)
