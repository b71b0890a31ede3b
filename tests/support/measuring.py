"""Run steps of a model in this process and print what the allocator did: measuring.py BUILDER BATCH [jit | estimate].

With "estimate" it also prints the graph method's report, and the kernels that this process runs on.

The environment must have TF_CPU_ALLOCATOR_USE_BFC=true.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile

import keras
import tensorflow as tf

import kerasmem
from kerasmem.devices.kernels import cpu_kernels
from kerasmem.devices.recording import ALLOCATE, of_device, read_recording, start_recording

layers = keras.layers
STEPS = 10
ENVIRONMENT = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "CUDA_VISIBLE_DEVICES": "-1"}


def measure(program, name, batch_size, more="", **environ):
    """Run this file in a process, and return the figures that it prints."""
    done = program(__file__, name, batch_size, more, env={**ENVIRONMENT, **environ})
    assert done.code == 0, done.err[-2000:]
    return json.loads(done.out.splitlines()[-1])


def convnet():
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)), layers.Conv2D(32, 5, activation="relu"), layers.MaxPooling2D(),
            layers.Conv2D(64, 5, activation="relu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dropout(0.5),
            layers.Dense(256, activation="relu"), layers.Dense(10, activation="softmax"),
        ]
    )  # fmt: skip
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def transformer():
    ids = keras.Input((48,), dtype="int32")
    x = layers.Embedding(500, 64)(ids)
    x = layers.LayerNormalization()(layers.MultiHeadAttention(4, 16)(x, x) + x)
    x = layers.LayerNormalization()(layers.Dense(64)(layers.Dense(256, activation="gelu")(x)) + x)
    model = keras.Model(ids, layers.Dense(5, activation="softmax")(layers.GlobalAveragePooling1D()(x)))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def recurrent():
    model = keras.Sequential([keras.Input((20, 16)), layers.LSTM(64), layers.Dense(1)])
    model.compile("adam", "mse")
    return model


class OfWords(layers.Layer):
    """A cell that reads a sentence word by word, and adds what it made of it to its state."""

    state_size = output_size = 32

    def __init__(self):
        super().__init__()
        self.words = layers.LSTM(32)

    def build(self, shape):
        self.words.build(shape)

    def call(self, sentence, states):
        state = self.words(sentence) + states[0]
        return state, [state]


class Sentences(layers.RNN):
    """Goes over the sentences of a text; Keras's own takes one vector a step."""

    def build(self, shape):
        self.cell.build((shape[0], *shape[2:]))
        self.built = True


def nested():
    """A loop inside a loop."""
    model = keras.Sequential([keras.Input((6, 12, 16)), Sentences(OfWords()), layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def frames():
    """A loop with convolutions."""
    model = keras.Sequential([keras.Input((8, 16, 16, 3)), layers.ConvLSTM2D(16, 3), layers.Flatten(), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def maps():
    """A value for each place, whose loss has gradients that follow from constants alone."""
    model = keras.Sequential([keras.Input((32, 32, 3)), layers.Conv2D(24, 3, padding="same")])
    model.compile("sgd", "mse")
    return model


def thumbnails():
    """A step that takes less time than a thread may wait for a processor."""
    rows = [layers.Conv2D(8, 3, padding="same", activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((12, 12, 8)), *rows])
    model.compile("sgd", "mse")
    return model


def wide(**settings):
    rows = [layers.Dense(1024, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((512,)), *rows, layers.Dense(10)])
    model.compile(keras.optimizers.Adam(**settings), "mse")
    return model


def accumulated():
    """A model whose optimizer updates the weights in one of 16 steps."""
    return wide(gradient_accumulation_steps=16)


def averaged():
    """A model whose optimizer overwrites the weights by their averages in one of 5 steps."""
    return wide(use_ema=True, ema_overwrite_frequency=5)


MODELS = {
    each.__name__: each
    for each in (
        convnet, transformer, recurrent, nested, frames, maps, thumbnails, accumulated, averaged,
    )
}  # fmt: skip


def batch_of(model, size):
    """The tensors of one batch, of zeros."""
    x = tf.zeros((size, *model.inputs[0].shape[1:]), model.inputs[0].dtype)
    is_sparse = "sparse" in str(model.loss)
    return x, tf.zeros(
        (size,) if is_sparse else (size, *model.outputs[0].shape[1:]), "int32" if is_sparse else "float32"
    )


def main(name: str, size: str, more: str = "") -> None:
    """Print the peaks of steps after the first, and what was in use before them."""
    model = MODELS[name]()
    model.jit_compile = more == "jit"
    data = batch_of(model, int(size))

    # `fit` traces a step with an open batch, `train_on_batch` with a fixed one.
    open_batch = [tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype) for tensor in data]
    signature = None if more == "fixed" else open_batch

    @tf.function(input_signature=signature, jit_compile=model.jit_compile or None)
    def step(x, y):
        return model.train_step((x, y))

    peaks, before = [], []
    for _ in range(STEPS + 2):
        tf.config.experimental.reset_memory_stats("CPU:0")
        before.append(tf.config.experimental.get_memory_info("CPU:0")["current"])
        step(*data)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    found = {"peak": int(statistics.median(peaks[2:])), "peaks": peaks[2:], "before": before[-1]}
    if more == "jit":
        found["requested"] = largest_requests(step, data)
    if more == "estimate":
        report = kerasmem.estimate(MODELS[name], batch_size=int(size), method="graph")
        found |= {"estimate": report.to_dict(), "kernels": cpu_kernels().kind}
    print(json.dumps(found))


def largest_requests(step, data):
    """What the allocator was asked for in one step, by the profiler's record of it."""
    with tempfile.TemporaryDirectory() as folder:
        start_recording(folder)
        step(*data)
        tf.profiler.experimental.stop()
        events = of_device(read_recording(folder, "none")[0], "CPU:0")
    return sorted((event.requested for event in events if event.kind == ALLOCATE), reverse=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
