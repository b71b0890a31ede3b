"""Run by the resume tests in a process of its own: train, be killed, train on, and say what came out.

    killed.py FILE FOLDER SETTINGS

SETTINGS is a JSON object, see `main`. Each run is a process forked before TensorFlow does anything, and really
killed. Prints one JSON object: the batches trained on, Keras's last logs and the weights' digest, uninterrupted
and with every kill.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import keras
import numpy as np
import tensorflow as tf
from forked import end_of, start

from kerasmem import H5ChunkSequence, ResumeTraining
from kerasmem.training import checkpoint


def make_model(seed, compiled):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Rescaling(0.01),
            layers.Dense(8, "relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.4),
            layers.Dense(2, "softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"], **(compiled or {})
    )
    return model


def run(file, folder, name, kill, *, sequence, fit, compiled, save_freq, dataset, valid):
    """Train; `kill` is the number of the training step after which to die, with a moment, or None."""
    tf.config.experimental.enable_op_determinism()
    sequence = {key: tuple(value) if isinstance(value, list) else value for key, value in sequence.items()}
    stream = H5ChunkSequence(file, y="label", **sequence)
    # What a model is made of is other in each run; all of it comes from the file when training goes on.
    first = not (folder / f"{name}.resume").exists()
    model = make_model(0 if first else 99, compiled)
    saver = ResumeTraining(folder / f"{name}.resume", stream, save_freq=save_freq)
    log = open(folder / f"{name}.steps", "a")  # noqa: SIM115
    steps = 0

    def die(moment):
        if kill and kill[1] == moment and steps >= kill[0]:
            log.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    class Watch(keras.callbacks.Callback):
        """Comes before the saver: it dies after a step that is not saved yet."""

        def on_train_batch_end(self, batch, logs=None):
            nonlocal steps
            if batch + 1 <= saver.run.skipped:
                return
            steps = int(model.optimizer.iterations)
            log.write(f"{steps} {batch} {float(logs['loss'])!r}\n")
            log.flush()
            die("step")

        def on_test_batch_end(self, batch, logs=None):
            die("validation")

        def on_epoch_end(self, epoch, logs=None):
            die("epoch")
            with open(folder / f"{name}.logs", "w") as file:
                json.dump([epoch, logs], file)

    replace = os.replace

    def replace_or_die(*names):
        die("saving")
        replace(*names)
        die("saved")

    checkpoint.os.replace = replace_or_die
    data = stream
    if dataset:
        data = stream.as_tf_dataset(endless="steps_per_epoch" in fit)
    if valid:
        fit = {**fit, "validation_data": H5ChunkSequence(file, y="label", batch_size=32, shuffle=False)}
    model.fit(data, callbacks=[Watch(), saver], verbose=0, **fit)
    digest = hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in model.variables + model.optimizer.variables))
    with open(folder / f"{name}.done", "w") as file:
        json.dump({"digest": digest.hexdigest(), "epoch": stream.epoch, "left": saver_left(folder, name)}, file)


def saver_left(folder, name):
    return sorted(path.name for path in folder.glob(f"{name}.resume*"))


def result(folder, name):
    steps = [line.split() for line in (folder / f"{name}.steps").read_text().splitlines()]
    last = {int(number): (int(batch), loss) for number, batch, loss in steps}
    return {
        **json.loads((folder / f"{name}.done").read_text()),
        "steps": [[number, *last[number]] for number in sorted(last)],
        "repeated": len(steps) - len(last),
        "logs": json.loads((folder / f"{name}.logs").read_text()),
    }


def main(file, folder, settings):
    given = json.loads(settings)
    kills = given.pop("kills")
    settings = {"sequence": {}, "fit": {}, "compiled": None, "save_freq": 3, "dataset": False, "valid": False, **given}
    folder = Path(folder)
    runs = [("whole", None), *(("killed", kill) for kill in [*kills, None])]
    ended = [end_of(start(run, file, folder, *each, **settings)) for each in runs]
    print(json.dumps({"ended": ended, "whole": result(folder, "whole"), "killed": result(folder, "killed")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
