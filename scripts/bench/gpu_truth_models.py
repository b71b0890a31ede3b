"""The models that `gpu_truth.py` trains: Keras's on any backend, and a few in JAX alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

KERAS_MODELS = ("MobileNetV2", "ResNet50", "VGG16", "EfficientNetB0", "mlp", "lstm", "decoder")
PLAIN_MODELS = ("plain_mlp", "plain_convolution", "plain_attention")
TINY = "tiny"
# Every model of `gpu_truth.py --all` and its batch, those first that tell most.
BATCHES = {
    "ResNet50": 64, "decoder": 16, "mlp": 1024, "unet": 256, "lstm": 256, "VGG16": 32, "EfficientNetB0": 64,
    "text_classifier": 512, "vision_transformer": 256, "conv3d": 128, "MobileNetV2": 64, "transformer": 256,
    "wavenet": 256, "densenet121": 256, "mnist_cnn": 1024,
}  # fmt: skip
# Those of `zoo.py`, whose step is Keras's own.
ZOO_MODELS = (
    "unet", "transformer", "vision_transformer", "text_classifier", "conv3d", "wavenet", "densenet121", "mnist_cnn"
)  # fmt: skip
LEARNING_RATE = 1e-3


def compiled_keras_model(task: dict[str, Any]) -> Any:
    """Return the model with Adam and the loss of classes, under the task's dtype policy."""
    import keras

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(task["dtype"])
    model = keras_model(task["model"])
    model.compile(
        keras.optimizers.Adam(LEARNING_RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=task["jit_compile"],
    )
    return model


def target_shape(model: Any, batch: int) -> tuple[int, ...]:
    """Return the shape of a batch of classes for a model with one output."""
    return (batch, *model.outputs[0].shape[1:-1])


def keras_model(name: str) -> Any:
    """Return a Keras model by the bench's name for it, on whatever backend Keras runs."""
    import keras

    layers = keras.layers
    if name == TINY:
        return keras.Sequential([keras.Input((16,)), layers.Dense(32, activation="relu"), layers.Dense(10)])
    if name == "mlp":
        hidden = [layers.Dense(4096, activation="relu") for _ in range(3)]
        return keras.Sequential([keras.Input((1024,)), *hidden, layers.Dense(10)])
    if name == "lstm":
        return keras.Sequential(
            [keras.Input((128, 64)), layers.LSTM(512, return_sequences=True), layers.LSTM(512), layers.Dense(10)]
        )
    if name == "decoder":
        x = inputs = keras.Input((512, 768))
        for _ in range(6):
            y = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(12, 64)(y, y, use_causal_mask=True)
            x = x + layers.Dense(768)(layers.Dense(3072, activation="gelu")(layers.LayerNormalization()(x)))
        return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    if name in ZOO_MODELS:
        from zoo import ZOO

        return ZOO[name].build()
    return getattr(keras.applications, name)(weights=None, classes=10, classifier_activation=None)


def plain_model(name: str, batch: int, dtype: str) -> tuple[Any, Any, Callable[..., Any]]:
    """Return weights, a batch, and the loss as a function of both, without Keras."""
    import jax
    import jax.numpy as jnp

    def weight(*shape: int) -> Any:
        return jnp.full(shape, 0.01, "float32")

    compute = "bfloat16" if "bfloat16" in dtype else "float16" if "float16" in dtype else "float32"
    if name in (TINY, "plain_mlp"):
        width, depth = (32, 1) if name == TINY else (4096, 4)
        weights = [weight(width, width) for _ in range(depth)]

        def forward(weights: Any, x: Any) -> Any:
            for each in weights:
                x = jax.nn.relu(x @ each.astype(compute))
            return x

        return weights, jnp.ones((batch, width), compute), lambda w, x: jnp.mean(forward(w, x).astype("float32") ** 2)
    if name == "plain_convolution":
        weights = [weight(3, 3, 3, 64), *(weight(3, 3, 64, 64) for _ in range(5))]

        def forward(weights: Any, x: Any) -> Any:
            for each in weights:
                kernel = each.astype(compute)
                x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                x = jax.nn.relu(x)
            return x

        image = jnp.ones((batch, 112, 112, 3), compute)
        return weights, image, lambda w, x: jnp.mean(forward(w, x).astype("float32") ** 2)
    if name == "plain_attention":
        weights = [weight(768, 768) for _ in range(16)]

        def forward(weights: Any, x: Any) -> Any:
            for q, k, v, o in zip(*[iter(each.astype(compute) for each in weights)] * 4, strict=True):
                heads = [(x @ w).reshape(*x.shape[:2], 12, 64) for w in (q, k, v)]
                scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads[0], heads[1]) / 8)
                x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, heads[2]).reshape(x.shape) @ o
            return x

        return weights, jnp.ones((batch, 512, 768), compute), lambda w, x: jnp.mean(forward(w, x).astype("float32"))
    sys.exit(f"{name}: without Keras there are {', '.join(PLAIN_MODELS)}")
