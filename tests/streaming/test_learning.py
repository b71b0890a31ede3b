"""Shuffling as training sees it: a class-sorted file, streamed, against the same rows in memory."""

from __future__ import annotations

import keras
import numpy as np

from kerasmem import H5ChunkSequence

CLASSES, ROWS = 8, 6400


def class_sorted(write):
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), ROWS // CLASSES)
    centres = random.standard_normal((CLASSES, 16)) * 0.7
    features = (centres[labels] + random.standard_normal((ROWS, 16))).astype("f4")
    return features, labels, write(x=features, y=labels, chunks=16)


def accuracy(data, labels, features, **settings):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(CLASSES, "softmax")])
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(*data, epochs=2, verbose=0, **settings)
    return model.evaluate(features, labels, batch_size=800, verbose=0)[1]


def test_streaming_learns_like_shuffling_in_memory(write):
    features, labels, path = class_sorted(write)
    stream = H5ChunkSequence(path, batch_size=32, memory_budget="150kB")
    assert stream.stream_plan.memory.window_rows < ROWS / 5, "a fifth of the rows at a time"
    assert stream.stream_plan.memory.window_blocks > 20
    memory = accuracy((features, labels), labels, features, batch_size=32)
    streamed = accuracy((stream,), labels, features)
    in_order = accuracy((H5ChunkSequence(path, batch_size=32, shuffle=False),), labels, features)
    assert memory > 0.8
    assert abs(streamed - memory) < 0.02, (streamed, memory)
    assert in_order < memory - 0.2, "file order, for comparison, does not learn"


def test_batches_hold_many_classes(write):
    _, labels, path = class_sorted(write)
    stream = H5ChunkSequence(path, batch_size=64, memory_budget="150kB")

    def entropy(batch):
        share = np.bincount(batch, minlength=CLASSES) / len(batch)
        return -np.sum(share * np.log(np.where(share, share, 1)))

    streamed = np.mean([entropy(y) for _, y in stream])
    shuffled = np.random.default_rng(0).permutation(labels).reshape(-1, 64)
    uniform = np.mean([entropy(batch) for batch in shuffled])
    assert streamed > 0.93 * uniform, (streamed, uniform)
