"""Measure peak memory and step time of a deep network over the number of recomputed segments.

    python examples/recomputation_sweep.py [--depth 24] [--segments 1 2 4 6 8 12 24]

A stack of dense layers keeps all activations for the backward pass, unless it is cut into segments that are recomputed.
Few segments are long, and many segments keep many tensors between them, so a number in between has the lowest peak.
Each row has the peak that `kerasmem.recompute` plans and the measured peak, in a subprocess with a GPU's allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

UNITS, STEPS = 256, 5


def measure(depth: int, batch_size: int, segments: int, dtype_policy: str) -> None:
    """Train some steps in this process; print the predicted and the measured bytes, and the seconds of a step."""
    import keras
    import numpy as np
    import tensorflow as tf

    import kerasmem

    keras.config.set_dtype_policy(dtype_policy)
    layers = [keras.layers.Dense(UNITS, activation="gelu") for _ in range(depth)]
    model = keras.Sequential([keras.Input((UNITS,)), *layers, keras.layers.Dense(1, dtype="float32")])
    model.compile("sgd", "mse", jit_compile=False)
    model = kerasmem.recompute(model, segments=segments, batch_size=batch_size)
    x, y = np.ones((batch_size, UNITS), "float32"), np.ones((batch_size, 1), "float32")
    model.train_on_batch(x, y)  # the first step also traces the graph
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    peaks, seconds = [], []
    for _ in range(STEPS):
        tf.config.experimental.reset_memory_stats("CPU:0")
        start = time.perf_counter()
        model.train_on_batch(x, y)
        seconds.append(time.perf_counter() - start)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
    print(json.dumps([model.plan.activation_bytes, statistics.median(peaks), statistics.median(seconds)]))


def main() -> None:
    """Measure each number of segments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=24, help="dense layers")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--segments", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 24])
    parser.add_argument("--dtype-policy", default="float32", help="or mixed_bfloat16")
    parser.add_argument("--measure", type=int, metavar="SEGMENTS", help="measure in this process")
    options = parser.parse_args()
    if options.measure:
        measure(options.depth, options.batch_size, options.measure, options.dtype_policy)
        return
    environment = {
        **os.environ,
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    print(f"{'segments':>8} {'predicted':>12} {'measured':>12} {'step':>10}")
    for segments in options.segments:
        command = [sys.executable, *sys.argv, "--measure", str(segments)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        predicted, measured, seconds = json.loads(done.stdout.splitlines()[-1])
        print(f"{segments:8} {predicted / 2**20:8.1f} MiB {measured / 2**20:8.1f} MiB {seconds * 1e3:7.0f} ms")


if __name__ == "__main__":
    main()
