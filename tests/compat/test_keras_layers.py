"""What is borrowed of layers and models that a signature does not show."""

from __future__ import annotations

import keras
import tensorflow as tf

from kerasmem.compat.keras_functional import is_functional
from kerasmem.compat.keras_layers import draws_numbers, supports_jit, without_name_scopes


def test_graphs_of_layers():
    inputs = keras.Input((3,))

    class Own(keras.Model):
        def call(self, x):
            return x

    assert is_functional(keras.Model(inputs, keras.layers.Dense(2)(inputs)))
    assert not is_functional(Own())
    assert not is_functional(keras.layers.Dense(2))
    assert supports_jit(Own())


def test_names_that_tensorflow_refuses():
    layer = keras.layers.Dense(2, name="my layer (v2)")
    layer.build((None, 3))
    with without_name_scopes():
        traced = tf.function(layer).get_concrete_function(tf.TensorSpec((1, 3)))
    assert traced.structured_outputs.shape == (1, 2)


def test_layers_with_a_generator_of_their_own():
    assert draws_numbers(keras.layers.Dropout(0.5))
    assert not draws_numbers(keras.layers.Dense(1))
