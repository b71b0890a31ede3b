"""With the same seeds a run by `kerasmem.fit` is that of `model.fit`, and a resumed one that of an undisturbed one."""

from __future__ import annotations

import random
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from stopped import Stop

import kerasmem
from kerasmem.errors import UsageError
from kerasmem.training.indexed_sources import ArraySource

ROWS = 45


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        x, y = data()
        return x[index * 9 : index * 9 + 9], y[index * 9 : index * 9 + 9]


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
    if kind == "dataset steps":
        return {"x": Batches(), "steps_per_epoch": 3}
    x, y = data()
    if kind == "tf.data":
        return {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=4).batch(6)}
    if kind in ("endless", "generator"):
        rows = given("tf.data")["x"].repeat()
        return {"x": rows if kind == "endless" else (row for row in rows.as_numpy_iterator()), "steps_per_epoch": 5}
    more = {"arrays": {}, "in order": {"shuffle": False}, "batch": {"shuffle": "batch"},
            "split": {"validation_split": 0.3}, "steps": {"steps_per_epoch": 4}}[kind]  # fmt: skip
    return {"x": x, "y": y, "batch_size": 6, **more}


def run(train, kind, **options):
    model = new_model()
    history = train(model, **given(kind), epochs=3, verbose=0, **options).history
    return history, model.get_weights()


def assert_same(one, other):
    assert one[0] == other[0]
    for mine, theirs in zip(one[1], other[1], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_without_a_checkpoint_the_run_is_that_of_keras(kind):
    assert_same(run(kerasmem.fit, kind), run(keras.Model.fit, kind))


@pytest.mark.parametrize("kind", ["in order", "batch"])
def test_with_a_checkpoint_unshuffled_arrays_come_as_in_keras(tmp_path, kind):
    assert_same(run(kerasmem.fit, kind, checkpoint=tmp_path / "run"), run(keras.Model.fit, "in order"))


@pytest.mark.parametrize(
    ("kind", "batches"),
    [("arrays", 3), ("arrays", 9), ("split", 9), ("steps", 9), ("dataset", 9), ("dataset steps", 9), ("workers", 3)],
)
def test_a_stopped_run_ends_as_one_that_was_not(tmp_path, kind, batches):
    path = tmp_path / "run"
    whole = run(kerasmem.fit, kind, checkpoint=path)
    with pytest.raises(KeyboardInterrupt):
        run(kerasmem.fit, kind, checkpoint=path, save_freq=1, callbacks=[Stop(batches)])
    assert_same(run(resume, kind, checkpoint=path), whole)


@pytest.mark.parametrize("kind", ["arrays", "tf.data"])
def test_changed_data_is_noticed_on_resume(tmp_path, kind):
    def train(seed, *callbacks):
        x, y = data()
        if kind == "arrays":
            new = {"x": x + seed, "y": y, "batch_size": 6}
        else:
            new = {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=seed).batch(6)}
        kerasmem.fit(new_model(), **new, checkpoint=tmp_path / "run", save_freq=1, verbose=0, callbacks=[*callbacks])

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            train(1, Stop(2))
    with pytest.warns(RuntimeWarning, match="first batch has changed"):
        train(2)


class Evaluate(keras.callbacks.Callback):
    """Evaluates within `fit`, which reads other data."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.evaluate(*data(), verbose=0)
        self.model.reset_metrics()


@pytest.mark.parametrize("kind", ["arrays", "dataset", "tf.data", "endless", "generator"])
def test_resume_training_takes_any_data(tmp_path, kind):
    def train(name, *callbacks):
        saver = kerasmem.ResumeTraining(tmp_path / name, save_freq=2)
        _, weights = run(keras.Model.fit, kind, callbacks=[saver, Evaluate(), *callbacks])
        return saver.run.history, weights

    whole = train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("stopped", Stop(12))
    assert_same(train("stopped"), whole)


def resume(model, **options):
    random.seed(99)  # what the next process has drawn meanwhile does not count
    return kerasmem.fit(model, **options)


@pytest.mark.parametrize("nothing", [None, np.float32(3), [None]])
def test_data_without_rows_is_refused(nothing):
    with pytest.raises(UsageError, match=r"^x"):
        ArraySource(nothing, None, None, 6, True, None)


def test_each_epoch_has_an_order_of_its_own_that_follows_the_seed():
    x, y = data()
    keras.utils.set_random_seed(11)
    first, second = (ArraySource(x, y, None, 6, True, None) for _ in range(2))
    orders = [list(first.order(epoch, ROWS)) for epoch in range(2)]
    assert orders == [list(second.order(epoch, ROWS)) for epoch in range(2)]
    assert orders[0] != orders[1] and all(sorted(order) == list(range(ROWS)) for order in orders)
    keras.utils.set_random_seed(12)
    assert list(ArraySource(x, y, None, 6, True, None).order(0, ROWS)) != orders[0]
