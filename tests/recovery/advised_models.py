"""Models that advice is asked for, "…/advised_models.py:name": the first to write it with, the others odd ones."""

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


def stack(depth=48):
    """Many narrow layers one after another."""
    x = inputs = keras.Input((64,))
    for _ in range(depth):
        x = layers.Dense(64, activation="gelu")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("sgd", "mse", jit_compile=False)
    return model


def double():
    """Float64 from beginning to end."""
    model = keras.Sequential(
        [
            keras.Input((128,), dtype="float64"),
            layers.Dense(512, activation="relu", dtype="float64"),
            layers.Dense(256, activation="relu", dtype="float64"),
            layers.Dense(4, dtype="float64"),
        ]
    )
    model.compile("rmsprop", "mse")
    return model


def two_headed():
    """An image and a vector; two outputs with a loss each."""
    image, extra = keras.Input((24, 24, 2), name="image"), keras.Input((6,), name="extra")
    x = layers.Conv2D(24, 3, strides=2, activation="relu")(image)
    x = layers.Conv2D(48, 3, activation="relu", padding="same")(x)
    x = layers.Concatenate()([layers.GlobalMaxPooling2D()(x), layers.Dense(16)(extra)])
    label = layers.Dense(5, activation="softmax", name="label")(x)
    score = layers.Dense(1, name="score")(x)
    model = keras.Model({"image": image, "extra": extra}, {"label": label, "score": score})
    model.compile("adam", {"label": "sparse_categorical_crossentropy", "score": "mse"})
    return model


def tagger():
    """A label for each word, by a recurrent layer with an embedding."""
    words = keras.Input((40,), dtype="int32", name="words")
    x = layers.Bidirectional(layers.GRU(48, return_sequences=True))(layers.Embedding(3000, 64)(words))
    model = keras.Model(words, layers.Dense(12, activation="softmax")(x))
    model.compile("nadam", keras.losses.SparseCategoricalCrossentropy())
    return model


def volumes():
    """Three-dimensional convolutions to a map of the same size."""
    inputs = keras.Input((12, 12, 12, 1))
    x = layers.Conv3D(16, 3, padding="same", activation="relu")(inputs)
    x = layers.Conv3D(16, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Conv3D(1, 1, activation="sigmoid")(x))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.8), "binary_crossentropy")
    return model


def attention():
    """A small transformer over one-dimensional convolutions; nothing of it was looked at while advice was written."""
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
