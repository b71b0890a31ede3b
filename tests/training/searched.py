"""Searches with the real libraries, on an allocator of 192 MiB; what came of them as JSON on the last line.

searched.py NAME …
"""

import json
import sys
import tempfile

import keras
import keras_tuner
import numpy as np
import optuna
import tensorflow as tf

import kerasmem

X, Y = np.ones((64, 64), "float32"), np.ones((64, 1), "float32")
SMALL, TOO_LARGE, HUGE = 64, 280_000, 290_000  # of a step that fits, and of two whose optimizer has no room
optuna.logging.set_verbosity(optuna.logging.ERROR)


def build(units):
    dense = keras.layers.Dense
    inputs = keras.Input((64,))
    parts = 4 if units > 1000 else 2  # an initialiser takes twice what it makes
    wide = keras.layers.Concatenate()([dense(units // parts, "relu")(inputs) for _ in range(parts)])
    model = keras.Model(inputs, dense(1)(wide))
    model.compile("adam", "mse", jit_compile=False)
    return model


def in_use():
    return tf.config.experimental.get_memory_info("CPU:0")["current"]


def by_optuna(*units_of_trials):
    started, left = [], []

    @kerasmem.optuna_objective
    def objective(trial):
        units = trial.suggest_categorical("units", [SMALL, TOO_LARGE, HUGE])
        model = build(units)
        if units != HUGE:  # which is to find out by itself
            kerasmem.require_fit(model, batch_size=32)
        started.append(units)
        return model.fit(X, Y, verbose=0).history["loss"][-1]

    study = optuna.create_study()
    for units in units_of_trials:
        study.enqueue_trial({"units": units})
    study.optimize(objective, n_trials=len(units_of_trials), callbacks=[lambda *_: left.append(in_use())])
    trials = [(each.state.name, each.user_attrs.get("kerasmem")) for each in study.trials]
    return {"trials": trials, "started": started, "left": left}


def by_tuner(base, units, data=(X, Y), **options):
    left = []

    class Tuner(kerasmem.tuner_class(base)):
        def on_trial_end(self, trial):
            super().on_trial_end(trial)
            left.append(in_use())

    def build_of(hp):
        return build(hp.Choice("units", units))

    tuner = Tuner(build_of, objective="loss", directory=tempfile.mkdtemp(), **options)
    tuner.search(*data, verbose=0)
    trials = list(tuner.oracle.trials.values())
    return {
        "trials": [(each.hyperparameters.values["units"], each.status, each.message) for each in trials],
        "left": left,
        "best": tuner.get_best_hyperparameters()[0].values["units"],
    }


def main():
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.set_dtype_policy("float32")
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(32)  # which do not tell how many rows they have
    searches = {
        "optuna": lambda: by_optuna(SMALL, TOO_LARGE, SMALL),
        "optuna runs out": lambda: by_optuna(SMALL, TOO_LARGE, HUGE, SMALL, SMALL, SMALL),
        "random": lambda: by_tuner(
            keras_tuner.RandomSearch, [SMALL, 128, *range(TOO_LARGE, TOO_LARGE + 4)], max_trials=6, seed=0
        ),
        "runs out": lambda: by_tuner(keras_tuner.RandomSearch, [SMALL, HUGE], (batches,), max_trials=2, seed=0),
        "hyperband": lambda: by_tuner(keras_tuner.Hyperband, [SMALL, 128, TOO_LARGE], max_epochs=2, factor=2, seed=0),
    }
    found = {name: searches[name]() for name in sys.argv[1:]}
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
