#!/usr/bin/env python3
"""Measure the cost of MemoryLogger: the same training with and without it, in turns.

    python scripts/bench/logger.py [--pairs 20] [--steps 100]

A small CNN (28 × 28 images, batches of 64) on the CPU, under TensorFlow's BFC allocator. A pair is two `fit` calls of
as many steps on one compiled model, in alternating order; beside the difference stands the logger's own count of its
hooks. Lower quartiles are compared: on a machine with two cores, some `fit` calls, with and without the logger, spend
all their steps with TensorFlow's threads on one core and take up to twice as long.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from common import environment, write_results

BATCH = 64


def pairs(count: int, steps: int, log: Path) -> list[dict[str, Any]]:
    import keras
    import numpy as np
    from zoo import small_cnn

    from kerasmem import MemoryLogger

    generator = np.random.default_rng(0)
    x = generator.random((BATCH * steps, 28, 28, 1), "float32")
    y = generator.integers(0, 10, BATCH * steps)
    model = small_cnn()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=BATCH, verbose=0)  # trace, and warm up
    rows = []
    for pair in range(count):
        row: dict[str, Any] = {}
        for is_logged in (pair % 2 == 0, pair % 2 == 1):
            logger = MemoryLogger(log) if is_logged else None
            start = time.perf_counter()
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger] if logger else [])
            row["with_seconds" if is_logged else "without_seconds"] = round(time.perf_counter() - start, 5)
            if logger is not None:
                row["overhead"] = logger.overhead.to_dict()
        rows.append(row)
        row["own_share"] = round(row["overhead"]["batch_seconds"] / row["without_seconds"], 5)
        print(f"pair {pair}: {row['with_seconds'] / row['without_seconds'] - 1:+.2%}, own count {row['own_share']:.2%}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of runs. Defaults to 20")
    parser.add_argument("--steps", type=int, default=100, help="steps of a run. Defaults to 100")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = pairs(options.pairs, options.steps, Path(folder) / "run.jsonl")
    with_logger, without = (
        statistics.quantiles([row[f"{name}_seconds"] for row in rows], n=4)[0] for name in ("with", "without")
    )
    hooks = statistics.median(row["overhead"]["per_batch_seconds"] for row in rows)
    summary = {
        "step_milliseconds": round(without / options.steps * 1e3, 3),
        "difference_share": round(with_logger / without - 1, 5),
        "median_own_share": round(statistics.median(row["own_share"] for row in rows), 5),
        "hooks_in_fit_microseconds": round(hooks * 1e6, 1),
    }
    print(summary)
    write_results(
        "logger",
        {
            "environment": environment("tensorflow", "keras", "numpy", "psutil"),
            "settings": {"pairs": options.pairs, "steps": options.steps, "batch_size": BATCH},
            "summary": summary,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
