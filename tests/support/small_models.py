"""Models for child processes: "…/small_models.py:convnet"."""

from __future__ import annotations

import keras

layers = keras.layers


def convnet():
    model = keras.Sequential(
        [
            keras.Input((24, 24, 3)),
            layers.Conv2D(16, 3, activation="relu", name="eyes"),
            layers.BatchNormalization(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    return model


def perceptron():
    model = keras.Sequential([keras.Input((64,)), layers.Dense(256, activation="relu"), layers.Dense(10)])
    model.compile(optimizer="sgd", loss="mse")
    return model
