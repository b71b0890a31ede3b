#!/usr/bin/env python3
"""The hand formula against the memory that real training steps take, graph mode, real BFC allocator on the CPU.

    python scripts/bench/formula.py [MODEL …] [--steps 10]

A fresh process for each model and optimizer: the peak in use of each step (weights and optimizer included), and the
median over the steps. `ratio` is (measured − the optimizer's slots) / formula; its least and most over the models
without opaque layers are the interval that `kerasmem.estimation.formula` claims.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

OPTIMIZERS = ("sgd", "adam")


def measure(name: str, optimizer: str, steps: int) -> dict[str, Any]:
    """Train one model for some steps in this process and return the peaks in bytes."""
    import keras
    import numpy as np
    import tensorflow as tf
    from zoo import MODELS

    import kerasmem
    from kerasmem.estimation.formula import opaque_layers

    build, batch = MODELS[name]
    keras.utils.set_random_seed(0)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    x = [np.zeros((batch, *tensor.shape[1:]), tensor.dtype) for tensor in model.inputs]
    y = np.zeros((batch,), "int32")
    data = (x if len(x) > 1 else x[0], y)
    model.train_on_batch(*data)
    peaks = []
    for _ in range(steps):
        tf.config.experimental.reset_memory_stats("CPU:0")
        model.train_on_batch(*data)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    report = kerasmem.estimate(model, batch_size=batch)
    slots = report.unmodelled[0].bytes or 0
    median = int(statistics.median(peaks))
    return {
        "model": name,
        "optimizer": optimizer,
        "batch_size": batch,
        "parameters": report.model.parameters,
        "formula_bytes": report.formula.total_bytes,
        "slot_bytes": slots,
        "measured_bytes": median,
        "measured_min": min(peaks),
        "measured_max": max(peaks),
        "opaque": bool(opaque_layers(report.layers)),
        "ratio": round((median - slots) / report.formula.total_bytes, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--one", metavar="OPTIMIZER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.models[0], options.one, options.steps)))
        return
    from environment import ROOT, environment, write_results
    from zoo import MODELS

    rows = []
    for name in options.models or MODELS:
        for optimizer in OPTIMIZERS:
            done = subprocess.run(
                [sys.executable, __file__, name, "--one", optimizer, "--steps", str(options.steps)],
                capture_output=True,
                text=True,
                env={**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true", "CUDA_VISIBLE_DEVICES": "-1",
                     "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            if done.returncode:
                sys.exit(f"{name} {optimizer}: {done.stderr[-2000:]}")
            row = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            print(
                f"{name:16} {optimizer:5} formula {row['formula_bytes'] / 2**20:8.1f} MiB   measured "
                f"{row['measured_bytes'] / 2**20:8.1f} MiB   ratio {row['ratio']:.2f}",
                file=sys.stderr,
            )
    ratios = sorted(row["ratio"] for row in rows)
    seen = [row["ratio"] for row in rows if not row["opaque"]] or ratios
    summary = {
        "rows": len(rows),
        "ratio_min": min(seen),
        "ratio_median": statistics.median(ratios),
        "ratio_max": max(seen),
        "ratio_max_opaque": ratios[-1],
        "median_absolute_error_percent": round(
            100 * statistics.median(abs(row["formula_bytes"] / row["measured_bytes"] - 1) for row in rows), 1
        ),
    }
    print(json.dumps(summary), file=sys.stderr)
    if not options.models:
        settings = {"steps": options.steps, "jit_compile": False, "allocator": "BFC on the CPU, no limit"}
        versions = environment("tensorflow", "keras", "numpy")
        write_results("formula", {"environment": versions, "settings": settings, "summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
