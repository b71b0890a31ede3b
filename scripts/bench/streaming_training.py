"""Mixing of batches on class-sorted data, its effect on accuracy, and the time that `fit` waits for data."""

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
from streaming_data import BATCH, compression, goal, load, rotate

from kerasmem import H5ChunkSequence

CLASSES, FEATURES = 10, 128
ROWS, TEST_ROWS = 60_000, 20_000
CHUNK_ROWS = 60
EPOCHS, SEEDS = 2, range(5)
IMAGE = (32, 32, 3)
FIT_STEPS = 300
Row = dict[str, Any]


def mixing(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Measure label entropy and accuracy with a tenth of class-sorted data as the memory budget."""
    x, y, *test = _classes()
    in_memory = {seed: _accuracy(seed, _Shuffled(x, y, seed), test) for seed in SEEDS}
    for layout in ("contiguous", "chunked", "gzip"):
        path = folder / f"sorted-{layout}.h5"
        with h5py.File(path, "w") as file:
            chunks = None if layout == "contiguous" else (CHUNK_ROWS, FEATURES)
            file.create_dataset("x", data=x, chunks=chunks, **compression(layout))
            file["y"] = y

        def opened(seed: int, path: Path = path) -> H5ChunkSequence:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about sorted data
                return H5ChunkSequence(path, batch_size=BATCH, memory_budget=x.nbytes // 10, seed=seed)

        with opened(0) as sequence:
            ours = _bits([labels for _, labels in sequence.next_epoch()])
        mixed = np.random.default_rng(0).permutation(y)
        uniform = _bits([mixed[first : first + BATCH] for first in range(0, len(y), BATCH)])
        differences = []
        for seed in SEEDS:
            with opened(seed) as sequence:
                differences.append(_accuracy(seed, sequence, test) - in_memory[seed])
        path.unlink()
        name = f"sorted by class, {layout}, budget 10 %"
        apart = round(abs(statistics.mean(differences)), 3)
        yield {
            "difference_points": [round(difference, 3) for difference in differences],
            "summary": [
                goal(f"{name}: batch label entropy / uniform shuffle", round(ours / uniform, 5), 0.99),
                goal(f"{name}: accuracy, points away from uniform shuffle, {len(SEEDS)} seeds", apart, 0.5, most=True),
            ],
        }


def _classes() -> tuple[np.ndarray, ...]:
    """Return ten overlapping classes, the rows sorted by class, and mixed rows to test with."""
    random = np.random.default_rng(0)
    y = np.sort(np.arange(ROWS) % CLASSES).astype(np.int64)
    test = np.arange(TEST_ROWS) % CLASSES
    centres = random.normal(0, 1.0, (3 * CLASSES, FEATURES))  # three clusters a class

    def draw(labels: np.ndarray) -> np.ndarray:
        clusters = labels + CLASSES * random.integers(0, 3, len(labels))
        return (centres[clusters] + random.normal(0, 3.0, (len(labels), FEATURES))).astype(np.float32)

    return draw(y), y, draw(test), test


def _bits(batches: list[np.ndarray]) -> float:
    """Return the mean entropy of the batches' labels."""
    total = 0.0
    for labels in batches:
        shares = np.bincount(np.asarray(labels)) / len(labels)
        shares = shares[shares > 0]
        total -= float((shares * np.log2(shares)).sum())
    return total / len(batches)


class _Shuffled(keras.utils.PyDataset):
    """Data shuffled uniformly in memory, in another order each epoch."""

    def __init__(self, x: np.ndarray, y: np.ndarray, seed: int) -> None:
        super().__init__()
        self.x, self.y, self.random = x, y, np.random.default_rng(seed)
        self.on_epoch_end()

    def __len__(self) -> int:
        return -(-len(self.y) // BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self) -> None:
        self.order = self.random.permutation(len(self.y))


def _accuracy(seed: int, data: Any, test: list[np.ndarray]) -> float:
    """Return the accuracy in percent after training from weights that depend on the seed alone."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Dense(128, "relu"), keras.layers.Dense(CLASSES, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(data, epochs=EPOCHS, verbose=0)
    return 100 * float(model.evaluate(*test, batch_size=2000, verbose=0)[1])


def fit(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Measure the time of a batch within `fit` beyond the train step of a small CNN.

    The train step is the model's compiled train function, repeated on one batch that TensorFlow holds. Beside it stands
    `fit` on that batch, which includes Keras's own loop.
    """
    for layout, dtype in (("chunked", "float32"), ("gzip", "uint8")):
        path = folder / f"fit-{layout}.h5"
        random = np.random.default_rng(0)
        rows = FIT_STEPS * BATCH
        with h5py.File(path, "w") as file:
            images = random.integers(0, 40, (rows, *IMAGE), "u1").astype(dtype)
            file.create_dataset("x", data=images, chunks=(BATCH, *IMAGE), **compression(layout))
            file["y"] = random.integers(0, CLASSES, rows)
        load(path)
        yield _fit(path, f"fit, small CNN, {layout} {dtype} rows of 12 KB", options.repeats)
        path.unlink()


def _cnn() -> Any:
    layers = keras.layers
    model = keras.Sequential([
        layers.Input(IMAGE), layers.Rescaling(1 / 255),
        layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(CLASSES, activation="softmax"),
    ])  # fmt: skip
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def _fit(path: Path, name: str, repeats: int) -> Row:
    keras.utils.set_random_seed(0)
    model = _cnn()
    budget = FIT_STEPS * BATCH * 12_288 // 4
    with (
        H5ChunkSequence(path, batch_size=BATCH, memory_budget=budget) as sequence,
        H5ChunkSequence(path, batch_size=BATCH, memory_budget=budget, seed=1) as streamed,
    ):
        as_tensors = streamed.as_tf_dataset()
        held = tf.data.Dataset.from_tensors(sequence.batch(0)).cache().repeat()
        fits: dict[str, Callable[[], object]] = {
            "one batch": lambda: model.fit(held, steps_per_epoch=FIT_STEPS, verbose=0, shuffle=False),
            "the sequence": lambda: model.fit(sequence, verbose=0),
            "as_tf_dataset()": lambda: model.fit(as_tensors, verbose=0, shuffle=False),
        }
        for warm_up in fits.values():
            warm_up()
        train = model.make_train_function()

        def own_steps() -> None:
            batches = iter(held)
            for _ in range(FIT_STEPS):
                logs = train(batches)
            float(logs["loss"] if isinstance(logs, dict) else logs[0])  # wait for the last step

        def timed(work: Callable[[], object]) -> Callable[[], float]:
            def run() -> float:
                begin = time.perf_counter()
                work()
                return FIT_STEPS / (time.perf_counter() - begin)

            return run

        works = {"own steps": own_steps, **fits}
        rates = rotate({title: timed(work) for title, work in works.items()}, repeats)
    milliseconds = {title: round(1000 / statistics.median(values), 4) for title, values in rates.items()}
    beyond = {title: round(value / milliseconds["own steps"] - 1, 4) for title, value in milliseconds.items()}
    what = f"{name}: time a batch beyond the model's own step"
    return {
        "milliseconds_a_step": milliseconds,
        "beyond_own_steps": beyond,
        "summary": [goal(what, beyond["the sequence"], 0.05, most=True)],
    }
