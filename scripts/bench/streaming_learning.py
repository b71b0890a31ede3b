"""How well batches are mixed on class-sorted data, what that does to accuracy, and what `fit` waits for."""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from streaming_data import BATCH, Absent, bytes_read_so_far, compression, load
from streaming_rows import goal
from streaming_timing import rotate

from kerasmem import H5ChunkSequence

CLASSES, FEATURES = 10, 128
ROWS, TEST_ROWS = 60_000, 20_000
CHUNK_ROWS = 60
EPOCHS = 2
_LAYOUTS = ("contiguous", "chunked", "gzip")
_IMAGE = (32, 32, 3)


# ---- mixing


def mixing(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure label entropy and accuracy with a tenth of class-sorted data as `memory_budget`.

    The buffer is what the budget leaves of it for windows, of which there are two; `window_share` says how much of the
    data is shuffled together.
    """
    x, y, *test = _classes()
    in_memory: dict[int, float] = {}
    seeds, epochs = range(2 if options.quick else 5), 1 if options.quick else EPOCHS
    for layout in _LAYOUTS:
        path = folder / f"sorted-{layout}.h5"
        with h5py.File(path, "w") as file:
            chunks = None if layout == "contiguous" else (CHUNK_ROWS, FEATURES)
            file.create_dataset("x", data=x, chunks=chunks, **compression(layout))
            file["y"] = y
        row = _entropy(path, layout, y, x.nbytes // 10)
        if not options.quick or layout == "chunked":
            for seed in seeds:
                in_memory[seed] = in_memory.get(seed) or _accuracy(seed, _shuffled(x, y, seed), test, epochs)
            streamed = {seed: _streamed(path, seed, x.nbytes // 10, test, epochs) for seed in seeds}
            row |= {"epochs": epochs} | _compare(layout, streamed, in_memory)
        row["summary"] = row.pop("entropy_summary") + row.pop("accuracy_summary", [])
        path.unlink()
        yield row


def _classes() -> tuple[np.ndarray, ...]:
    """Return ten overlapping classes, the rows sorted by class, and as many mixed rows to test with."""
    random = np.random.default_rng(0)
    y = np.sort(np.arange(ROWS) % CLASSES).astype(np.int64)
    test = np.arange(TEST_ROWS) % CLASSES
    centres = random.normal(0, 1.0, (3 * CLASSES, FEATURES))  # three clusters a class

    def draw(labels: np.ndarray) -> np.ndarray:
        clusters = labels + CLASSES * random.integers(0, 3, len(labels))
        return (centres[clusters] + random.normal(0, 3.0, (len(labels), FEATURES))).astype(np.float32)

    return draw(y), y, draw(test), test


def _entropy(path: Path, layout: str, y: np.ndarray, budget: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is sorted by class
        sequence = H5ChunkSequence(path, batch_size=BATCH, memory_budget=budget)
        with sequence:
            ours = _bits([labels for _, labels in sequence.next_epoch()])
            said = sequence.quality().ratio
    mixed = random.permutation(y)
    uniform = _bits([mixed[at : at + BATCH] for at in range(0, len(y), BATCH)])
    value = round(ours / uniform, 5)
    what = f"sorted by class, {layout}, budget 10 %: batch label entropy / uniform shuffle"
    return {
        "layout": layout, "rows": len(y), "chunk_rows": CHUNK_ROWS, "memory_budget": budget,
        "window_share": round(sequence.plan.window_rows / len(y), 4), "block_rows": sequence.plan.block_rows,
        "entropy_bits": ours, "uniform_bits": uniform, "ratio_that_quality_says": said,
        "entropy_summary": [goal(what, value, 0.99)],
    }  # fmt: skip


def _bits(batches: list[np.ndarray]) -> float:
    """Return the mean entropy of the batches' labels."""
    total = 0.0
    for labels in batches:
        shares = np.bincount(np.asarray(labels)) / len(labels)
        shares = shares[shares > 0]
        total -= float((shares * np.log2(shares)).sum())
    return total / len(batches)


def _shuffled(x: np.ndarray, y: np.ndarray, seed: int) -> Any:
    """Return the data shuffled uniformly in memory, in another order each epoch."""
    random = np.random.default_rng(seed)

    class Shuffled(keras.utils.PyDataset):
        def __init__(self) -> None:
            super().__init__()
            self.order = random.permutation(len(y))

        def __len__(self) -> int:
            return -(-len(y) // BATCH)

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            rows = self.order[index * BATCH : (index + 1) * BATCH]
            return x[rows], y[rows]

        def on_epoch_end(self) -> None:
            self.order = random.permutation(len(y))

    return Shuffled()


def _streamed(path: Path, seed: int, budget: int, test: list[np.ndarray], epochs: int) -> float:
    with H5ChunkSequence(path, batch_size=BATCH, memory_budget=budget, seed=seed) as sequence:
        return _accuracy(seed, sequence, test, epochs)


def _accuracy(seed: int, data: Any, test: list[np.ndarray], epochs: int) -> float:
    """Return the accuracy in percent after training on `data`; the weights begin the same for a seed."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Dense(128, "relu"), keras.layers.Dense(CLASSES, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(data, epochs=epochs, verbose=0)
    return 100 * float(model.evaluate(*test, batch_size=2000, verbose=0)[1])


def _compare(layout: str, streamed: dict[int, float], in_memory: dict[int, float]) -> dict[str, Any]:
    differences = [streamed[seed] - in_memory[seed] for seed in streamed]
    mean = statistics.mean(differences)
    what = f"sorted by class, {layout}, budget 10 %: accuracy, points away from uniform shuffle, {len(streamed)} seeds"
    return {
        "accuracy_percent": {"ours": list(streamed.values()), "uniform in memory": list(in_memory.values())},
        "difference_points": {
            "mean": round(mean, 3), "each": [round(each, 3) for each in differences],
            "standard_deviation": round(statistics.stdev(differences), 3),
        },
        "accuracy_summary": [goal(what, round(abs(mean), 3), 0.5, most=True)],
    }  # fmt: skip


# ---- fit


def fit(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure what a batch takes within `fit` beyond the train step of a small CNN.

    The model's own step: its compiled train function over and over on one batch that TensorFlow holds. Beside it stands
    `fit` on that batch, which has Keras's own loop in it. The steps are as many as the sequence has batches.
    """
    rows = (60 if options.quick else 300) * BATCH
    for layout, dtype in (("chunked", "float32"), ("gzip", "uint8")):
        path = folder / f"fit-{layout}.h5"
        try:
            _write_images(path, layout, dtype, rows)
        except Absent as absent:
            yield {"layout": layout, "skipped": str(absent)}
            continue
        load(path)
        yield _fit(path, layout, dtype, rows, options)
        path.unlink()


def _write_images(path: Path, layout: str, dtype: str, rows: int) -> None:
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", (rows, *_IMAGE), dtype, chunks=(BATCH, *_IMAGE), **compression(layout))
        for first in range(0, rows, 4096):
            part = random.integers(0, 40, (min(4096, rows - first), *_IMAGE))
            data[first : first + len(part)] = part.astype(dtype)
        file["y"] = random.integers(0, CLASSES, rows)


def _cnn() -> Any:
    layers = keras.layers
    model = keras.Sequential([
        layers.Input(_IMAGE), layers.Rescaling(1 / 255),
        layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(CLASSES, activation="softmax"),
    ])  # fmt: skip
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def _fit(path: Path, layout: str, dtype: str, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    model, steps = _cnn(), rows // BATCH
    budget = max(rows * 12_288 // 4, 24 * BATCH * 12_288)
    sequence = H5ChunkSequence(path, batch_size=BATCH, memory_budget=budget)
    streamed = H5ChunkSequence(path, batch_size=BATCH, memory_budget=budget, seed=1)
    as_tensors = streamed.as_tf_dataset()
    held = tf.data.Dataset.from_tensors(sequence.batch(0)).cache().repeat()
    model.fit(held, steps_per_epoch=3, verbose=0, shuffle=False)
    model.fit(sequence, verbose=0)
    model.fit(as_tensors, verbose=0, shuffle=False)
    train = model.make_train_function()

    def own_steps() -> None:
        batches = iter(held)
        for _ in range(steps):
            logs = train(batches)
        float(logs["loss"] if isinstance(logs, dict) else logs[0])  # wait for the last

    def timed(work: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            begin = time.perf_counter()
            work()
            return steps / (time.perf_counter() - begin)

        return run

    own, in_memory, ours = "own steps on one batch", "fit on one batch", "fit on the sequence"
    before = bytes_read_so_far()
    rates = rotate(
        {
            own: timed(own_steps),
            in_memory: timed(lambda: model.fit(held, steps_per_epoch=steps, verbose=0, shuffle=False)),
            ours: timed(lambda: model.fit(sequence, verbose=0)),
            "fit on as_tf_dataset()": timed(lambda: model.fit(as_tensors, verbose=0, shuffle=False)),
        },
        options.repeats,
    )
    read = (bytes_read_so_far() - before) / options.repeats / 2
    sequence.close()
    streamed.close()
    milliseconds = {name: [round(1000 / rate, 4) for rate in each] for name, each in rates.items()}
    middle = {name: statistics.median(each) for name, each in milliseconds.items()}
    least = {name: min(each) for name, each in milliseconds.items()}
    beyond = {
        f"{name} beyond {base}": {
            "median": round(middle[name] / middle[base] - 1, 4),
            "best": round(least[name] / least[base] - 1, 4),
            "paired": round(
                statistics.median(a / b for a, b in zip(milliseconds[name], milliseconds[base], strict=True)) - 1, 4
            ),
        }
        for base in (own, in_memory)
        for name in rates
        if name not in (own, base)
    }
    what = f"fit, small CNN, {layout} {dtype} rows of 12 KB: time a batch beyond the model's own step"
    return {
        "layout": layout, "dtype": dtype, "rows": rows, "steps": steps, "memory_budget": budget, "cache": "warm",
        "milliseconds_a_step": milliseconds, "beyond": beyond, "bytes_read_an_epoch": round(read),
        "summary": [goal(what, beyond[f"{ours} beyond {own}"], 0.05, most=True)],
        "warnings": [f"{name}: {values}" for name, values in beyond.items()] + [f"milliseconds a step: {middle}"],
    }  # fmt: skip
