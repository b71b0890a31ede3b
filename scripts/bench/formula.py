#!/usr/bin/env python3
"""The hand formula against the memory that real training steps take, graph mode, real BFC allocator on the CPU.

    python scripts/bench/formula.py [MODEL …] [--steps 10] [--repeats 3]

Fresh processes for each model and optimizer: the peak in use of each step (weights and optimizer included), the median
over the steps, the median over the processes; identical runs differ, so each process's figure is kept. `ratio` is
(measured − the optimizer's slots) / formula; its least and most over all processes of models without opaque layers are
the interval that `kerasmem.estimation.formula` claims.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from environment import ROOT, environment, write_results

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
    return {
        "model": name,
        "optimizer": optimizer,
        "batch_size": batch,
        "parameters": report.model.parameters,
        "formula_bytes": report.formula.total_bytes,
        "slot_bytes": slots,
        "opaque": bool(opaque_layers(report.layers)),
        "peak_bytes": peaks,
    }


def combine(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for the processes that measured the same thing."""
    medians = [int(statistics.median(run["peak_bytes"])) for run in runs]
    row = {key: value for key, value in runs[0].items() if key != "peak_bytes"}

    def ratio(measured: int) -> float:
        return round((measured - row["slot_bytes"]) / row["formula_bytes"], 4)

    middle = int(statistics.median(medians))
    return {
        **row,
        "measured_bytes": middle,
        "ratio": ratio(middle),
        "ratios": [ratio(each) for each in medians],
        "peak_bytes": [run["peak_bytes"] for run in runs],
    }


def in_a_fresh_process(name: str, optimizer: str, steps: int) -> dict[str, Any]:
    """Return `measure(…)` from a process with the real BFC allocator."""
    done = subprocess.run(
        [sys.executable, __file__, name, "--one", optimizer, "--steps", str(steps)],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        sys.exit(f"{name} {optimizer}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3, help="processes for each row")
    parser.add_argument("--one", metavar="OPTIMIZER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.models[0], options.one, options.steps)))
        return
    from zoo import MODELS

    rows = []
    for name in options.models or MODELS:
        for optimizer in OPTIMIZERS:
            row = combine([in_a_fresh_process(name, optimizer, options.steps) for _ in range(options.repeats)])
            rows.append(row)
            print(
                f"{name:16} {optimizer:5} formula {row['formula_bytes'] / 2**20:8.1f} MiB   measured "
                f"{row['measured_bytes'] / 2**20:8.1f} MiB   ratio {row['ratio']:.2f}",
                file=sys.stderr,
            )
    ratios = sorted(ratio for row in rows for ratio in row["ratios"])
    seen = [ratio for row in rows if not row["opaque"] for ratio in row["ratios"]] or ratios
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
        settings = {
            "steps": options.steps,
            "repeats": options.repeats,
            "jit_compile": False,
            "allocator": "BFC on the CPU, no limit",
        }
        versions = environment("tensorflow", "keras", "numpy")
        write_results("formula", {"environment": versions, "settings": settings, "summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
