"""A plan saves memory by the estimate of the step itself."""

from __future__ import annotations

import keras

import kerasmem


def small_vgg():
    """First layers that keep most, and last layers whose weights are most."""
    parts = [keras.layers.Conv2D(16 * step, 3, padding="same", activation="relu") for step in (1, 1, 2, 2)]
    head = [keras.layers.MaxPooling2D(4), keras.layers.Flatten()]
    head += [keras.layers.Dense(1024, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((32, 32, 3)), *parts, *head], name="vgg")
    model.compile("sgd", "mse", jit_compile=False)
    return model


def test_the_weights_that_are_updated_while_activations_are_kept_count():
    model = small_vgg()
    made = kerasmem.recompute(model, batch_size=16)
    assert made.cuts
    ours, plain = (kerasmem.estimate(each, batch_size=16, method="graph").bytes.total for each in (made, model))
    assert ours < 0.9 * plain
