"""Networks that come with kerasmem, so that any machine can measure the steps that the data set has: small, of common
families, and compiled as a row of it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kerasmem.models.backend import import_keras


@dataclass(frozen=True)
class Entry:
    """A network of the data set.

    Attributes:
        build: makes it, under the dtype policy that is set.
        batches: the batch sizes it is trained at.
        losses: for each output: "sparse" (class indices), or "mse".
        held_out: reported apart; nothing may be tuned to it.
        heavy: takes XLA long to compile, so it has one XLA row.
        modes: the execution modes that TensorFlow can train it in on a CPU.
        mixed: the mixed policies that TensorFlow can train it in on a CPU.
        input_shape: of a model that does not declare its input, without the batch.
    """

    build: Callable[[], Any]
    batches: tuple[int, ...]
    losses: tuple[str, ...] = ("sparse",)
    held_out: bool = False
    heavy: bool = False
    modes: tuple[str, ...] = ("graph", "xla")
    mixed: tuple[str, ...] = ("mixed_bfloat16", "mixed_float16")
    input_shape: tuple[int, ...] | None = None


def mnist_cnn() -> Any:
    """Return two convolutions and two dense layers, for digits of 28 × 28."""
    keras = import_keras()
    layers = keras.layers
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
    """Return three dense layers of 4096."""
    keras = import_keras()
    hidden = [keras.layers.Dense(4096, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((1024,)), *hidden, keras.layers.Dense(10)])


def application(name: str, size: int) -> Callable[[], Any]:
    """Return a function that makes a network of `keras.applications` for square images, without weights of others."""

    def build() -> Any:
        make = getattr(import_keras().applications, name)
        return make(weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None)

    return build


def recurrent(layer: str) -> Callable[[], Any]:
    """Return a function that makes two recurrent layers of a class of `keras.layers`."""

    def build() -> Any:
        keras = import_keras()
        make = getattr(keras.layers, layer)
        return keras.Sequential(
            [keras.Input((64, 32)), make(128, return_sequences=True), make(128), keras.layers.Dense(10)]
        )

    return build


def transformer() -> Any:
    """Return an encoder of four blocks."""
    keras = import_keras()
    layers = keras.layers
    inputs = keras.Input((64, 128))
    x = inputs
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32)(y, y)])
        y = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(128)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def unet() -> Any:
    """Return a U-Net of three levels, for images of 64 × 64."""
    keras = import_keras()
    layers = keras.layers
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


def text_classifier() -> Any:
    """Return an embedding and a convolution over 128 tokens."""
    keras = import_keras()
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((128,), dtype="int32"), layers.Embedding(20_000, 64), layers.Conv1D(64, 5, activation="relu"),
         layers.GlobalMaxPooling1D(), layers.Dense(64, activation="relu"), layers.Dense(10)]
    )  # fmt: skip


# The order in which they are measured: what is quick comes first.
NETWORKS: dict[str, Entry] = {
    "mnist_cnn": Entry(mnist_cnn, (64, 512)),
    "wide_mlp": Entry(wide_mlp, (64, 1024)),
    "text_classifier": Entry(text_classifier, (64, 512)),
    "transformer": Entry(transformer, (16, 64)),
    "unet": Entry(unet, (8, 32)),
    "lstm": Entry(recurrent("LSTM"), (32, 128, 512)),
    "vgg16": Entry(application("VGG16", 64), (8, 24)),
    "mobilenet_v2": Entry(application("MobileNetV2", 96), (8, 32), heavy=True),
}

# name → (Keras's class, its settings beside the learning rate)
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "rmsprop": ("RMSprop", {}),
    "adafactor": ("Adafactor", {}),
    "lion": ("Lion", {}),
    "adamw": ("AdamW", {}),
    "adam_ema": ("Adam", {"use_ema": True}),
    "adam_accumulate": ("Adam", {"gradient_accumulation_steps": 4}),
}


def loss(name: str) -> Any:
    """Return the loss that an entry names."""
    losses = import_keras().losses
    return losses.SparseCategoricalCrossentropy(from_logits=True) if name == "sparse" else losses.MeanSquaredError()


def compiled_entry(entry: Entry, optimizer: str, dtype: str, metrics: bool, jit_compile: bool) -> Any:
    """Return a network compiled as a row asks."""
    keras = import_keras()
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        model = entry.build()
    finally:
        keras.config.set_dtype_policy(before)
    losses = [loss(name) for name in entry.losses]
    measures = [["accuracy"] if name == "sparse" else ["mae"] for name in entry.losses]
    one = len(losses) == 1
    kind, settings = OPTIMIZERS[optimizer]
    model.compile(
        optimizer=getattr(keras.optimizers, kind)(1e-4, **settings),
        loss=losses[0] if one else losses,
        metrics=(measures[0] if one else measures) if metrics else None,
        jit_compile=jit_compile,
    )
    return model


def compiled(name: str, optimizer: str, dtype: str, metrics: bool, jit_compile: bool) -> Any:
    """Return one of `NETWORKS` compiled as a row asks: the factory that `estimate` and `measure` are given."""
    return compiled_entry(NETWORKS[name], optimizer, dtype, metrics, jit_compile)
