"""One measurement of the recomputation bench, in a process of its own with the real BFC allocator."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any


def dense(depth: int = 48, units: int = 1024, batch: int = 4096) -> tuple[Any, Any, Any, str]:
    """Return the stack of dense layers with a batch and its loss."""
    import keras
    import numpy as np

    layers = keras.layers
    stack = [layers.Dense(units, activation="gelu", name=f"dense_{number}") for number in range(depth)]
    model = keras.Sequential([keras.Input((units,)), *stack, layers.Dense(1, dtype="float32", name="out")])
    draw = np.random.default_rng(0)
    return (
        model,
        draw.random((batch, units), "float32"),
        draw.random((batch, 1), "float32"),
        "mse",
    )


def resnet50(batch: int = 16) -> tuple[Any, Any, Any, str]:
    """Return ResNet50 at 128 x 128."""
    import keras
    import numpy as np

    draw = np.random.default_rng(0)
    x, y = draw.random((batch, 128, 128, 3), "float32"), draw.integers(0, 10, batch)
    model = keras.applications.ResNet50(weights=None, input_shape=(128, 128, 3), classes=10)
    return model, x, y, "sparse_categorical_crossentropy"


def transformer(blocks: int = 12, width: int = 256, length: int = 128, batch: int = 16) -> tuple[Any, Any, Any, str]:
    """Return an encoder with dropout."""
    import keras
    import numpy as np

    layers = keras.layers
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(1000, width)(inputs)
    for number in range(blocks):
        y = layers.LayerNormalization(name=f"norm_{number}a")(x)
        x = layers.Add(name=f"add_{number}a")(
            [
                x,
                layers.MultiHeadAttention(8, width // 8, dropout=0.1, name=f"attend_{number}")(y, y),
            ]
        )
        y = layers.LayerNormalization(name=f"norm_{number}b")(x)
        y = layers.Dense(4 * width, activation="gelu", name=f"wide_{number}")(y)
        y = layers.Dropout(0.1, name=f"drop_{number}")(layers.Dense(width, name=f"narrow_{number}")(y))
        x = layers.Add(name=f"add_{number}b")([x, y])
    outputs = layers.Dense(10, activation="softmax", dtype="float32")(layers.GlobalAveragePooling1D()(x))
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 1000, (batch, length)), draw.integers(0, 10, batch)
    return keras.Model(inputs, outputs), x, y, "sparse_categorical_crossentropy"


def small() -> tuple[Any, Any, Any, str]:
    """Return a stack that a test can afford."""
    return dense(8, 128, 512)


def transfer(batch: int = 16) -> tuple[Any, Any, Any, str]:
    """Return a backbone inside a model, all of it trained."""
    import keras
    import numpy as np

    backbone = keras.applications.MobileNet(weights=None, include_top=False, input_shape=(96, 96, 3), pooling="avg")
    inputs = keras.Input((96, 96, 3))
    outputs = keras.layers.Dense(10, activation="softmax")(backbone(keras.layers.Rescaling(2.0, -1.0)(inputs)))
    draw = np.random.default_rng(0)
    x, y = draw.random((batch, 96, 96, 3), "float32"), draw.integers(0, 10, batch)
    return keras.Model(inputs, outputs), x, y, "sparse_categorical_crossentropy"


def encoder_in_model(
    blocks: int = 12, width: int = 128, length: int = 96, batch: int = 32
) -> tuple[Any, Any, Any, str]:
    """Return a deep encoder as a model inside a classifier of images in patches."""
    import keras
    import numpy as np

    layers = keras.layers
    entry = keras.Input((96, width))
    x = entry
    for number in range(blocks):
        y = layers.LayerNormalization(name=f"norm_{number}a")(x)
        x = layers.Add(name=f"add_{number}a")(
            [x, layers.MultiHeadAttention(4, width // 4, name=f"attend_{number}")(y, y)]
        )
        y = layers.Dense(4 * width, activation="gelu", name=f"wide_{number}")(
            layers.LayerNormalization(name=f"norm_{number}b")(x)
        )
        x = layers.Add(name=f"add_{number}b")([x, layers.Dense(width, name=f"narrow_{number}")(y)])
    encoder = keras.Model(entry, x, name="encoder")
    inputs = keras.Input((96, 48))
    pooled = layers.GlobalAveragePooling1D()(encoder(layers.Dense(width)(inputs)))
    draw = np.random.default_rng(0)
    x, y = draw.random((batch, 96, 48), "float32"), draw.integers(0, 10, batch)
    outputs = layers.Dense(10, activation="softmax", dtype="float32")(pooled)
    return keras.Model(inputs, outputs), x, y, "sparse_categorical_crossentropy"


def residual_wavenet(
    blocks: int = 24, width: int = 32, length: int = 256, batch: int = 32
) -> tuple[Any, Any, Any, str]:
    """Return dilated convolutions with gates, each added to what it takes, as in WaveNet."""
    import keras
    import numpy as np

    layers = keras.layers
    inputs = keras.Input((256, 8))
    x = layers.Conv1D(width, 1)(inputs)
    for number in range(blocks):
        options = {"padding": "causal", "dilation_rate": 2 ** (number % 6)}
        gate = layers.Conv1D(width, 2, activation="sigmoid", **options)(x)
        x = layers.Add()([x, layers.Conv1D(width, 1)(layers.Multiply()([layers.Conv1D(width, 2, **options)(x), gate]))])
    draw = np.random.default_rng(0)
    x_batch, y = draw.random((batch, 256, 8), "float32"), draw.integers(0, 10, (batch, 256))
    outputs = layers.Dense(10, activation="softmax")(x)
    return keras.Model(inputs, outputs), x_batch, y, "sparse_categorical_crossentropy"


def stacked_lstm(depth: int = 10, units: int = 64, batch: int = 64) -> tuple[Any, Any, Any, str]:
    """Return recurrent layers one above another."""
    import keras
    import numpy as np

    layers = keras.layers
    stack = [layers.LSTM(units, return_sequences=True) for _ in range(depth)]
    model = keras.Sequential([keras.Input((48, 32)), *stack, layers.GlobalAveragePooling1D(), layers.Dense(1)])
    draw = np.random.default_rng(0)
    return model, draw.random((batch, 48, 32), "float32"), draw.random((batch, 1), "float32"), "mse"


MODELS = {
    each.__name__: each
    for each in (dense, resnet50, transformer, transfer, small, encoder_in_model, residual_wavenet, stacked_lstm)
}


def of_zoo(name: str) -> tuple[Any, Any, Any, Any]:
    """Return a model of the benches' collection with a batch and its loss."""
    import zoo

    from kerasmem.estimation.truth.networks import loss

    entry = zoo.ZOO[name]
    model = entry.build()
    return model, *zoo.batch_of(name, model, entry.batches[-1]), loss(entry.losses[0])


