"""A tf.data.Dataset has the same batches as the sequence."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from streams import RowModel, slow_double

from kerasmem import H5ChunkSequence
from kerasmem.errors import UsageError

ROWS = 203


@pytest.fixture
def path(numbered):
    return numbered(rows=ROWS, chunks=4)


def stream(path, **settings):
    return H5ChunkSequence(path, **{"batch_size": 8, "memory_budget": "3kB", **settings})


def targets(batches):
    return [np.asarray(batch[1]).tolist() for batch in batches]


@pytest.mark.parametrize(
    ("way", "prefetch"),
    [({}, 0), ({"workers": 3}, 40), ({"shuffle": False}, 40), ({"transform": slow_double, "workers": 2}, 0)],
)
def test_the_same_batches_epoch_by_epoch(path, way, prefetch):
    plain, data = stream(path, **way), stream(path, **way).as_tf_dataset(prefetch=prefetch)
    assert int(data.cardinality()) == 26
    for epoch in range(3):
        for place, (x, y) in enumerate(data.as_numpy_iterator()):
            expected = plain.batch(place, epoch)
            assert np.array_equal(x, expected[0])
            assert np.array_equal(y, expected[1])
        assert place == 25
    repeated = targets(stream(path, **way).as_tf_dataset(prefetch=prefetch).repeat(2).as_numpy_iterator())
    assert repeated == [plain.batch(place, epoch)[1].tolist() for epoch in range(2) for place in range(26)]
    endless = stream(path, **way).as_tf_dataset(endless=True, prefetch=prefetch)
    assert int(endless.cardinality()) == tf.data.INFINITE_CARDINALITY
    assert targets(endless.take(52).as_numpy_iterator()) == repeated


def test_fit_trains_on_them_as_on_the_sequence(path):
    by_sequence, by_data, in_steps = RowModel(), RowModel(), RowModel()
    by_sequence.fit(stream(path), epochs=3, verbose=0)
    by_data.fit(stream(path).as_tf_dataset(), epochs=3, verbose=0)
    in_steps.fit(stream(path).as_tf_dataset(endless=True), epochs=6, steps_per_epoch=13, verbose=0)
    assert by_data.trained == by_sequence.trained == in_steps.trained


def test_element_spec(write):
    rows = np.arange(40)
    path = write(a=rows[:, None] * [1, 2, 3], b=rows.astype("u2"), y=rows, w=rows, chunks=8)

    def spec(**settings):
        settings = {"x": ["a", "b"], "y": {"out": "y"}, "sample_weight": "w", "batch_size": 7, **settings}
        return H5ChunkSequence(path, **settings).as_tf_dataset().element_spec

    assert spec() == (
        (tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None,), tf.float32)),
        {"out": tf.TensorSpec((None,), tf.int64)},
        tf.TensorSpec((None,), tf.float32),
    )
    assert spec(batch_size=8)[2] == tf.TensorSpec((8,), tf.float32), "40 rows are 5 full batches"
    assert spec(remainder="drop")[2] == tf.TensorSpec((7,), tf.float32)
    assert spec(dtype={"b": "stored"})[0][1] == tf.TensorSpec((None,), tf.uint16)
    only = spec(x="a", y=None, sample_weight=None, shuffle=False, dtype="float16")
    assert only == (tf.TensorSpec((None, 3), tf.float16),)

    def pad(x, y):
        return [np.zeros((len(x), 2 + len(x))), x.astype("f8")], y

    assert spec(x="a", y="y", sample_weight=None, transform=pad) == (
        (tf.TensorSpec((None, None), tf.float64), tf.TensorSpec((None, 3), tf.float64)),
        tf.TensorSpec((None,), tf.int64),
    )


def test_prefetch_is_bounded(path):
    sequence, asked = stream(path), []
    deliver = sequence.open_stream().batch
    sequence.open_stream().batch = lambda *which: (asked.append(which), deliver(*which))[1]
    for number, _ in enumerate(sequence.as_tf_dataset(prefetch=3).as_numpy_iterator()):
        assert len(asked) <= number + 1 + 3 + 1
    with pytest.raises(UsageError, match=r"prefetch must be .*got -1"):
        sequence.as_tf_dataset(prefetch=-1)
    with pytest.raises(UsageError, match="endless must be True or False"):
        sequence.as_tf_dataset(endless=1)


def test_errors_reach_tf_data(numbered):
    fails = []
    data = H5ChunkSequence(numbered(rows=100), transform=lambda x, y: None if fails else (x, y)).as_tf_dataset()
    fails.append(True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="transform, on batch 0 of epoch 0"):
        list(data)
