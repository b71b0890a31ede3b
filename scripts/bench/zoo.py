"""The models that the benches train: small enough for a laptop, of every common family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

layers = keras.layers


def mnist_cnn() -> Any:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(1024, activation="relu"),
            layers.Dense(10),
        ]
    )


def wide_mlp() -> Any:
    return keras.Sequential(
        [keras.Input((1024,)), *(layers.Dense(4096, activation="relu") for _ in range(3)), layers.Dense(10)]
    )


def deep_mlp() -> Any:
    return keras.Sequential(
        [keras.Input((256,)), *(layers.Dense(256, activation="relu") for _ in range(40)), layers.Dense(10)]
    )


def application(name: str, size: int) -> Callable[[], Any]:
    def build() -> Any:
        return getattr(keras.applications, name)(
            weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None
        )

    return build


def recurrent(layer: str) -> Callable[[], Any]:
    def build() -> Any:
        return keras.Sequential(
            [keras.Input((64, 32)), getattr(layers, layer)(128, return_sequences=True), getattr(layers, layer)(128),
             layers.Dense(10)]
        )  # fmt: skip

    return build


def transformer() -> Any:
    inputs = keras.Input((64, 128))
    x = inputs
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32)(y, y)])
        y = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(128)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def unet() -> Any:
    inputs = keras.Input((64, 64, 3))
    x, skips = inputs, []
    for width in (16, 32, 64):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    for width in (64, 32, 16):
        x = layers.Conv2DTranspose(width, 2, strides=2)(x)
        x = layers.Concatenate()([x, skips.pop()])
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def wavenet() -> Any:
    inputs = keras.Input((512, 16))
    x = inputs
    for rate in (1, 2, 4, 8, 16, 32):
        y = layers.Conv1D(32, 2, padding="causal", dilation_rate=rate, activation="tanh")(x)
        x = layers.Concatenate()([x, y])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalMaxPooling1D()(x)))


def conv3d() -> Any:
    return keras.Sequential(
        [keras.Input((16, 32, 32, 2)), layers.Conv3D(16, 3, activation="relu"), layers.MaxPooling3D(),
         layers.Conv3D(32, 3, activation="relu"), layers.GlobalAveragePooling3D(), layers.Dense(10)]
    )  # fmt: skip


def siamese() -> Any:
    image = keras.Input((48, 48, 1))
    x = image
    for width in (16, 32, 64):
        x = layers.MaxPooling2D()(layers.BatchNormalization()(layers.Conv2D(width, 3, activation="relu")(x)))
    tower = keras.Model(image, layers.Flatten()(x))
    a, b = keras.Input((48, 48, 1)), keras.Input((48, 48, 1))
    return keras.Model([a, b], layers.Dense(10)(layers.Concatenate()([tower(a), tower(b)])))


def text_classifier() -> Any:
    return keras.Sequential(
        [keras.Input((128,), dtype="int32"), layers.Embedding(20_000, 64), layers.Conv1D(64, 5, activation="relu"),
         layers.GlobalMaxPooling1D(), layers.Dense(64, activation="relu"), layers.Dense(10)]
    )  # fmt: skip


# name -> (the function that builds it, batch size)
MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "mnist_cnn": (mnist_cnn, 128),
    "wide_mlp": (wide_mlp, 64),
    "deep_mlp": (deep_mlp, 512),
    "vgg16": (application("VGG16", 64), 16),
    "resnet50": (application("ResNet50", 96), 8),
    "resnet50_wide_batch": (application("ResNet50", 128), 24),
    "mobilenet_v2": (application("MobileNetV2", 96), 16),
    "efficientnet_b0": (application("EfficientNetB0", 96), 16),
    "densenet121": (application("DenseNet121", 64), 8),
    "inception_v3": (application("InceptionV3", 128), 8),
    "lstm": (recurrent("LSTM"), 64),
    "gru": (recurrent("GRU"), 64),
    "transformer": (transformer, 32),
    "unet": (unet, 16),
    "wavenet": (wavenet, 32),
    "conv3d": (conv3d, 8),
    "siamese": (siamese, 64),
    "text_classifier": (text_classifier, 64),
}
