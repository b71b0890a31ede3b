"""Keras's `fit` goes through epochs and data as before."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from kerasmem.compat.keras_training import (
    initial_epoch,
    logs_from_steps,
    read_epoch,
    record_epoch_iterator,
    set_initial_epoch,
    step_on_data,
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


def test_the_way_through_epochs_is_that_of_fit():
    model = small()
    with record_epoch_iterator(model) as found:
        model.fit(rows(), verbose=0)
    (again,) = found
    again.reset()
    batches = []
    for _ in range(2):
        assert read_epoch(again, lambda iterator: batches.append(next(iterator)) or len(batches)) == len(batches)
    assert len(batches) == 8


def test_the_step_on_one_batch_is_found():
    model = small()
    model.make_train_function()
    assert step_on_data(model.train_function) is not None
