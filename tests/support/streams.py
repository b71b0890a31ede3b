"""A tiny model, a record of what it was fed, and transforms for worker processes."""

from __future__ import annotations

import functools
import os
import time

import keras
import numpy as np

from kerasmem import H5ChunkSequence


class Recorded(H5ChunkSequence):
    """Notes the targets of each batch that Keras was given within an epoch, and how far it was ahead."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.epochs, self.asked = [], 0

    def on_epoch_begin(self):
        super().on_epoch_begin()
        self.epochs.append([])

    def read(self, cursor):
        for batch in super().read(cursor):
            self.asked += 1
            self.epochs[-1].append(np.array(batch[1]).tolist())
            yield batch

    @property
    def rows(self):
        return [[row for batch in epoch for row in batch] for epoch in self.epochs]


def tiny_model(**settings):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **settings)
    return model


@functools.cache
def shared_model(width=3):
    """A tiny model whose step is traced once, for tests about what it is fed and not about what it learns."""
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def note_process(x, y):
    """Return the targets, and in x the numbers of the process that ran this and of the one that forked it."""
    x[:, :2] = os.getpid(), os.getppid()
    return x, y


def slow_double(x, y):
    time.sleep(0.001 * (int(y[0]) % 3))
    return x * 2, y


def die(x, y):
    os._exit(9)


class OddError(Exception):
    """An exception that does not survive pickling."""

    def __init__(self, one, two):
        super().__init__(one + two)


def raise_odd(x, y):
    raise OddError("odd ", "error")


class RowModel(keras.Model):
    """Notes which rows it is trained and tested on; predicts the number of the row."""

    def __init__(self):
        super().__init__()
        self.trained, self.tested = [], []
        self.compile(run_eagerly=True)

    def call(self, x):
        return x

    def train_step(self, data):
        self.trained += data[0].numpy()[:, 0].astype(int).tolist()
        return {"loss": 0.0}

    def test_step(self, data):
        self.tested += data[0].numpy()[:, 0].astype(int).tolist()
        return {"loss": 0.0}
