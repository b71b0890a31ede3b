"""Keras's losses are reduced, masked and shown as before."""

from __future__ import annotations

import keras
import numpy as np

from kerasmem.compat.keras_losses import (
    compiled_loss,
    has_added_losses,
    loss_tracker,
    masked_weights,
    reduction_replaced,
)


def test_losses_reduce_by_the_function_that_is_replaced():
    def doubled(reduce, values, **how):
        assert set(how) == {"sample_weight", "mask", "reduction", "dtype"}
        return 2 * reduce(values, **how)

    loss, values = keras.losses.MeanSquaredError(), (np.ones((4, 1)), np.zeros((4, 1)))
    with reduction_replaced(doubled):
        assert float(loss(*values)) == 2
    assert float(loss(*values)) == 1


def test_masked_weights_are_zero():
    weights = masked_weights(
        keras.ops.ones((4,)), keras.ops.array([True, True, True, False]), "float32", "sum_over_batch_size"
    )
    assert float(weights[3]) == 0


def test_trackers_of_each_output():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"})
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((2, 3)), {name: np.ones((2, 1)) for name in "ab"})
    assert loss_tracker(model).name == "loss"
    assert sorted(each.name for each in compiled_loss(model).metrics) == ["a_loss", "b_loss"]


def test_losses_that_layers_add():
    class Adding(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.sum(x))
            return x

    layer = Adding()
    layer(np.ones((2, 3)))
    assert has_added_losses(layer) and not has_added_losses(keras.layers.Dense(1, kernel_regularizer="l2"))
