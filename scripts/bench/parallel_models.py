"""Models of 20 to 40 million weights, whose state is large beside what a process has anyway."""

from __future__ import annotations

from typing import Any

import keras

layers = keras.layers


def dense() -> Any:
    x = inputs = keras.Input((1024,))
    for _ in range(6):
        x = layers.Dense(2048, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(16)(x))


def transformer() -> Any:
    x = inputs = keras.Input((32, 768))
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(12, 64)(y, y)])
        y = layers.Dense(3072, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(768)(y)])
    return keras.Model(inputs, layers.Dense(16)(layers.GlobalAveragePooling1D()(x)))


def words() -> Any:
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(40_000, 512)(tokens)
    x = layers.LSTM(512)(x)
    return keras.Model(tokens, layers.Dense(1024)(layers.Dense(2048, activation="relu")(x)))
