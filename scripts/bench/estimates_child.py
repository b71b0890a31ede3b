"""Measure one part of one row for estimates.py and print JSON.

python scripts/bench/estimates_child.py PART '{"model": …, "batch_size": …, …}'
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from common import most_requested, recorded_allocations

HERE = Path(__file__).resolve().parent
WARM_UP = 2
CAPPED_STEPS = 4


def _trained(row: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the row's model and a batch, both with real values."""
    import keras
    from zoo import batch_of, compiled

    keras.utils.set_random_seed(0)
    model = compiled(row["model"], row["optimizer"], row["dtype"], row["metrics"], row["mode"] == "xla")
    return (model, *batch_of(row["model"], model, row["batch_size"]))


def truth(row: dict[str, Any]) -> dict[str, Any]:
    """Train some steps and return the peak in use of each, weights, optimizer and batch included."""
    import tensorflow as tf

    model, x, y = _trained(row)
    began = time.perf_counter()
    for _ in range(WARM_UP):
        model.train_on_batch(x, y)
    warmed = time.perf_counter()
    peaks, before = [], []
    memory = tf.config.experimental
    for _ in range(row["steps"]):
        memory.reset_memory_stats("CPU:0")
        before.append(memory.get_memory_info("CPU:0")["current"])
        loss = model.train_on_batch(x, y)
        peaks.append(memory.get_memory_info("CPU:0")["peak"])
    ended = time.perf_counter()
    return {
        "peak_bytes": peaks,
        "before_bytes": before if len(set(before)) > 1 else before[:1],
        "persistent_bytes": _persistent_bytes(model, x, y),
        "loss_is_finite": all(math.isfinite(value) for value in (loss if isinstance(loss, list) else [loss])),
        "max_rss_bytes": max_rss(),
        "load_average": round(os.getloadavg()[0], 1),  # what else ran meanwhile changes the order of operations
        "warm_up_seconds": round(warmed - began, 2),
        "step_seconds": round((ended - warmed) / row["steps"], 3),
        "requested_increase_bytes": most_requested(recorded_allocations(lambda: model.train_on_batch(x, y))),
    }


def _persistent_bytes(model: Any, x: Any, y: Any) -> int:
    """Return the logical bytes of all variables and the batch, each counted once."""
    import tensorflow as tf
    from keras import tree

    held = [*model.variables, *model.optimizer.variables, *tree.flatten((x, y))]
    for metric in model.metrics:
        held += metric.variables
    once = {id(tensor): tensor for tensor in held}.values()
    return sum(math.prod(tensor.shape) * tf.as_dtype(tensor.dtype).size for tensor in once)


def capped(row: dict[str, Any]) -> dict[str, Any]:
    """Train some steps under the memory limit that the parent has set."""
    model, x, y = _trained(row)
    for _ in range(CAPPED_STEPS):
        model.train_on_batch(x, y)
    return {"outcome": "trained"}


def _batches(row: dict[str, Any]) -> Any:
    """Return a dataset without batches, with the shapes of the row's. `train_on_batch` knows the batch size."""
    import tensorflow as tf
    from keras import tree
    from zoo import batch_of, compiled

    from kerasmem.models.weightless import weightless

    with weightless():
        model = compiled(row["model"], row["optimizer"], row["dtype"], row["metrics"], row["mode"] == "xla")
    with tf.Graph().as_default():
        batch = tree.map_structure(
            lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), batch_of(row["model"], model, row["batch_size"])
        )
    return tf.data.Dataset.from_generator(lambda: iter(()), output_signature=tree.lists_to_tuples(batch))


def estimate(row: dict[str, Any]) -> dict[str, Any]:
    """Estimate the row by one method, without its weights."""
    began = time.perf_counter()
    import kerasmem

    data = _batches(row)
    jit_compile = row["mode"] == "xla"
    settings = {name: row[name] for name in ("optimizer", "dtype", "metrics")}
    report, error = None, None
    try:
        report = kerasmem.estimate(
            f"{HERE / 'zoo.py'}:compiled",
            factory_args={"name": row["model"], **settings, "jit_compile": jit_compile},
            batch_size=row["batch_size"],
            method=row["method"],
            jit_compile=jit_compile,
            data=data,
        )
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"[:400]
    wall = round(time.perf_counter() - began, 2)
    answer = {"method": row["method"], "error": error, "wall_seconds": wall, "max_rss_bytes": max_rss()}
    if report is None:
        return answer
    pool = report.pool
    return answer | {
        "method_used": report.settings.method,
        "total": report.bytes.total,
        "low": report.bytes.low,
        "high": report.bytes.high,
        "formula": report.formula.total_bytes,
        "requested": pool and pool.requested,
        "reserved": pool and pool.reserved,
        "smallest_limit": pool and pool.smallest_limit,
        "unmodelled": [entry.what for entry in report.unmodelled],
        "notes": list(report.notes)[:4],
    }


def max_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


PARTS = {part.__name__: part for part in (truth, estimate, capped)}

if __name__ == "__main__":
    print("\n" + json.dumps(PARTS[sys.argv[1]](json.loads(sys.argv[2]))))
