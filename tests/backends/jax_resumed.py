"""Run by test_jax_resume.py, once a process of JAX: a training over `keras.distribution` that one may be killed in.

jax_resumed.py FILE SAVED INDEX ADDRESS KILL

KILL: the batch, counted through all epochs, after which process 1 ends as the system ends one; 0 for none. Prints the
weights' checksum.
"""

from __future__ import annotations

import os
import signal
import sys
import zlib

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"

import keras

from kerasmem import H5ChunkSequence, ResumeTraining


class KillAt(keras.callbacks.Callback):
    """Ends a training after so many batches, all epochs counted; 0 for never."""

    def __init__(self, step, end):
        super().__init__()
        self.left, self.end = step, end

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            self.end()


def main(file, saved, index, address, kill):
    keras.distribution.initialize(address, 2, int(index))
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    keras.utils.set_random_seed(0)
    settings = {"batch_size": 8, "shard": "auto", "remainder": "drop", "memory_budget": "4kB"}
    data = H5ChunkSequence(file, **settings)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [ResumeTraining(saved, data, save_freq=2)]
    if int(index) == 1:
        callbacks.insert(0, KillAt(int(kill), lambda: os.kill(os.getpid(), signal.SIGKILL)))
    history = model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
    weights = b"".join(keras.ops.convert_to_numpy(each).tobytes() for each in model.weights)
    print(zlib.crc32(weights), history.history["accuracy"][-1], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
