"""Real `tf.distribute` workers on loopback train on the same rows and reach the same losses as one process."""

from __future__ import annotations

import collections
import json
import os
import sys
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from workers import free_ports, run_together

from kerasmem import H5ChunkSequence
from kerasmem.streaming.tf_data import share_batches
from kerasmem.training.resume import latest_common

pytestmark = pytest.mark.usefixtures("loaded_python")

HERE = Path(__file__).parent
ROWS, WIDTH, BATCH, EPOCHS = 4096, 1024, 32, 2


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("engines") / "rows.h5"
    x = np.random.default_rng(3).standard_normal((ROWS, WIDTH)).astype("f4") / 8
    x[:, 0] = np.arange(ROWS) / 4096
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, chunks=(16, WIDTH))
        file["y"] = x[:, :8].sum(axis=1).astype("f4")
    return path


def run_workers(path, folder, count, *tasks, devices=1):
    """Return the results of each worker by task."""
    codes, errors = end_of_workers(path, folder, count, *tasks, devices=devices)
    assert codes == [0] * count, errors[0][-3000:]
    lines = [(folder / f"out{index}").read_text().splitlines() for index in range(count)]
    return [{one["task"]: one for one in (json.loads(line) for line in out if "task" in line)} for out in lines]


def end_of_workers(path, folder, count, *tasks, devices=1):
    """Return the exit status and the standard error of each worker."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(count)]}
    environments = [{"DEVICES": str(devices)} for _ in range(count)]
    if devices == 1:
        for index, environment in enumerate(environments):
            environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
    command = [sys.executable, HERE / "engine_worker.py", path, *tasks]
    codes = run_together([command] * count, environments, folder)
    return codes, [(folder / f"err{index}").read_text() for index in range(count)]


class Together(keras.utils.PyDataset):
    """Joins the batches of both workers in one process."""

    def __init__(self, path):
        super().__init__()
        self.parts = [
            H5ChunkSequence(path, batch_size=BATCH, memory_budget="1MB", shard=(index, 2)) for index in range(2)
        ]
        self.epoch = -1

    def __len__(self):
        return len(self.parts[0])

    def __getitem__(self, index):
        batches = [part.batch(index, max(self.epoch, 0)) for part in self.parts]
        return tuple(np.concatenate(arrays) for arrays in zip(*batches, strict=True))

    def on_epoch_begin(self):
        self.epoch += 1


def make_model():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((WIDTH,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def rows_by_epoch(results, steps):
    """Return for each epoch a count of the training rows of all workers."""
    epochs = []
    for epoch in range(EPOCHS):
        batches = [batch for one in results for batch in one["trained"][epoch * steps : (epoch + 1) * steps]]
        epochs.append(collections.Counter(row for batch in batches for row in batch))
    return epochs


def check_as_one_process(results, path):
    steps = ROWS // BATCH // 2
    assert [result["shard"] for result in results] == [[0, 2], [1, 2]]
    assert all(result["steps"] == steps and len(result["trained"]) == EPOCHS * steps for result in results)
    assert {len(batch) for result in results for batch in result["trained"]} == {BATCH}, "batch_size is each worker's"
    once = collections.Counter(range(ROWS))
    assert rows_by_epoch(results, steps) == [once] * EPOCHS, "each row once an epoch"
    # At the last epoch's end Keras has begun another, of which it trains on nothing: a window of each worker.
    read = sum(result["bytes_read"][-1] for result in results)
    assert read <= 1.05 * EPOCHS * os.path.getsize(path)

    alone = make_model()
    history = alone.fit(Together(path), epochs=EPOCHS, shuffle=False, verbose=0).history
    for result in results:
        assert result["history"]["loss"] == pytest.approx(history["loss"], rel=1e-5)
        assert result["history"]["mae"] == pytest.approx(history["mae"], rel=1e-5)
        for mine, expected in zip(result["weights"], alone.weights, strict=True):
            np.testing.assert_allclose(mine, expected.numpy(), rtol=1e-4, atol=1e-6)
    assert history["loss"][-1] < 0.9 * history["loss"][0], "it learns, so that equal losses say something"
    return alone


@pytest.fixture(scope="module")
def said(path, tmp_path_factory):
    """Results of two workers."""
    return run_workers(path, tmp_path_factory.mktemp("two"), 2, "fit", "evaluate", "unsharded", "refusals")


@pytest.fixture(scope="module")
def alone(said, path):
    """A model that one process trained on the batches of both workers."""
    return check_as_one_process([one["fit"] for one in said], path)


class TestTwoWorkers:
    def test_the_losses_rows_and_bytes_of_one_process(self, alone):
        assert alone is not None

    def test_evaluate_is_over_all_rows(self, said, alone, path):
        data = H5ChunkSequence(path, batch_size=BATCH, shuffle=False)
        expected = alone.evaluate(data, verbose=0, return_dict=True)
        for one in said:
            assert one["evaluate"]["evaluated"]["loss"] == pytest.approx(expected["loss"], rel=1e-4)

    def test_without_shard_batches_are_global_with_a_warning(self, said, alone, path):
        results = [one["unsharded"] for one in said]
        once = collections.Counter(range(ROWS))
        assert rows_by_epoch(results, ROWS // BATCH) == [once] * EPOCHS
        assert {len(batch) for result in results for batch in result["trained"]} == {BATCH // 2}
        for result in results:
            assert any("without shard each of the 2 workers reads all rows" in text for text in result["warned"])
            assert result["bytes_read"][0] >= 0.9 * ROWS * WIDTH * 4
        with h5py.File(path) as file:
            assert len(results[0]["predicted"]) == len(file["x"]), "predict, in file order"

    def test_settings_that_lose_or_repeat_rows_are_refused(self, said):
        for index, one in enumerate(said):
            shard, seed, predict = one["refusals"]["refused"]
            assert f"shard must be ({index}, 2) in this process" in shard
            assert "seed must be a number: None draws another seed in each of the 2 workers" in seed
            assert "predict joins the results of all workers" in predict


@pytest.fixture(scope="module")
def whole(path, tmp_path_factory):
    """Results of two workers of an uninterrupted training."""
    return run_workers(path, tmp_path_factory.mktemp("whole"), 2, "resumed")


@pytest.mark.slow
class TestKilledWorker:
    """TensorFlow stops the other workers. After a restart, all resume at the last step that all have saved."""

    @pytest.mark.parametrize("kill_at", [6, ROWS // BATCH // 2 + 2])
    def test_a_restart_ends_like_an_uninterrupted_run(self, path, tmp_path, monkeypatch, whole, kill_at):
        monkeypatch.setenv("KILL_AT", str(kill_at))
        codes, _ = end_of_workers(path, tmp_path, 2, "resumed")
        assert codes[1] == -9 and codes[0] not in (0, -9), "the other one does not wait for ever"
        monkeypatch.delenv("KILL_AT")
        again = run_workers(path, tmp_path, 2, "resumed")
        steps = ROWS // BATCH // 2
        for worker, (mine, expected) in enumerate(zip(again, whole, strict=True)):
            mine, expected = mine["resumed"], expected["resumed"]
            saved = (kill_at - 1) // 3 * 3 if kill_at <= steps else steps + (kill_at - 1 - steps) // 3 * 3
            assert mine["trained"] == expected["trained"][saved:], f"worker {worker}: the very next batch, none twice"
            for one, other in zip(mine["weights"], expected["weights"], strict=True):
                np.testing.assert_array_equal(one, other)
            assert mine["history"]["loss"][-1] == pytest.approx(expected["history"]["loss"][-1], rel=1e-6)
        assert not list(tmp_path.glob("*.resume*")), "removed when fit has ended"

    def test_a_worker_without_its_file_is_refused(self, path, tmp_path, monkeypatch):
        monkeypatch.setenv("KILL_AT", "14")
        end_of_workers(path, tmp_path, 2, "resumed")
        for file in tmp_path.glob("run.rank1.resume*"):
            file.unlink()
        monkeypatch.delenv("KILL_AT")
        codes, errors = end_of_workers(path, tmp_path, 2, "resumed")
        assert 0 not in codes
        assert "the workers' files have no common point" in errors[0]


@pytest.mark.parametrize(
    ("points", "common"),
    [
        ([[7, 5], [7, 5]], 7),
        ([[7, 5], [5, 3]], 5),
        ([[7], []], 0),
        ([[], []], 0),
        ([[7, 5], []], None),
        ([[7, 5], [3]], None),
    ],
)
def test_the_latest_point_that_all_workers_have(points, common):
    assert latest_common(points) == common


def test_one_process_with_two_devices(path, tmp_path):
    (said,) = run_workers(path, tmp_path, 1, "fit", devices=2)
    result, steps = said["fit"], ROWS // BATCH
    assert (result["shard"], result["steps"]) == ([0, 1], steps)
    assert collections.Counter(row for batch in result["trained"] for row in batch) == collections.Counter(
        dict.fromkeys(range(ROWS), EPOCHS)
    )
    assert {len(batch) for batch in result["trained"]} == {BATCH // 2}, "the devices share each batch"
    data = H5ChunkSequence(path, batch_size=BATCH, memory_budget="1MB")
    history = make_model().fit(data, epochs=EPOCHS, verbose=0).history
    assert result["history"]["loss"] == pytest.approx(history["loss"], rel=1e-5)


def test_batches_are_shared_among_a_workers_devices():
    x = tf.data.Dataset.range(11).batch(4)
    pieces = [piece[0].tolist() for piece in share_batches(tf.data.Dataset.zip((x, x)), 2).as_numpy_iterator()]
    assert pieces == [[0, 1], [2, 3], [4, 5], [6, 7], [8], [9, 10]]


def test_the_cardinality_of_a_shard_is_unknown_to_tf_data(path):
    with H5ChunkSequence(path, batch_size=BATCH, shard=(0, 2)) as data:
        assert int(data.as_tf_dataset().cardinality()) == tf.data.UNKNOWN_CARDINALITY
        assert sum(1 for _ in data.as_tf_dataset()) == len(data) == ROWS // BATCH // 2
