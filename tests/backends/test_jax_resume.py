"""Training on JAX that is stopped at any batch and started again: `scripts/test --backend jax`."""

from __future__ import annotations

import os

import pytest

if os.environ.get("KERAS_BACKEND") != "jax":
    pytest.skip("of Keras on JAX: run by `scripts/test --backend jax`", allow_module_level=True)

import h5py
import keras
import numpy as np
from keras import layers

import kerasmem
from kerasmem.errors import UsageError


@pytest.fixture
def file(tmp_path):
    path, draw = tmp_path / "data.h5", np.random.default_rng(0)
    with h5py.File(path, "w") as out:
        out["x"], out["y"] = draw.random((70, 6), "float32"), draw.integers(0, 2, 70)
    return path


def made(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(0.4),
         layers.Dense(2, "softmax")]
    )  # fmt: skip
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Killed(Exception):
    """Stands for the end of the process."""


class KillAt(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise Killed


def trained(model, file, checkpoint, kill=0):
    data = kerasmem.H5ChunkSequence(file, batch_size=8, seed=4, memory_budget="2kB")
    return kerasmem.fit(
        model, data, epochs=3, verbose=0, callbacks=[KillAt(kill)], checkpoint=checkpoint, save_freq=2
    ).history  # fmt: skip


def test_a_stopped_training_ends_as_one_that_never_was(file, tmp_path):
    whole = made(0)
    expected = trained(whole, file, tmp_path / "whole.resume")
    killed = tmp_path / "killed.resume"
    for seed, step in ((0, 5), (1, 9)):  # within the first epoch, and in one that was gone on with
        with pytest.raises(Killed):
            trained(made(seed), file, killed, step)
        assert killed.exists()
    model = made(2)
    found = trained(model, file, killed)
    for one, other in zip(whole.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(whole.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.value, other.value)
    assert found == expected
    assert not killed.exists(), "training is over"


def test_what_it_does_not_do_on_jax_is_said(file, tmp_path):
    model, x, y = made(0), np.ones((8, 6), "float32"), np.zeros(8, "int32")
    with pytest.raises(UsageError, match="micro_batches, isolated and batch_size='max' are not there on JAX"):
        kerasmem.fit(model, x, y, micro_batches=2)
    with pytest.raises(UsageError, match="checkpoint: on JAX training goes on with an H5ChunkSequence"):
        kerasmem.fit(model, x, y, checkpoint=tmp_path / "a.resume")
    with pytest.warns(RuntimeWarning, match="takes no step again"):
        assert kerasmem.fit(model, x, y, verbose=0).recoveries == []
