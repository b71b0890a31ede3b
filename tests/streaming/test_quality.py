"""How well a plan shuffles and how much it reads, told before training and held against what comes."""

from __future__ import annotations

import json
import warnings
from itertools import pairwise

import numpy as np
import pytest

from kerasmem import H5ChunkSequence
from kerasmem.errors import UsageError
from kerasmem.streaming.quality import ShuffleQuality, batch_entropy, uniform_entropy

ROWS, WIDTH = 40_000, 32


@pytest.fixture
def class_sorted(write):
    def class_sorted(classes=10, rows=ROWS, chunks=None, labels=None, **more):
        x = np.zeros((rows, WIDTH), "f4")
        x[:, 0] = np.arange(rows)
        return write(x=x, y=np.sort(np.arange(rows) % classes) if labels is None else labels, chunks=chunks, **more)

    return class_sorted


def a_tenth(rows=ROWS):
    return rows * (WIDTH * 4 + 8) // 10


def entropy(labels):
    share = np.bincount(labels) / len(labels)
    return -sum(p * np.log2(p) for p in share if p)


def test_entropy_of_batches():
    random = np.random.default_rng(0)
    codes, edges = random.integers(0, 7, 100), np.array([0, 3, 50, 51, 100])
    wanted = [entropy(codes[start:stop]) for start, stop in pairwise(edges)]
    assert np.allclose(batch_entropy(codes, edges), wanted)


@pytest.mark.parametrize(("sizes", "batch"), [([50, 30, 20], 8), ([500] * 4, 32), ([1] * 40, 5), ([3, 97], 100)])
def test_entropy_of_a_uniform_shuffle(sizes, batch):
    random, labels = np.random.default_rng(0), np.repeat(np.arange(len(sizes)), sizes)
    drawn = [entropy(random.permutation(labels)[:batch]) for _ in range(4000)]
    assert uniform_entropy(np.array(sizes), batch) == pytest.approx(np.mean(drawn), rel=0.01)


@pytest.mark.parametrize("chunks", [None, 16, 128])
def test_a_tenth_of_a_class_sorted_file_in_memory_is_enough(class_sorted, chunks):
    """The goal: 99 % of the entropy of a uniform shuffle, as told and as delivered."""
    with H5ChunkSequence(class_sorted(chunks=chunks), memory_budget=a_tenth()) as stream:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            quality = stream.quality()
        assert quality.ratio >= 0.99
        assert (quality.classes, quality.rows_examined) == (10, ROWS)
        assert quality.window_rows < 0.05 * ROWS
        assert quality.block_purity > 0.99
        for epoch in range(2):
            delivered = [entropy(y) for _, y in stream.next_epoch()]
            assert np.mean(delivered) >= 0.99 * quality.uniform_bits
            if epoch == 0:
                assert np.mean(delivered) == pytest.approx(quality.entropy_bits)
        uniform = np.random.default_rng(0).permutation(np.arange(ROWS) % 10).reshape(-1, 32)
        assert quality.uniform_bits == pytest.approx(np.mean([entropy(batch) for batch in uniform]), rel=2e-3)


def test_large_packed_chunks_are_warned_of_with_the_memory_that_would_do(class_sorted):
    path = class_sorted(chunks=500, options={"x": {"compression": "gzip", "compression_opts": 1}})
    stream = H5ChunkSequence(path, memory_budget=a_tenth())
    with pytest.warns(
        UserWarning, match=r"a block of rows is 100.0 % one label, .* memory_budget='\d+[KM]iB' is enough"
    ):
        quality = stream.quality()
    assert quality.ratio < 0.8
    assert not quality.good
    assert "advice" in stream.describe(labels="y")
    larger = H5ChunkSequence(path, memory_budget=quality.enough_memory)
    assert larger.quality().good
    assert larger.stream_plan.memory.windows == 2 or quality.enough_memory > 5_000_000
    text = larger.describe(labels="y")
    assert "99." in text or "100." in text
    assert "advice" not in text
    again = ShuffleQuality.from_dict(json.loads(json.dumps(quality.to_dict())))
    assert again == quality


def test_file_order_and_one_class(class_sorted):
    with pytest.warns(UserWarning, match="rows come in file order; pass shuffle=True"):
        quality = H5ChunkSequence(class_sorted(), shuffle=False).quality()
    assert quality.ratio < 0.1
    one = H5ChunkSequence(class_sorted(labels=np.zeros(ROWS, int))).quality()
    assert one.ratio is None
    assert one.good
    assert "one label" in H5ChunkSequence(class_sorted(labels=np.zeros(ROWS, int))).describe("y")


def test_kinds_of_labels(class_sorted, write):
    settings = {"memory_budget": a_tenth(4000), "batch_size": 20}
    labels = np.sort(np.arange(4000) % 5)
    plain = H5ChunkSequence(class_sorted(rows=4000, labels=labels), **settings).quality()
    for other in (labels[:, None], np.eye(5)[labels], labels.astype("f8"), labels.astype(">u2")):
        path = class_sorted(rows=4000, labels=labels, other=other)
        assert H5ChunkSequence(path, **settings).quality("other").ratio == plain.ratio
    path = class_sorted(rows=4000, labels=np.random.default_rng(0).random(4000))
    with pytest.raises(UsageError, match="labels: 'y' holds no class labels"):
        H5ChunkSequence(path).quality()
    with pytest.raises(UsageError, match="labels: name the dataset"):
        H5ChunkSequence(path, y=None, shuffle=False).quality()
