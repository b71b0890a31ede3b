"""With the same seeds, a run by `kerasmem.fit` with a checkpoint is the run of `model.fit`, bit for bit."""

from __future__ import annotations

import functools
import random

import keras
import numpy as np
import pytest

import kerasmem
from kerasmem.errors import UsageError
from kerasmem.training.run_state import RunState
from kerasmem.training.sources import ArraySource, DatasetSource

ROWS = 45


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        x, y = data()
        return x[index * 9 : index * 9 + 9], y[index * 9 : index * 9 + 9]


class Stop(keras.callbacks.Callback):
    """Ends the process's part of a run, as a kill would."""

    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def data():
    generator = np.random.default_rng(3)
    return generator.random((ROWS, 8), "float32"), generator.integers(0, 3, ROWS)


def new_model():
    keras.utils.set_random_seed(11)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    return model


def given(kind):
    if kind == "dataset":
        return {"x": Batches(), "shuffle": True}
    if kind == "workers":
        return {"x": Batches(workers=2), "shuffle": True}
    x, y = data()
    more = {"arrays": {}, "in order": {"shuffle": False}, "batch": {"shuffle": "batch"},
            "split": {"validation_split": 0.3}, "steps": {"steps_per_epoch": 4}}[kind]  # fmt: skip
    return {"x": x, "y": y, "batch_size": 6, **more}


@functools.cache
def plain_run(kind):
    """What Keras's own `fit` gives: history, weights, and the number that Python's generator draws next."""
    model = new_model()
    history = model.fit(**given(kind), epochs=3, verbose=0).history
    return history, model.get_weights(), random.random()


@pytest.mark.parametrize("kind", ["arrays", "in order", "batch", "split", "steps", "dataset", "workers"])
def test_the_same_seeds_give_the_same_run(tmp_path, kind):
    wanted, weights, drawn = plain_run(kind)
    ours = new_model()
    found = kerasmem.fit(ours, **given(kind), epochs=3, verbose=0, checkpoint=tmp_path / "run").history
    assert found == wanted
    assert random.random() == drawn, "Python's generator is where the script would have it"
    for one, other in zip(ours.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["arrays", "batch", "dataset"])
@pytest.mark.parametrize("batches", [3, 8])
def test_so_it_is_where_the_run_was_stopped(tmp_path, kind, batches):
    wanted, _, drawn = plain_run(kind)
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        kerasmem.fit(
            new_model(), **given(kind), epochs=3, verbose=0, checkpoint=path, save_freq=1, callbacks=[Stop(batches)]
        )
    model = new_model()
    random.seed(99)  # what the next process has drawn meanwhile does not count
    found = kerasmem.fit(model, **given(kind), epochs=3, verbose=0, checkpoint=path).history
    assert found == wanted
    if kind == "dataset":
        assert random.random() == drawn


@pytest.mark.parametrize("nothing", [None, np.float32(3), [None]])
def test_data_without_rows_is_refused(nothing):
    with pytest.raises(UsageError, match=r"^x"):
        ArraySource(nothing, None, None, 6, True, None)


def test_the_order_of_arrays_is_that_of_tensorflows_seed_alone():
    x, y = data()
    keras.utils.set_random_seed(11)
    first, second = (ArraySource(x, y, None, 6, True, None) for _ in range(2))
    assert list(first.order(0)) == list(first.order(1)) == list(second.order(0))
    assert sorted(first.order(0)) == list(range(ROWS)) != list(first.order(0))
    keras.utils.set_random_seed(12)
    assert list(ArraySource(x, y, None, 6, True, None).order(0)) != list(first.order(0))


def test_a_point_before_an_epochs_first_batch_has_the_state_that_drew_its_order():
    source = DatasetSource(Batches(), True, None)
    random.seed(5)
    source.begin_epoch(0)
    order = [source.index(place) for place in range(5)]
    other = DatasetSource(Batches(), True, None)
    other.go_to(source.position(RunState()), RunState())
    random.seed(6)
    other.begin_epoch(0)
    assert [other.index(place) for place in range(5)] == order
    assert source.position(RunState(epoch=1))["random"] == random.getstate()
