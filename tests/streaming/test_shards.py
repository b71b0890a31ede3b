"""Shards are disjoint and complete, have equally many steps, and read each chunk once."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from selections import selections

from kerasmem import H5ChunkSequence
from kerasmem.cluster import find_shard
from kerasmem.errors import UsageError
from kerasmem.streaming.order import Blocks
from kerasmem.streaming.sharding import Share, read_shard

pytestmark = pytest.mark.usefixtures("loaded_python")


def shares(selection, count, chunk, batch, drop):
    return [Share(index, count, len(selection), batch, drop, chunk) for index in range(count)]


@given(selections(), st.integers(1, 8), st.integers(1, 20), st.integers(1, 40), st.booleans(), st.booleans())
def test_shards_are_disjoint_and_complete_and_have_equal_steps(selection, count, chunk, batch, drop, shuffle):
    try:
        workers = shares(selection, count, chunk, batch, drop)
    except UsageError:
        reject()
    steps, seen = workers[0].steps, []
    for share in workers:
        blocks = Blocks(share.select(selection, shuffle=shuffle), chunk * 3)
        blocks = share.deal(blocks, seed=3) if shuffle else blocks
        pieces = [blocks.rows(np.array([block])) for block in range(blocks.count)]
        mine = np.concatenate(pieces)
        assert len(mine) == blocks.total == blocks.sizes(np.arange(blocks.count)).sum()
        assert blocks.total <= len(share.plan_for(selection)), "memory is planned for enough rows"
        for block, piece in enumerate(pieces):
            start, stop, picked = blocks.run(block)
            assert np.array_equal(start + (np.arange(stop - start) if picked is None else picked), piece)
        bounds = [share.bounds(place, blocks.total) for place in range(steps)]
        lengths = [stop - start for start, stop in bounds]
        assert min(lengths) > 0
        assert max(lengths) <= batch
        assert bounds[0][0] == 0
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
        assert set(lengths) == {batch} if drop else bounds[-1][1] == blocks.total
        seen.append(mine)
    rows = np.concatenate(seen)
    assert np.array_equal(np.sort(rows) if shuffle else rows, np.asarray(selection)), "in file order each is a run"
    if not drop:
        assert max(map(len, seen)) - min(map(len, seen)) <= batch


def test_shards_do_not_split_chunks_if_possible():
    for shuffle in (True, False):
        owners = {}
        for share in shares(range(10_100), 4, 16, 32, False):
            blocks = Blocks(share.select(range(10_100), shuffle=shuffle), 64)
            blocks = share.deal(blocks, 0) if shuffle else blocks
            for block in range(blocks.count):
                for chunk in set(blocks.rows(np.array([block])) // 16):
                    owners.setdefault(int(chunk), set()).add(share.index)
        assert {len(workers) for workers in owners.values()} == {1}


def test_auto(monkeypatch):
    import tensorflow as tf

    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert read_shard("auto") == read_shard(None) == (0, 1)
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(UsageError, match=r"TF_CONFIG.*correct it"):
        find_shard()
    monkeypatch.delenv("TF_CONFIG")
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert find_shard() == (0, 1), "one process, however many devices"
    cluster = {"chief": ["a"], "worker": ["b", "c"], "ps": ["d"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
    assert find_shard() == (2, 3)


def test_auto_with_a_keras_distribution(monkeypatch):
    import keras

    class Distribution:
        num_processes, num_model_replicas, data_shard_id = 4, 2, 1

    monkeypatch.setattr(keras.distribution, "distribution", Distribution)
    assert find_shard() == (1, 2), "two processes hold one replica together, and read the same"


def test_padded_ends_add_up_to_one_process(numbered):
    import keras

    rows = 203
    path = numbered(rows=rows, chunks=4)
    last = []
    for index in range(4):
        with H5ChunkSequence(path, batch_size=8, shard=(index, 4), remainder="pad") as data:
            last.append(data.batch(len(data) - 1))
    loss = keras.losses.MeanSquaredError()
    each = [float(loss(y[:, None].astype("f4"), 0.5 * y[:, None], sample_weight=weight)) for _, y, weight in last]
    assert {len(x) for x, _, _ in last} == {8}
    real = np.concatenate([y[weight > 0] for _, y, weight in last])
    assert len(real) == rows - 6 * 4 * 8
    assert np.mean(each) == pytest.approx(np.sum((0.5 * real.astype("f8")) ** 2) / 32, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"shard": (2, 2)}, "shard index must be below the count of 2"),
        ({"shard": 1}, "shard must be .index, count.*; got 1"),
        ({"shard": "all"}, "shard must be .*got 'all'"),
        ({"shard": (0, 2.5)}, "shard count must be a whole number .*got 2.5"),
        ({"shard": (-1, 2)}, "shard index must be .*got -1"),
        ({"shard": (0, 200)}, "100 rows cannot be divided among 200 workers"),
        ({"shard": (0, 4), "remainder": "drop"}, "no full batch of 32 in 100 rows for each of 4 workers"),
        ({"shard": (0, 3), "batch_size": 1}, "batches of 1 give 3 workers unequal numbers"),
        ({"shard": (0, 2), "seed": None}, "seed must be a number if shard is set"),
    ],
)
def test_refused(numbered, settings, text):
    with pytest.raises(UsageError, match=text):
        H5ChunkSequence(numbered(), **settings)
