"""Run by test_engines.py: once per worker of a `MultiWorkerMirroredStrategy`, or once for a `MirroredStrategy`.

engine_worker.py FILE TASK …: for each task one JSON object a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import keras
import numpy as np
import tensorflow as tf

from kerasmem import H5ChunkSequence, ResumeTraining
from kerasmem.errors import UsageError

EPOCHS = 2


class Noted(keras.Sequential):
    """Records the rows of each training batch. The first feature is the row number."""

    def train_step(self, data):
        x, y = data
        noted = tf.numpy_function(note, [x[:, 0]], tf.float32)
        with tf.control_dependencies([noted]):
            return super().train_step((tf.identity(x), y))


trained = []


def note(numbers):
    trained.append(np.rint(numbers * 4096).astype(int).tolist())
    return np.float32(0)


def make_model(width):
    keras.utils.set_random_seed(1)
    model = Noted([keras.Input((width,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


class Bytes(keras.callbacks.Callback):
    """Records the bytes read by the end of each epoch."""

    def __init__(self, stream):
        super().__init__()
        self.stream, self.read = stream, []

    def on_epoch_end(self, epoch, logs=None):
        self.read.append(self.stream.read_bytes)


def main(file, *tasks):
    devices = int(os.environ.get("DEVICES", "1"))
    if devices > 1:
        parts = [tf.config.LogicalDeviceConfiguration()] * devices
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
        strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(devices)])
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    given = {"batch_size": 32, "memory_budget": "1MB", "shard": "auto"}

    def stream(**changes):
        with strategy.scope():
            return H5ChunkSequence(file, **{**given, **changes})

    def fit(make_callbacks=lambda data: [], **changes):
        data = stream(**changes)
        width = data.stream_plan.layout.datasets[0].row_shape[0]
        with strategy.scope():
            model = make_model(width)
        trained.clear()
        read = Bytes(data)
        history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[read, *make_callbacks(data)])
        return model, {
            "shard": data.shard,
            "steps": len(data),
            "trained": list(trained),
            "history": history.history,
            "bytes_read": read.read,
            "weights": [weight.numpy().tolist() for weight in model.weights],
        }

    model = None
    for task in tasks:
        if task == "fit":
            model, result = fit()
        elif task == "evaluate":
            result = {"evaluated": model.evaluate(stream(shuffle=False), verbose=0, return_dict=True)}
        elif task == "unsharded":
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _, result = fit(shard=None)
            result["warned"] = [str(entry.message) for entry in caught if "H5ChunkSequence" in str(entry.message)]
            ordered = stream(shard=None, shuffle=False)
            result["predicted"] = model.predict(ordered, verbose=0)[:, 0].tolist()
        elif task == "resumed":
            result = resumed(fit)
        elif task == "refusals":
            result = {"refused": [refusal(model, stream, **case) for case in REFUSED]}
        print(json.dumps({"task": task, **result}), flush=True)


def resumed(fit):
    """Train with `ResumeTraining`. Worker 1 kills itself after the batch KILL_AT, before it is saved."""
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

    class Kill(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if index == 1 and self.seen == int(os.environ.get("KILL_AT", 0)):
                os.kill(os.getpid(), signal.SIGKILL)

    return fit(make_callbacks=lambda data: [Kill(), ResumeTraining("run.resume", data, save_freq=3)])[1]


REFUSED = ({"shard": (0, 3)}, {"shard": None, "seed": None}, {"call": "predict", "shuffle": False})


def refusal(model, stream, call="fit", **settings):
    data = stream(**settings)
    try:
        getattr(model, call)(data, verbose=0)
    except UsageError as error:
        return str(error)
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
