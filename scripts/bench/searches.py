#!/usr/bin/env python3
"""What 30 trials of a search leave behind, on the device and on the host, with kerasmem and without.

    python scripts/bench/searches.py [--trials 30]

Each trial builds, trains and scores a model of three dense layers with Adam (11 MB). The device is TensorFlow's own
allocator, which counts to the byte (`TF_CPU_ALLOCATOR_USE_BFC`); the host is the process's own pages after free heap
went back. Growth is counted from the tenth trial on: until then TensorFlow and the heap set up what is there once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

from environment import ROOT

sys.path.insert(0, str(ROOT))
SETTLED = 10
LIBRARIES = ("optuna", "keras_tuner")


def build(units: int) -> Any:
    import keras

    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((512,)), dense(units, "relu"), dense(units, "relu"), dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    return model


def held() -> tuple[int, int]:
    import tensorflow as tf

    from kerasmem.devices.host import held_bytes

    return tf.config.experimental.get_memory_info("CPU:0")["current"], held_bytes()


def search(library: str, survives: bool, trials: int) -> list[tuple[int, int]]:
    """Return what is held after each trial."""
    import numpy as np

    import kerasmem

    x, y, found = np.ones((64, 512), "float32"), np.ones((64, 1), "float32"), []
    if library == "optuna":
        import optuna

        def objective(trial: Any) -> float:
            model = build(trial.suggest_int("units", 600, 640))
            return float(model.fit(x, y, verbose=0).history["loss"][-1])

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        chosen = kerasmem.optuna_objective(objective) if survives else objective
        optuna.create_study().optimize(chosen, n_trials=trials, callbacks=[lambda *_: found.append(held())])
        return found
    import keras_tuner

    base: Any = kerasmem.tuner_class(keras_tuner.RandomSearch) if survives else keras_tuner.RandomSearch

    class Tuner(base):
        def on_trial_end(self, trial: Any) -> None:
            super().on_trial_end(trial)
            found.append(held())

    def build_of(hp: Any) -> Any:
        return build(hp.Int("units", 600, 640))

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        Tuner(build_of, objective="loss", max_trials=trials, directory=folder).search(x, y, verbose=0)
    return found


def main() -> None:
    """Run each search in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--one", nargs=2, metavar=("LIBRARY", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is None:
        for library in LIBRARIES:
            for way in ("kerasmem", "plain"):
                command = [sys.executable, __file__, "--trials", str(options.trials), "--one", library, way]
                subprocess.run(command, check=True)
        return
    library, way = options.one
    found = search(library, way == "kerasmem", options.trials)
    device, host = (found[-1][place] - found[min(SETTLED, len(found)) - 1][place] for place in (0, 1))
    print(f"{library:12} {way:9} {len(found)} trials: {device:+,} B, host {host / 2**20:+.1f} MiB from {SETTLED} on")


if __name__ == "__main__":
    main()
