#!/usr/bin/env python3
"""A search over many models: the memory of the process that runs it, trial by trial, and the time of a trial.

    python scripts/bench/isolation.py [--trials 50] [--quick]

The same trials (a small CNN of differing width, one epoch of 20 batches, on the CPU) five ways, each in a process of
its own: in a loop that keeps its models; in a loop that keeps the best weights only; the same with
`keras.backend.clear_session()`; each trial in a process that `concurrent.futures` starts; and with
`kerasmem.run_isolated` and `BestWeights`. After each trial the resident memory of the process is read. `grown` is from
the tenth trial to the last, so that what TensorFlow sets up once is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from environment import ROOT, environment, write_results

sys.path.insert(0, str(ROOT))
WAYS = ("keeping", "loop", "clear_session", "spawn", "isolated")
SETTLED = 10  # trials


def width(n: int) -> int:
    return 64 + 64 * (n * 7 % 10)


def trial(n: int) -> tuple[float, Any]:
    """Train one model; return its loss and the model."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(n)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(width(n), activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    generator = np.random.default_rng(0)
    x, y = generator.random((1280, 28, 28, 1), "float32"), generator.integers(0, 10, 1280)
    return model.fit(x, y, batch_size=64, verbose=0).history["loss"][-1], model


def weights_of_trial(n: int) -> tuple[float, Any]:
    loss, model = trial(n)
    return loss, model.get_weights()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def search(way: str, trials: int) -> dict[str, Any]:
    """Run all trials one way."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    import keras

    import kerasmem

    best, kept, rows = kerasmem.BestWeights("loss"), [], []
    best_loss = float("inf")
    for n in range(trials):
        begin = time.perf_counter()
        if way == "isolated":
            run = kerasmem.run_isolated(weights_of_trial, n, output=False)
            loss, weights = run.get()
            best.offer(loss, weights, {"n": n})
        elif way == "spawn":
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                loss, weights = pool.submit(weights_of_trial, n).result()
            best.offer(loss, weights, {"n": n})
        else:
            loss, model = trial(n)
            if way == "keeping":
                kept.append(model)
            best.offer(loss, model.get_weights(), {"n": n})
            del model
            if way == "clear_session":
                keras.backend.clear_session()
        best_loss = min(best_loss, loss)
        rows.append({"trial": n, "seconds": time.perf_counter() - begin, "resident_bytes": resident(), "loss": loss})
    return {"rows": rows, "best": best.config["n"], "best_loss": best_loss}


def measure(way: str, trials: int) -> dict[str, Any]:
    arguments = [sys.executable, __file__, "--way", way, "--trials", str(trials)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    memory = [row["resident_bytes"] for row in found["rows"]]
    settled = min(SETTLED, len(memory) - 1)
    grown = memory[-1] - memory[settled]
    return {
        "way": way,
        "trials": trials,
        "resident_bytes": {"first": memory[0], "settled": memory[settled], "last": memory[-1]},
        "grown_bytes": grown,
        "grown_bytes_per_trial": grown / max(1, len(memory) - 1 - settled),
        "seconds_per_trial": statistics.median(row["seconds"] for row in found["rows"][1:]),
        "best": found["best"],
        "best_loss": found["best_loss"],
        "rows": found["rows"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="3 trials, nothing written")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    trials = 3 if options.quick else options.trials
    if options.way:
        print("\n" + json.dumps(search(options.way, options.trials)))
        return
    ways = []
    for way in WAYS[2:] if options.quick else WAYS:
        ways.append(measure(way, trials))
        line = {name: value for name, value in ways[-1].items() if name != "rows"}
        print(json.dumps(line), file=sys.stderr, flush=True)
    if len({(each["best"], round(each["best_loss"], 4)) for each in ways}) != 1:
        raise SystemExit("the ways did not find the same best trial")
    data = {
        "command": f"python scripts/bench/isolation.py --trials {trials}",
        "environment": environment("tensorflow", "keras", "cloudpickle"),
        "settings": {"trials": trials, "settled_after": SETTLED, "machine": "CPU"},
        "ways": ways,
    }
    if options.quick:
        print(json.dumps({each["way"]: each["grown_bytes"] for each in ways}))
    else:
        write_results("isolation", data)


if __name__ == "__main__":
    main()
