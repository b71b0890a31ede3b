"""A user's script for the tests of `kerasmem run`: what it asks of `kerasmem.fit` itself is to be done.

    asked.py FOLDER WHAT

WHAT: "kill" dies once after the fifth batch and keeps its checkpoint, "isolated" has its steps taken elsewhere.
"""

import gc
import os
import signal
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np

import kerasmem

folder, what = sys.argv[1:]
saved, died = (os.path.join(folder, name) for name in ("own.ckpt", "died"))
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", jit_compile=False)


def note(text):
    with open(os.path.join(folder, "said"), "a") as file:
        file.write(text + "\n")


def watch(batch, logs):
    from kerasmem.training.steps.remote import RemoteEngine

    engines = sum(isinstance(each, RemoteEngine) for each in gc.get_objects())
    note(f"batch {batch}: step {int(model.optimizer.iterations)}, {engines} other process, {os.path.exists(saved)}")
    if what == "kill" and batch == 4 and not os.path.exists(died):
        open(died, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


kerasmem.fit(
    model, np.ones((64, 4), "float32"), np.ones((64, 1), "float32"), batch_size=8, verbose=0, shuffle=False,
    callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=watch)], checkpoint=saved, save_freq=2,
    keep=what == "kill", isolated=what == "isolated",
)  # fmt: skip
note(f"left: {os.path.exists(saved)}")
