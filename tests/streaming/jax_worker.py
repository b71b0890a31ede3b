"""Run by test_engines_jax.py: `fit` over a `keras.distribution` on JAX.

jax_worker.py FILE PROCESSES INDEX ADDRESS
"""

from __future__ import annotations

import json
import os
import sys
import warnings

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"

import keras

from kerasmem import H5ChunkSequence
from kerasmem.errors import UsageError

BATCH = 16


class Noted(H5ChunkSequence):
    """Records the targets of each batch that is requested within an epoch."""

    def __init__(self, *args, **settings):
        super().__init__(*args, transform=self.note, **settings)
        self.epochs = []

    def on_epoch_begin(self):
        super().on_epoch_begin()
        self.epochs.append([])

    def note(self, x, y):
        if self.epochs:
            self.epochs[-1].append(y.tolist())
        return x, y


def make_model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-7), "mse")
    return model


def refusal(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act()
        except UsageError as error:
            return str(error)
    return [str(entry.message) for entry in caught]


def main(file, processes, index, address):
    given = {"batch_size": BATCH, "memory_budget": "6kB", "shard": "auto"}
    result = {}
    if int(processes) > 1:
        keras.distribution.initialize(address, int(processes), int(index))
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        result["refused"] = refusal(lambda: H5ChunkSequence(file, **given))
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    data, model = Noted(file, **given), make_model()
    history = model.fit(data, epochs=2, verbose=0)
    result |= {"shard": data.shard, "epochs": data.epochs[-2:], "losses": history.history["loss"]}
    ragged = H5ChunkSequence(file, **{**given, "rows": [0, 1, 2, 3, 4]})
    result["ragged"] = refusal(lambda: ragged.on_epoch_begin())
    whole = H5ChunkSequence(file, **{**given, "shard": None})
    result["whole"] = refusal(lambda: whole.on_epoch_begin())
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
