"""One part of the recovery bench, in a process of its own: recovery_child.py PART [ARGUMENT]; prints JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import keras
import numpy as np

import kerasmem

L = keras.layers


def cnn(jit: bool = False) -> Any:
    parts = [L.Conv2D(16, 3, activation="relu"), L.MaxPooling2D(), L.Conv2D(32, 3, activation="relu")]
    model = keras.Sequential([keras.Input((28, 28, 1)), *parts, L.MaxPooling2D(), L.Flatten(), L.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit)
    return model


def wide(width: int = 1024, depth: int = 4, jit: bool = False, optimizer: Any = "adam") -> Any:
    parts = [L.Dense(width, "relu") for _ in range(depth)]
    model = keras.Sequential([keras.Input((256,)), *parts, L.Dense(10)])
    model.compile(optimizer, "mse", jit_compile=jit)
    return model


def data(model: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.random((rows, *model.input_shape[1:]), "float32")
    if len(model.input_shape) == 4:
        return x, random.integers(0, 10, rows)
    return x, random.random((rows, 10), "float32")


def overhead(pairs: str) -> dict[str, Any]:
    """The same epoch by `model.fit` and by `kerasmem.fit`, by turns."""
    found = {}
    folder = tempfile.mkdtemp()
    saving = {"checkpoint": os.path.join(folder, "run.ckpt"), "every": 100}
    for name, model, rows, batch in (
        ("small CNN, batches of 64", cnn(), 64 * 100, 64),
        ("MLP of 3.4 M parameters, batches of 256", wide(), 256 * 40, 256),
    ):
        x, y = data(model, rows)
        ways = {
            "plain": lambda all_, m=model: m.fit(**all_),
            "kerasmem": lambda all_, m=model: kerasmem.fit(m, **all_),
            "checkpoint": lambda all_, m=model: kerasmem.fit(m, **all_, **saving),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(int(pairs) + 1):  # the first warms up
            for way in list(ways) if turn % 2 else list(ways)[::-1]:
                start = time.perf_counter()
                ways[way]({"x": x, "y": y, "batch_size": batch, "verbose": 0})
                if turn:
                    times[way].append(time.perf_counter() - start)
        middle = {way: statistics.median(some) for way, some in times.items()}
        found[name] = {
            "step_milliseconds": round(middle["plain"] / (rows / batch) * 1e3, 3),
            "overhead_share": round(
                statistics.median(b / a for a, b in zip(times["plain"], times["kerasmem"], strict=True)) - 1, 4
            ),
            "overhead_share_with_checkpoint": round(
                statistics.median(b / a for a, b in zip(times["plain"], times["checkpoint"], strict=True)) - 1, 4
            ),
            "fastest_plain_seconds": round(min(times["plain"]), 4),
            "fastest_kerasmem_seconds": round(min(times["kerasmem"]), 4),
        }
    return found


def lost(mode: str, size: str = "") -> dict[str, Any]:
    """A run under a limit: whole batches, of which the first runs out, or pieces of some rows from the start."""
    model = wide(jit=mode == "xla")
    x, y = data(model, 4096 * 2)
    settings = {"micro_batches": 4096 // int(size)} if size else {}
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = kerasmem.fit(model, x, y, batch_size=4096, verbose=0, **settings)
    seconds = time.perf_counter() - start
    rows = [recovery.micro_batch_rows for recovery in history.recoveries]
    return {"seconds": round(seconds, 2), "micro_batch_rows": rows[-1] if rows else None}


def tall() -> Any:
    """A model of few weights that takes 128 MB for each row."""
    parts = [L.Reshape((1, 32)), L.UpSampling1D(1_000_000), L.GlobalAveragePooling1D(), L.Dense(10)]
    model = keras.Sequential([keras.Input((32,)), *parts])
    model.compile("adam", "mse", jit_compile=False)
    return model


def hopeless(name: str) -> dict[str, Any]:
    """A run under a limit that not even one row fits: seconds until it says so, and the failures that it took."""
    model = {"activations": tall, "gradients": wide, "slots": wide}[name]()
    x, y = data(model, 512)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            kerasmem.fit(model, x, y, batch_size=256, verbose=0)
        except kerasmem.KerasmemError as error:
            text = str(error)
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "failures": 1 + sum("it is repeated" in str(each.message) for each in said),
        "said": text[:300],
    }


def checkpoint() -> dict[str, Any]:
    """What one writing takes."""
    from kerasmem.training.array_source import ArraySource
    from kerasmem.training.checkpoint import Checkpoint
    from kerasmem.training.model_state import byte_count, read_state
    from kerasmem.training.run_state import RunState

    model = wide()
    x, y = data(model, 64)
    model.fit(x, y, verbose=0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        saved = Checkpoint(f"{folder}/run.ckpt", ArraySource(x, y, None, 32, True, None))
        for _ in range(10):
            start = time.perf_counter()
            state = read_state(model)
            copied = time.perf_counter()
            saved.write(RunState(batch=1, steps=2), state)
            rows.append((copied - start, time.perf_counter() - copied))
        size = os.path.getsize(f"{folder}/run.ckpt")
    return {
        "state_bytes": byte_count(state),
        "file_bytes": size,
        "copy_milliseconds": round(statistics.median(row[0] for row in rows) * 1e3, 1),
        "write_milliseconds": round(statistics.median(row[1] for row in rows) * 1e3, 1),
    }


def peak(pieces: str) -> dict[str, Any]:
    """The allocator's peak of a step in pieces, and what the estimate says of it."""
    import tensorflow as tf

    count, rows = int(pieces), 4096
    model = wide(depth=8)
    x, y = data(model, rows)
    peaks: list[int] = []

    def note(batch: int, logs: Any) -> None:
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        tf.config.experimental.reset_memory_stats("CPU:0")

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    options = {"micro_batches": count} if count > 1 else {}
    kerasmem.fit(model, x, y, batch_size=rows, epochs=9, verbose=0, callbacks=[watch], **options)
    measured = int(statistics.median(peaks[3:]))
    report = kerasmem.estimate(model, batch_size=rows // count, method="graph")
    gradients = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    held = x.nbytes + y.nbytes  # the batch as Keras holds it, and the arrays it is taken from
    estimate = report.bytes.total + (gradients if count > 1 else 0) + 2 * held
    return {
        "micro_batches": count,
        "measured_bytes": measured,
        "estimated_bytes": int(estimate),
        "gradient_set_bytes": gradients,
        "estimate_by_measured": round(estimate / measured, 3),
    }


def ragged() -> dict[str, Any]:
    """One update on 1000 rows in 30 pieces of 34, the last of which has 14: the error of the weights."""
    model = wide(64, 2, optimizer=keras.optimizers.SGD(0.1))
    x, y = data(model, 1000)
    y[986:] += 3  # the last piece is not like the others
    begin = model.get_weights()

    def update(train: Any) -> list[np.ndarray]:
        model.set_weights(begin)
        train()
        return model.get_weights()

    common = {"verbose": 0, "shuffle": False}
    whole = update(lambda: model.fit(x, y, batch_size=1000, **common))

    def in_pieces() -> None:
        kerasmem.fit(model, x, y, batch_size=1000, micro_batches=30, **common)

    ours = update(in_pieces)
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=30), "mse", jit_compile=False)
    theirs = update(lambda: model.fit(x, y, batch_size=34, **common))

    def error(found: list[np.ndarray]) -> float:
        wrong = sum(((a - b) ** 2).sum() for a, b in zip(found, whole, strict=True))
        return float(np.sqrt(wrong / sum(((a - b) ** 2).sum() for a, b in zip(whole, begin, strict=True))))

    return {"error_of_the_update": {"kerasmem.fit": error(ours), "gradient_accumulation_steps": error(theirs)}}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
