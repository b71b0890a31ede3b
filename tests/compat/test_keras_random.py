"""Keras's random generators are found where they were."""

from __future__ import annotations

import keras

from kerasmem.compat.keras_random import draws_numbers, global_generator


def test_the_generator_of_those_who_name_none():
    keras.random.uniform(())
    assert isinstance(global_generator(), keras.random.SeedGenerator)


def test_layers_with_a_generator():
    assert draws_numbers(keras.layers.Dropout(0.5))
    assert not draws_numbers(keras.layers.Dense(1))
