"""`kerasmem.data.convert` from TFRecord files: complete, cut off and damaged."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from converted import content, left_in

from kerasmem.data import convert
from kerasmem.errors import DataError

ROWS = 120
RNG = np.random.default_rng(0)
X, Y = RNG.random((ROWS, 5)).astype("f4"), RNG.integers(0, 9, ROWS)
IMAGES = RNG.integers(0, 256, (ROWS, 6, 8, 3), "u1")


def example(**features):
    def feature(value):
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        values = np.atleast_1d(value)
        if values.dtype.kind == "f":
            return tf.train.Feature(float_list=tf.train.FloatList(value=values))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    named = {name.replace("__", "/"): feature(value) for name, value in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString()


def write(path, records, options=None):
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for record in records:
            writer.write(record)
    return path


def test_features_become_datasets_across_shards(tmp_path):
    for shard in range(2):
        records = (
            example(x=X[k], image__encoded=tf.io.encode_png(IMAGES[k]).numpy(), image__label=int(Y[k]), text=b"word")
            for k in range(shard * 60, shard * 60 + 60)
        )
        write(tmp_path / f"train-{shard}.tfrecord", records)
    done = convert(str(tmp_path / "train-*.tfrecord"), tmp_path / "out.h5", memory_budget="1MiB")
    result = content(tmp_path / "out.h5")
    assert np.array_equal(result["x"], X) and np.array_equal(result["image/label"], Y)
    assert np.array_equal(result["image/encoded"], IMAGES)
    assert any("and 1 more file: left out: 'text'" in note for note in done.notes)


def test_hostile_records(tmp_path):
    path = write(tmp_path / "d.tfrecord", (example(x=X[k], y=int(Y[k])) for k in range(ROWS)))
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    lying = bytearray(whole)
    lying[0:8] = (2**60).to_bytes(8, "little")
    for data, message in (
        (whole[:-5], "cannot be read: it ends within record 119"),
        (whole[: len(whole) // 2 + 3], "cannot be read: it ends within record 60"),
        (bytes(damaged), "cannot be read: (corrupted record|it ends within)"),
        (bytes(lying), "cannot be read: it ends within record 0"),
        (b"", "has no records"),
        (b"hello", "cannot be read: it ends within record 0"),
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=message):
            convert(path, tmp_path / "out.h5", shuffle=True)
        assert left_in(tmp_path, path) == []
    for records, message in (
        ([b"not an example"], "must be a tf.train.Example"),
        ([example(x=X[0]), example(x=X[1][:3])], r"cannot be read: .*x"),
        ([example(x=X[0]), example(z=1)], r"cannot be read: .*x"),
        ([example(x=X[0]), example(x=3)], r"cannot be read: .*x"),
    ):
        write(path, records)
        with pytest.raises(DataError, match=message):
            convert(path, tmp_path / "out.h5")
        assert left_in(tmp_path, path) == []
