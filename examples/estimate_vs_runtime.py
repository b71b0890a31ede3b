"""Compare the estimate with the measured memory of training, over batch sizes.

    python examples/estimate_vs_runtime.py [--output estimate_vs_runtime.png]

The plot shows three lines for a small convnet: the formula, the estimate of `kerasmem.estimate`, and the measured peak
of TensorFlow's allocator. No GPU is needed: with TF_CPU_ALLOCATOR_USE_BFC=true the CPU uses the allocator of GPUs. Each
batch size runs in a fresh process, because earlier steps change the state of an allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

import kerasmem
from kerasmem.units import MIB

BATCH_SIZES = [16, 64, 128, 256, 512, 1024]
STEPS = 5


def mnist_cnn():
    """Return the compiled convnet."""
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(1024, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ],
        name="mnist_cnn",
    )
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", jit_compile=False)
    return model


def measure(batch_size: int) -> int:
    """Train some steps in this process; return the median peak of the allocator in bytes."""
    import numpy as np
    import tensorflow as tf

    model = mnist_cnn()
    x, y = np.zeros((batch_size, 28, 28, 1), "float32"), np.zeros((batch_size,), "int32")
    model.train_on_batch(x, y)  # the first step also traces the graph
    peaks = []
    for _ in range(STEPS):
        tf.config.experimental.reset_memory_stats("CPU:0")
        model.train_on_batch(x, y)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    return int(statistics.median(peaks))


def measure_in_a_fresh_process(batch_size: int) -> int:
    """Return `measure(batch_size)` from a process with the real BFC allocator."""
    environment = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, __file__, "--measure", str(batch_size)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def draw(rows: list[dict[str, int]], path: str) -> None:
    """Draw the formula, the estimate with its interval, and the measurements."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    batches = [row["batch"] for row in rows]
    axes.plot(batches, [row["formula"] / MIB for row in rows], "--", color="tab:gray", label="formula")
    low, high = ([row[key] / MIB for row in rows] for key in ("low", "high"))
    axes.plot(batches, [row["estimate"] / MIB for row in rows], color="tab:orange", label="estimate (graph)")
    axes.fill_between(batches, low, high, color="tab:orange", alpha=0.15, label="interval of the estimate")
    axes.plot(
        batches, [row["measured"] / MIB for row in rows], "o-", color="tab:blue", label="allocator, peak of a step"
    )
    axes.set(xlabel="batch size", ylabel="memory (MiB)", title="MNIST convnet, SGD, one training step", xlim=0, ylim=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="estimate_vs_runtime.png", help="file of the plot (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCH_SIZES, help="batch sizes")
    parser.add_argument("--measure", type=int, metavar="BATCH", help="measure one batch size in this process")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    rows = []
    print(f"{'batch':>6} {'formula':>12} {'estimate':>12} {'measured':>12} {'measured / estimate':>20}")
    for batch_size in options.batches:
        report = kerasmem.estimate(mnist_cnn, batch_size=batch_size)
        measured = measure_in_a_fresh_process(batch_size)
        need, formula = report.bytes, report.formula.total_bytes
        sizes = (f"{size / MIB:8.1f} MiB" for size in (formula, need.total, measured))
        print(f"{batch_size:6}", *sizes, f"{measured / need.total:20.2f}")
        row = {"formula": formula, "estimate": need.total, "low": need.low, "high": need.high, "measured": measured}
        rows.append({"batch": batch_size, **row})
    try:
        draw(rows, options.output)
    except ImportError:
        print("For the plot: pip install matplotlib")
    else:
        print(f"plot: {options.output}")


if __name__ == "__main__":
    main()
