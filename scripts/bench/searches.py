#!/usr/bin/env python3
"""What 30 trials of a search leave behind, on the device and on the host, with kerasmem and without.

    python scripts/bench/searches.py [--trials 30] [--one-size]

Each trial builds, trains and scores a model of three dense layers with Adam (11 MB). The device is TensorFlow's own
allocator, which counts to the byte (`TF_CPU_ALLOCATOR_USE_BFC`); the host is the process's own pages after free heap
went back, and what of the heap is in use (`mallinfo2`). Growth is counted from the tenth trial on: until then
TensorFlow and the heap set up what is there once. With `--one-size`, and MALLOC_ARENA_MAX=1 in the environment, there
are few gaps in the heap.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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


class _HeapInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def heap_in_use() -> int:
    """Return the bytes of the C heap that are not free."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _HeapInfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def held() -> tuple[int, int, int]:
    """Return the bytes on the device, of the process on the host, and those of its heap that are in use."""
    import tensorflow as tf

    from kerasmem.devices.host import held_bytes

    return tf.config.experimental.get_memory_info("CPU:0")["current"], held_bytes(), heap_in_use()


def search(library: str, survives: bool, trials: int, most: int) -> list[tuple[int, int, int]]:
    """Return what is held after each trial; models have 600 to `most` units."""
    import numpy as np

    import kerasmem

    x, y, found = np.ones((64, 512), "float32"), np.ones((64, 1), "float32"), []
    if library == "optuna":
        import optuna

        def objective(trial: Any) -> float:
            model = build(trial.suggest_int("units", 600, most))
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
        return build(hp.Int("units", 600, most))

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        Tuner(build_of, objective="loss", max_trials=trials, directory=folder).search(x, y, verbose=0)
    return found


def main() -> None:
    """Run each search in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--one-size", action="store_true", help="models of one size only")
    parser.add_argument("--one", nargs=2, metavar=("LIBRARY", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is None:
        for library in LIBRARIES:
            for way in ("kerasmem", "plain"):
                size = ["--one-size"] if options.one_size else []
                command = [sys.executable, __file__, "--trials", str(options.trials), *size, "--one", library, way]
                subprocess.run(command, check=True)
        return
    library, way = options.one
    found = search(library, way == "kerasmem", options.trials, 600 if options.one_size else 640)
    before = found[min(SETTLED, len(found)) - 1]
    device, host, heap = (last - first for first, last in zip(before, found[-1], strict=True))
    print(
        f"{library:12} {way:9} {len(found)} trials: {device:+,} B, host {host / 2**20:+.1f} MiB from {SETTLED} on, "
        f"{heap / 2**20:+.2f} MiB of it in use"
    )


if __name__ == "__main__":
    main()