def layer_count(model: Any) -> int:
    """Return the layers that compute something, those of nested models too."""
    import keras

    inner = [each for each in model.layers if not isinstance(each, keras.layers.InputLayer)]
    return sum(layer_count(each) if isinstance(each, keras.Model) else 1 for each in inner)


def per_layer(model: Any) -> Any:
    """Return the rival: each dense layer wrapped in `tf.recompute_grad`."""
    import keras
    import tensorflow as tf

    class Wrapped(keras.layers.Layer):
        def __init__(self, inner: Any) -> None:
            super().__init__(name=f"again_{inner.name}")
            self.inner = inner

        def call(self, x: Any) -> Any:
            return tf.recompute_grad(lambda tensor: self.inner(tensor))(x)

    return keras.Sequential([model.inputs[0], *(Wrapped(each) for each in model.layers)])


def prepared(row: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return the compiled model of a row, its batch, and what was predicted."""
    import contextlib

    import keras

    import kerasmem

    keras.config.set_dtype_policy(row["policy"])
    keras.utils.set_random_seed(0)
    # Keras reads the scope where a layer is made.
    scope = keras.RematScope(mode="full") if row["way"] == "RematScope" else contextlib.nullcontext()
    with scope:
        model, x, y, loss = MODELS[row["model"]]() if row["model"] in MODELS else of_zoo(row["model"])
    predicted: dict[str, Any] = {"layers": layer_count(model)}
    if row["way"] == "recompute_grad":
        model = per_layer(model)
    model.compile("sgd", loss, jit_compile=row["mode"] == "xla")
    if row["way"].startswith("kerasmem"):
        asked = row["segments"]
        options = {"cuts": asked} if isinstance(asked, list) else {"segments": asked, "levels": row.get("levels", 1)}
        begin = time.perf_counter()
        model = kerasmem.recompute(model, batch_size=len(x), **options)
        plan = model.plan
        predicted |= {
            "segments": len(plan.segments),
            "activation_bytes": plan.activation_bytes,
            "plain_activation_bytes": plan.plain_activation_bytes,
            "persistent_bytes": plan.persistent_bytes,
            "extra_time": plan.extra_time,
            "planning_seconds": round(time.perf_counter() - begin, 2),
            **_layers_alone(model, len(x), loss),
        }
    return model, x, y, predicted


def _layers_alone(model: Any, batch_size: int, loss: Any) -> dict[str, int]:
    """Return how many layers keep something for the gradient, and the most that the gradient of one layer takes."""
    from kerasmem.devices.kernels import cpu_kernels
    from kerasmem.estimation.graph.rules import rules_of
    from kerasmem.training.segments.tracing import trace_chain

    rules = None if model.jit_compile else rules_of(cpu_kernels())
    steps = trace_chain(model.plain(), batch_size, loss=loss, rules=rules)
    kept = [sum(each.bytes for each in step.kept if each.for_gradient) for step in steps]
    alone = max(own + step.working_bytes for own, step in zip(kept, steps, strict=True))
    return {"keeping_layers": sum(map(bool, kept)), "one_layer_bytes": alone}


def _most_asked(step: Callable[[], Any]) -> int:
    """Return the most bytes that a step's tensors ask for at once, above those from before it; chunks waste more."""
    import tensorflow as tf

    from kerasmem.devices.recording import ALLOCATE, DEALLOCATE, of_device, read_recording, start_recording

    with tempfile.TemporaryDirectory() as folder:
        start_recording(folder)
        step()
        tf.profiler.experimental.stop()
        events = of_device(read_recording(folder, "none")[0], "CPU:0")
    signs = {ALLOCATE: 1, DEALLOCATE: -1}
    return max(itertools.accumulate(signs.get(each.kind, 0) * each.requested for each in events))


def measure(row: dict[str, Any]) -> dict[str, Any]:
    """Run the row's steps and return what the allocator and the clock say."""
    import tensorflow as tf

    model, x, y, predicted = prepared(row)
    x, y = tf.constant(x), tf.constant(y)
    model.train_on_batch(x, y)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    peaks, seconds = [], []
    for _ in range(row["steps"]):
        tf.config.experimental.reset_memory_stats("CPU:0")
        begin = time.perf_counter()
        model.train_on_batch(x, y)
        seconds.append(round(time.perf_counter() - begin, 4))
        peaks.append(int(tf.config.experimental.get_memory_info("CPU:0")["peak"]))
    asked = _most_asked(lambda: model.train_on_batch(x, y))
    weights = sum(int(tf.size(each.value)) * each.value.dtype.size for each in model.weights)
    trained = sum(int(tf.size(each.value)) * each.value.dtype.size for each in model.trainable_weights)
    return {
        "peak_bytes": peaks,
        "step_seconds": seconds,
        "median_peak_bytes": statistics.median(peaks),
        "median_step_seconds": statistics.median(seconds),
        "before_bytes": before,
        "asked_bytes": asked,
        "weight_bytes": weights,
        "gradient_bytes": trained,
        "predicted": predicted,
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
