"""A decoder of seven billion parameters, its layers unrolled: what an estimate must open without allocating it."""

from __future__ import annotations

from typing import Any

import keras

layers = keras.layers


def decoder(
    depth: int = 32,
    width: int = 4096,
    heads: int = 32,
    hidden: int = 16384,
    vocabulary: int = 32_000,
    length: int = 512,
) -> Any:
    """Return the model: token numbers in, a score for every word of the vocabulary out."""
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    x = layers.Embedding(vocabulary, width, name="embedding")(tokens)
    for number in range(depth):
        y = layers.LayerNormalization(name=f"attention_norm_{number}")(x)
        attention = layers.MultiHeadAttention(heads, width // heads, name=f"attention_{number}")
        x = layers.Add(name=f"attention_add_{number}")([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(name=f"dense_norm_{number}")(x)
        y = layers.Dense(hidden, activation="gelu", name=f"expand_{number}")(y)
        y = layers.Dense(width, name=f"contract_{number}")(y)
        x = layers.Add(name=f"dense_add_{number}")([x, y])
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(vocabulary, name="scores")(x), name="decoder")
