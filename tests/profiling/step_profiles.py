"""Real training with `MemoryLogger(profile_batch=)`, one function a scenario; prints what was found as JSON."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import tempfile
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from kerasmem import MemoryLogger

layers = keras.layers
BATCH = 32


class OwnStep(keras.Model):
    """A model with a training step of its own, that computes outside its layers."""

    def __init__(self):
        super().__init__(name="own")
        self.wide, self.out = layers.Dense(1024, activation="swish", name="wide"), layers.Dense(1, name="out")

    def call(self, x, training=False):
        return self.out(self.wide(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def convnet(**options):
    model = keras.Sequential(
        [
            keras.Input((24, 24, 3)),
            layers.Conv2D(16, 3, activation="swish", name="eyes"),
            layers.BatchNormalization(name="norm"),
            layers.GlobalAveragePooling2D(name="pool"),
            layers.Dense(10, name="out"),
        ],
        name="net",
    )
    model.compile("adam", "mse", metrics=["mae"], **options)
    return model


def data(model, batches=6):
    rows = BATCH * batches
    shape = (24, 24, 3) if model.name == "net" else (64,)
    width = 10 if model.name == "net" else 1
    return np.ones((rows, *shape), "float32"), np.ones((rows, width), "float32")


def fit(model, profiler, batches=6, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(*data(model, batches), batch_size=BATCH, verbose=0, callbacks=[profiler], **options)
    found = None if profiler.profile is None else profiler.profile.to_dict()
    if found is not None:
        found["points"] = len(found.pop("timeline"))
    said = [str(each.message) for each in caught if "MemoryLogger: profile" in str(each.message)]
    failure = next((note for note in profiler.notes if note.startswith("profile:")), None)
    return {"profile": found, "failure": failure, "warnings": said}


def a_convnet():
    path = Path("run.profile.json")
    model = convnet()
    model.fit(*data(model), batch_size=BATCH, verbose=0)  # traced before the profiler was there
    before = [weight.shape for weight in model.weights]
    found = fit(model, MemoryLogger("run.csv", profile_batch=3), epochs=2)
    found["file"] = json.loads(path.read_text())["bytes"]
    found["same"] = before == [weight.shape for weight in model.weights]
    return found


def own_step():
    model = OwnStep()
    model.compile("sgd", "mse")
    return fit(model, MemoryLogger(profile_batch=2))


def by_xla():
    return fit(convnet(jit_compile=True), MemoryLogger(profile_batch=4))


def too_few():
    return fit(convnet(), MemoryLogger(profile_batch=50), batches=2)


def another_profiler():
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        try:
            return fit(convnet(), MemoryLogger(profile_batch=2))
        finally:
            tf.profiler.experimental.stop(save=False)


def after_a_failure():
    """A batch fails while it is recorded; the same callback then profiles another run."""

    class Failing(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                raise RuntimeError("as a user's code does")

    model, profiler = convnet(), MemoryLogger(profile_batch=2)
    with contextlib.suppress(RuntimeError):
        model.fit(*data(model), batch_size=BATCH, verbose=0, callbacks=[profiler, Failing()])
    copy.deepcopy(profiler)
    return fit(model, profiler)


if __name__ == "__main__":
    results = {}
    for name in sys.argv[1:]:
        keras.backend.clear_session()
        results[name] = globals()[name]()
    print(json.dumps(results))
