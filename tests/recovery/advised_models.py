"""Models for which the tests ask advice: "…/advised_models.py:name"."""

from __future__ import annotations

import keras

layers = keras.layers


def residual(blocks=4):
    """A stack of dense blocks with short cuts."""
    inputs = keras.Input((16,))
    x = layers.Dense(192)(inputs)
    for _ in range(blocks):
        h = layers.Dense(384, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Dense(192)(h) + x
    model = keras.Model(inputs, layers.Dense(2)(x))
    model.compile(keras.optimizers.Adam(3e-4), "mse")
    return model


def attention():
    """A small transformer over one-dimensional convolutions."""
    inputs = keras.Input((96, 8))
    x = layers.Conv1D(64, 5, strides=2, padding="same", activation="swish")(inputs)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(256, activation="gelu")(x)))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x)))
    model.compile(keras.optimizers.AdamW(1e-3), "categorical_crossentropy")
    return model


def autoencoder():
    """Down and up again, by strides and transposed convolutions."""
    inputs = keras.Input((32, 32, 1))
    x = inputs
    for filters in (16, 32):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", activation="elu")(x)
    for filters in (32, 16):
        x = layers.Conv2DTranspose(filters, 3, strides=2, padding="same", activation="elu")(x)
    model = keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(x))
    model.compile("adamax", keras.losses.Huber(delta=2.0))
    return model


def towers():
    """The same nested model twice, and what is between its outputs."""
    tower = keras.Sequential(
        [keras.Input((48,)), *[layers.Dense(320, activation="tanh") for _ in range(3)], layers.Dense(32)], name="tower"
    )
    left, right = keras.Input((48,), name="left"), keras.Input((48,), name="right")
    x = layers.Dense(64, activation="relu")(layers.Subtract()([tower(left), tower(right)]))
    model = keras.Model([left, right], layers.Dense(1, activation="sigmoid")(x))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


def vocabulary():
    """An embedding, whose gradients are slices, larger than all else."""
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(40_000, 32)(inputs))
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(256, activation="relu")(x)))
    model.compile("sgd", "mse")
    return model
