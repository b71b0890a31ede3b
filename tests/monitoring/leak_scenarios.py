"""Real loops that keep memory, and loops that do not; one process, results as JSON on the last line."""

import gc
import json
import sys

import keras
import numpy as np
import tensorflow as tf

from kerasmem import LeakWatch, MemoryLogger

X, Y = np.ones((32, 16), "float32"), np.ones((32, 4), "float32")
ROUNDS = 20
ALIVE = []  # what one loop kept stays: the room that it left would take in what the next one keeps


def model():
    """A model that is quickly traced: each loop trains or asks one some twenty times."""
    built = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)])
    built.compile("sgd", "mse", jit_compile=False)
    return built


def watch(label, action):
    ALIVE.append(action)
    watched = LeakWatch(label)
    for number in range(ROUNDS):
        action(number)
        watched.sample()
    return watched.report().to_dict(), watched.report().explain()


def new_models():
    return lambda number: model().train_on_batch(X, Y)


def retracing():
    @tf.function
    def scaled(x, factor):
        return tf.reduce_sum(x * factor)

    return lambda number: scaled(X, number)


def kept_results():
    kept = []
    return lambda number: kept.append(tf.random.uniform([25_000]))  # 100 KB


def many_shapes():
    trained = model()
    return lambda number: trained.predict(X[: 1 + number % 4], verbose=0)


def filling_cache():
    cache = {}

    def work(number):
        cache.setdefault(number % 5, np.ones(200_000))

    return work


def epochs():
    """The logger's own: epochs that keep a tensor each, and epochs that do not."""
    found = {}
    for name in ("leaky", "clean"):
        kept = []

        class Keep(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None, kept=kept, leaky=name == "leaky"):
                if leaky:
                    kept.append(tf.zeros([25_000]))

        logger = MemoryLogger(leaks=True)
        trained = model()
        trained.fit(X, Y, verbose=0, epochs=10, callbacks=[logger, Keep()])
        found.setdefault("after ten", []).extend(note for note in logger.notes if note.startswith("leak:"))
        trained.fit(X, Y, verbose=0, epochs=10, callbacks=[logger, Keep()])
        found[name] = [logger.leaks.to_dict(), [note for note in logger.notes if note.startswith("leak:")]]
    return found


def main(names):
    gc.freeze()  # what importing left is not gone through by each sample's collection
    results = {}
    for name in names:
        if name == "epochs":
            results[name] = epochs()
        else:
            results[name] = watch(name, globals()[name]())
        gc.collect()
        gc.freeze()
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
