#!/usr/bin/env python3
"""What MemoryLogger costs: the same training with it and without any callback, by turns.

    python scripts/bench/logger.py [--pairs 20] [--steps 100] [--quick]

A small CNN (28 × 28 images, batches of 64) on the CPU, under TensorFlow's BFC allocator. A pair is two `fit` calls
of as many steps on one compiled model, the order changing from pair to pair; the difference is what the logger costs
in all, its own count of its hooks beside it. The hooks alone are timed apart, by calls without training: a training
step leaves none of their code in the processor's caches, so that inside `fit` they take some five times as long.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from environment import ROOT, environment, write_results

sys.path.insert(0, str(ROOT))
BATCH = 64


def small_cnn() -> Any:
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def pairs(count: int, steps: int, log: Path) -> list[dict[str, Any]]:
    import numpy as np

    from kerasmem import MemoryLogger

    generator = np.random.default_rng(0)
    x = generator.random((BATCH * steps, 28, 28, 1), "float32")
    y = generator.integers(0, 10, BATCH * steps)
    model = small_cnn()
    model.fit(x, y, batch_size=BATCH, verbose=0)  # trace, and warm up
    rows = []
    for pair in range(count):
        row: dict[str, Any] = {}
        for logged in (pair % 2 == 0, pair % 2 == 1):
            logger = MemoryLogger(log) if logged else None
            start, processor = time.perf_counter(), time.process_time()
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger] if logger else [])
            row["with_seconds" if logged else "without_seconds"] = round(time.perf_counter() - start, 5)
            row["with_processor" if logged else "without_processor"] = round(time.process_time() - processor, 5)
            if logger is not None:
                row["overhead"] = logger.overhead.to_dict()
        row["difference_share"] = round(row["with_seconds"] / row["without_seconds"] - 1, 5)
        rows.append(row)
        print(
            f"pair {pair}: {row['difference_share']:+.2%}, its own count {row['overhead']['step_share']:.2%}",
            file=sys.stderr,
        )
    return rows


def quiet(rows: list[dict[str, Any]], name: str) -> float:
    """The mean of the fastest quarter: what a fit takes when nothing else runs on a machine that is shared."""
    return statistics.mean(sorted(row[name] for row in rows)[: max(1, len(rows) // 4)])


def hooks(settings: dict[str, Any], batches: int) -> dict[str, float]:
    from kerasmem import MemoryLogger

    logger = MemoryLogger(**settings)
    logger.on_train_begin()
    logger.on_epoch_begin(0)
    taken = []
    for batch in range(batches):
        start = time.perf_counter()
        logger.on_train_batch_begin(batch)
        logger.on_train_batch_end(batch)
        taken.append((time.perf_counter() - start) * 1e6)
    logger.on_train_end()
    taken.sort()
    return {
        "median_microseconds": round(statistics.median(taken), 1),
        "p95_microseconds": round(taken[len(taken) * 95 // 100], 1),
        "mean_microseconds": round(statistics.mean(taken), 1),
        "background_share": round(logger.overhead.background_seconds / (sum(taken) / 1e6), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="2 short pairs, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.steps = 2, 20
    batches = 500 if options.quick else 5000
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder)
        alone = {
            "memory alone": hooks({}, batches),
            "csv": hooks({"filename": log / "hooks.csv"}, batches),
            "jsonl": hooks({"filename": log / "hooks.jsonl"}, batches),
        }
        rows = pairs(options.pairs, options.steps, log / "run.jsonl")
    own = [row["overhead"]["step_share"] for row in rows]
    summary = {
        "step_milliseconds": round(statistics.median(r["without_seconds"] for r in rows) / options.steps * 1e3, 3),
        "median_difference_share": round(statistics.median(row["difference_share"] for row in rows), 5),
        "quiet_difference_share": round(quiet(rows, "with_seconds") / quiet(rows, "without_seconds") - 1, 5),
        "quiet_processor_share": round(quiet(rows, "with_processor") / quiet(rows, "without_processor") - 1, 5),
        "median_own_share": round(statistics.median(own), 5),
        "hooks_in_fit_microseconds": round(
            statistics.median(r["overhead"]["per_batch_seconds"] for r in rows) * 1e6, 1
        ),
        "hooks_share_of_step": round(
            alone["jsonl"]["median_microseconds"]
            / (statistics.median(row["without_seconds"] for row in rows) / options.steps * 1e6),
            5,
        ),
        "load_average": round(os.getloadavg()[0], 1),
    }
    print(summary, alone, file=sys.stderr)
    settings = {"pairs": options.pairs, "steps": options.steps, "batch_size": BATCH, "hook_batches": batches}
    machine = environment("tensorflow", "keras", "numpy", "psutil")
    results = {"environment": machine, "settings": settings, "summary": summary, "hooks": alone, "rows": rows}
    write_results("logger_quick" if options.quick else "logger", results)


if __name__ == "__main__":
    main()
