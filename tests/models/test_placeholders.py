"""Models called on shapes: their variables without values are placeholders."""

from __future__ import annotations

import keras
import tensorflow as tf

from kerasmem.models.opening import open_model
from kerasmem.models.step import called_on

layers = keras.layers


def test_no_first_value_is_drawn_to_know_shapes():
    kinds = []

    class Looks(layers.Layer):
        def call(self, inputs):
            kinds.extend(each.type for each in tf.compat.v1.get_default_graph().get_operations())
            return inputs

    def build():
        return keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.BatchNormalization(), Looks()])

    with open_model(build) as opened:
        kinds.clear()
        found = called_on(opened.model, None, [keras.KerasTensor((2, 8))])
    assert found.shape == (2, 4)
    assert "MatMul" in kinds and not [each for each in kinds if "Random" in each]
    assert kinds.count("Placeholder") == 1 + 6
