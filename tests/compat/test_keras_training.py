"""Keras's `fit` goes through epochs and data as before."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

from kerasmem.compat.keras_training import (
    initial_epoch,
    logs_from_steps,
    set_initial_epoch,
    step_on_data,
    steps_skipped,
)


def small():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def rows():
    return tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.ones((8, 1)))).batch(2)


def test_a_callback_chooses_the_first_epoch():
    class Begin(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            set_initial_epoch(self.model, 2)

    model = small()
    assert initial_epoch(model) is None
    history = model.fit(rows(), epochs=4, verbose=0, callbacks=[Begin()])
    assert history.epoch == [2, 3]


def test_logs_of_an_epoch_are_those_of_its_last_step():
    model, steps = small(), []

    def step(iterator):
        next(iterator)
        steps.append(len(steps))
        return {"loss": float(len(steps))}

    with logs_from_steps(model):
        model.make_train_function()
        model.train_function = step
        assert model.fit(rows(), verbose=0).history["loss"] == [4.0]
    assert "_get_metrics_result_or_logs" not in vars(model)


def test_skipped_steps_are_counted_and_not_taken():
    taken, skipped = [], []

    class Skip(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            scope.enter_context(steps_skipped(2, 3, lambda iterator: skipped.append(float(next(iterator)[0][0, 0]))))

        def on_epoch_begin(self, epoch, logs=None):
            self.model.evaluate(rows(), verbose=0)

        def on_train_batch_end(self, batch, logs=None):
            taken.append(batch)

    model = small()
    with contextlib.ExitStack() as scope:
        model.fit(rows(), epochs=2, verbose=0, callbacks=[Skip()])
    assert (taken, len(skipped)) == ([3, 0, 1, 2, 3], 4 + 4 + 3)
    assert int(model.optimizer.iterations) == 5


def test_the_step_on_one_batch_is_found():
    model = small()
    model.make_train_function()
    assert step_on_data(model.train_function) is not None
