"""Run by the tests of `kerasmem.fit` in a process of its own; prints one JSON object.

    fitted.py SETTINGS

SETTINGS is a JSON list of runs, see `run`. Each is a process forked before TensorFlow does anything, so that one
start serves many, and can really be killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import warnings

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # with it a failed step ends the process

import keras
import numpy as np
from forked import end_of, start

import kerasmem


class Half(keras.losses.Loss):
    """A loss of the user's."""

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred), -1) / 2


def wide(optimizer, compiled):
    """A model whose steps on 2048 rows take some 30 MB."""
    layers = [keras.layers.Dense(256, "relu", kernel_regularizer="l2") for _ in range(6)]
    model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer, Half(), metrics=["mae"], jit_compile=compiled)
    return model


def small(optimizer, compiled):
    """A model with random numbers and statistics of its own."""
    layers = keras.layers
    parts = [layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1)]
    model = keras.Sequential([keras.Input((32,)), *parts])
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=compiled)
    return model


def data_of(kind, x, y, size, folder):
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": size}
    import h5py

    path = os.path.join(folder, "rows.h5")
    if not os.path.exists(path):
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = x, y
    return {"x": kerasmem.H5ChunkSequence(path, batch_size=size)}


def run(folder, *, name, model="wide", optimizer="adam", xla=False, rows=4096, size=2048, data="arrays", kill=None,
        limit=None, fit=None, seed=0, plain=False, delay=None, backup=None):  # fmt: skip
    """Train and write what came out.

    With kill=N die at training step N, or so many seconds later, or end the process that takes the steps. `backup` has
    the folder and `save_freq` of Keras's `BackupAndRestore`.
    """
    if limit:  # before TensorFlow starts
        os.environ.update(TF_CPU_ALLOCATOR_USE_BFC="true", TF_CPU_BFC_MEM_LIMIT_IN_MB=str(limit))
    import tensorflow as tf

    if kill and (fit or {}).get("isolated"):  # a fork of a loaded Python ends some time after what is killed
        sys.executable = os.environ.get("NEW_PYTHON", sys.executable)
    if not xla:  # under determinism Keras does not use XLA
        tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(seed)
    random = np.random.default_rng(0)
    x, y = random.random((rows, 32), "float32"), random.random((rows, 1), "float32")
    kind = {"adam": keras.optimizers.Adam, "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9)}[optimizer]
    net = {"wide": wide, "small": small}[model](kind(), xla)
    options = {"epochs": 2, "verbose": 0, **(fit or {})}
    if options.get("checkpoint"):
        options["checkpoint"] = os.path.join(folder, options["checkpoint"])
    options |= {"validation_data": (x[:512], y[:512]), "validation_batch_size": 256}
    log = open(os.path.join(folder, f"{name}.steps"), "a")  # noqa: SIM115
    steps = 0

    def note(batch, logs):
        nonlocal steps
        steps += 1
        log.write(f"{float(logs['loss'])!r}\n")
        log.flush()
        if kill == steps:
            import gc

            from kerasmem.training.steps.remote import RemoteEngine

            engines = [each for each in gc.get_objects() if isinstance(each, RemoteEngine)]
            pid = engines[0].pid if engines else os.getpid()
            if delay is None:
                os.kill(pid, signal.SIGKILL)
            else:
                threading.Timer(delay, os.kill, [pid, signal.SIGKILL]).start()

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=note)]
    if backup:
        callbacks.append(keras.callbacks.BackupAndRestore(os.path.join(folder, backup[0]), save_freq=backup[1]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RuntimeWarning)
        train = net.fit if plain else lambda **all_: kerasmem.fit(net, **all_)
        history = train(**data_of(data, x, y, size, folder), callbacks=callbacks, **options)
    values = [np.asarray(v.value) for v in net.variables + net.optimizer.variables]
    np.savez(os.path.join(folder, f"{name}.npz"), *values)
    result = {
        "digest": hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest(),
        "history": history.history,
        "epochs": history.epoch,
        "recoveries": [each.to_dict() for each in getattr(history, "recoveries", [])],
        "warnings": [str(each.message) for each in said if each.category is RuntimeWarning],
        "left": sorted(each for each in os.listdir(folder) if "ckpt" in each),
    }
    with open(os.path.join(folder, f"{name}.json"), "w") as file:
        json.dump(result, file)


def run_all(folder, settings):
    """Return how the runs ended. Those that run out of memory go on beside the others: they mostly wait."""
    waiting = {place: start(run, folder, **each) for place, each in enumerate(settings) if each.get("limit")}
    ended = [0 if place in waiting else end_of(start(run, folder, **each)) for place, each in enumerate(settings)]
    for place, child in waiting.items():
        ended[place] = end_of(child)
    return ended


def main(folder, settings):
    ended = run_all(folder, json.loads(settings))
    found = {}
    for each in json.loads(settings):
        path = os.path.join(folder, f"{each['name']}.json")
        found[each["name"]] = json.load(open(path)) if os.path.exists(path) else None  # noqa: SIM115
    print(json.dumps({"ended": ended, "runs": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
