"""Rows a second of `fit`: from a file by `H5ChunkSequence`, and of one batch that is on the device already."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from environment import ROOT

sys.path.insert(0, str(ROOT))
BATCH = 256


def streaming(task: dict[str, Any]) -> dict[str, Any]:
    """Return rows a second of the reader alone, of `fit` from it, and of `fit` on a batch that is there.

    Args:
        task: `rehearsed`, whether all is to be small.
    """
    import keras

    from kerasmem import H5ChunkSequence

    batches, rounds, side = (4, 1, 16) if task["rehearsed"] else (64, 3, 96)
    rows = batches * BATCH
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.h5")
        _write(path, rows, side)
        model = _model(side)
        sequence = H5ChunkSequence(path, "x", "y", batch_size=BATCH)
        x, y = (keras.ops.convert_to_tensor(each) for each in sequence[0])
        contestants = {
            "reader alone": lambda: sum(len(batch[0]) for batch in sequence.next_epoch()),
            "fit from the file": lambda: model.fit(sequence, verbose=0),
            "fit on a batch that is there": lambda: model.fit(_again(x, y, batches), **_steps(batches)),
        }
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(rounds + 1):
            for name, work in contestants.items():
                began = time.perf_counter()
                work()
                if turn:  # the first one traces, compiles, and fills the cache
                    rates[name].append(round(rows / (time.perf_counter() - began), 1))
    settings = {"rows": rows, "batch_size": BATCH, "row_bytes": side * side * 3 * 4}
    return {"settings": settings, "rows_per_second": rates}


def _write(path: Path, rows: int, side: int) -> None:
    import h5py
    import numpy as np

    generator = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (rows, side, side, 3), "float32", chunks=(BATCH, side, side, 3))
        for start in range(0, rows, BATCH):
            x[start : start + BATCH] = generator.random((BATCH, side, side, 3), "float32")
        file["y"] = generator.integers(0, 10, rows)


def _model(side: int) -> Any:
    import keras

    layers = keras.layers
    stack = [layers.Conv2D(16, 3, strides=2, activation="relu"), layers.GlobalAveragePooling2D(), layers.Dense(10)]
    model = keras.Sequential([keras.Input((side, side, 3)), *stack])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _again(x: Any, y: Any, count: int) -> Any:
    if os.environ["KERAS_BACKEND"] == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensors((x, y)).repeat(count)

    def batches() -> Iterator[Any]:
        for _ in range(count):
            yield x, y

    return batches()


def _steps(count: int) -> dict[str, Any]:
    steps = {} if os.environ["KERAS_BACKEND"] == "tensorflow" else {"steps_per_epoch": count}
    return {"verbose": 0, **steps}
