"""A user's script for the tests of `kerasmem run`: five calls of fit; says what the weights came to.

    trained.py FOLDER WHAT

WHAT: "xla" trains under XLA, "kill" dies once in the third fit, "loop" dies in a training loop of its own, "own" has
a model with its own train_step, "exit" leaves with code 7.
"""

import hashlib
import os
import signal
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf

folder, what = sys.argv[1:]

if what != "xla":
    tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(0)
random = np.random.default_rng(0)
x, y = random.random((5000, 32), "float32"), random.random((5000, 1), "float32")
rows = tf.data.Dataset.from_tensor_slices((x[:600], y[:600])).shuffle(600, seed=1).batch(64)  # another order each time


class Changing(keras.utils.PyDataset):
    """Batches whose rows are others in each epoch."""

    epoch = 0

    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = np.random.default_rng((self.epoch, index)).integers(0, 600, 64)
        return x[rows], y[rows]

    def on_epoch_end(self):
        self.epoch += 1


changing = Changing()


def model(cls=keras.Sequential):
    made = cls([keras.Input((32,)), *(keras.layers.Dense(256, "relu") for _ in range(6)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=what == "xla")
    return made


def note(text):
    with open(os.path.join(folder, "said"), "a") as file:
        file.write(text + "\n")


class Own(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def die(batch, logs):
    marked = os.path.join(folder, "died")
    if what == "kill" and batch == 4 and not os.path.exists(marked):
        open(marked, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


note("begun")
if what == "loop":
    net = model()
    net.train_on_batch(x[:8], y[:8])
    os.kill(os.getpid(), signal.SIGKILL)
first = model(Own if what == "own" else keras.Sequential)
history = first.fit(rows, verbose=0)
first.fit(changing, verbose=0)
note(f"first {float(history.history['loss'][0])!r}")
second = model()
watch = keras.callbacks.LambdaCallback(on_train_batch_end=die)
history = second.fit(x, y, batch_size=2048 if what == "xla" else 512, epochs=2, verbose=0, callbacks=[watch])
first.fit(rows, verbose=0)
first.fit(changing, verbose=0)
values = [np.asarray(v.value) for v in first.variables + second.variables + second.optimizer.variables]
np.savez(os.path.join(folder, "weights"), *values)
note(f"second {len(history.history['loss'])} {hashlib.sha256(b''.join(v.tobytes() for v in values)).hexdigest()}")
sys.exit(7 if what == "exit" else 0)
