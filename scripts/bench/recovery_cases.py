"""Seeded runs under limits that they exceed, each beside the same run with enough memory.

    recovery_cases.py BESIDE SEED …

Each seed draws a model, optimizer, precision, loop, batch and limit. A run is a process forked before TensorFlow does
anything; BESIDE cases run at once, since runs that run out of memory mostly wait. If a run ends with the error that not
even one row fits, or TensorFlow ends its process, Keras's own `fit` with batches of one row runs twice under the same
limit, to check that error. Prints a line of JSON for each case. With TF_ENABLE_ONEDNN_OPTS=1 steps run in a process of
their own, because some of oneDNN's kernels end it when memory runs out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.update(
    TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", TF_CPU_ALLOCATOR_USE_BFC="true",
    TF_ENABLE_ONEDNN_OPTS=os.environ.get("TF_ENABLE_ONEDNN_OPTS", "0"),
)  # fmt: skip

import keras
import numpy as np

import kerasmem
from kerasmem.training.steps.splitting import uneven_layers

MIB = 1 << 20
ONEDNN = os.environ["TF_ENABLE_ONEDNN_OPTS"] == "1"
L = keras.layers
LOOPS = ("arrays", "dataset", "pipeline", "generator", "super", "own step")
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.001),
    "adamw": lambda: keras.optimizers.AdamW(0.001),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.001),
}
ONE_ROW = "stopped: one row does not fit"
CRASHED = "crashed"
FITS, RUNS_OUT = "fits", "runs out"  # Keras's own `fit` with batches of one row
POLICIES = ("float32",) * 6 + ("mixed_bfloat16", "mixed_float16")
Draw = np.random.Generator


def mlp(draw: Draw) -> tuple[Any, list[Any]]:
    width = int(draw.integers(128, 512))
    return keras.Input((64,)), [L.Dense(width, "relu") for _ in range(int(draw.integers(3, 7)))]


def convnet(draw: Draw) -> tuple[Any, list[Any]]:
    filters = int(draw.integers(8, 24))
    parts = [L.Conv2D(filters * step, 3, activation="relu", padding="same") for step in (1, 1, 2)]
    return keras.Input((24, 24, 3)), [*parts, L.GlobalAveragePooling2D()]


def normed(draw: Draw) -> tuple[Any, list[Any]]:
    """Layers whose result depends on the whole batch, so that `fit` warns."""
    blocks = [layer for _ in range(3) for layer in (L.Dense(256), L.BatchNormalization(), L.ReLU())]
    return keras.Input((64,)), [*blocks, L.Dropout(0.2)]


def text(draw: Draw) -> tuple[Any, list[Any]]:
    """An embedding, whose gradients are slices."""
    parts = [L.Embedding(2000, 64), L.LayerNormalization(), L.Conv1D(64, 3, activation="gelu")]
    return keras.Input((64,), dtype="int32"), [*parts, L.GlobalMaxPooling1D()]


MODELS = {"mlp": mlp, "convnet": convnet, "normed": normed, "text": text}


class Super(keras.Sequential):
    """A step of its own that only calls Keras's step."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class Own(keras.Sequential):
    """An unknown step of its own, which `fit` refuses to split."""

    def train_step(self, data: Any) -> Any:
        return dict(super().train_step(data))


class Batches(keras.utils.PyDataset):
    def __init__(self, x: Any, y: Any, size: int) -> None:
        super().__init__()
        self.x, self.y, self.size = x, y, size

    def __len__(self) -> int:
        return -(-len(self.x) // self.size)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = slice(index * self.size, (index + 1) * self.size)
        return self.x[rows], self.y[rows]


def drawn(seed: int) -> dict[str, Any]:
    """Draw the settings of a case."""
    draw = np.random.default_rng(seed)
    return {
        "seed": seed,
        "model": str(draw.choice(list(MODELS))),
        "optimizer": str(draw.choice(list(OPTIMIZERS))),
        "policy": str(draw.choice(POLICIES)),
        "loop": str(draw.choice(LOOPS)),
        "share": round(float(draw.uniform(0.25, 0.9)), 3),  # of what a step takes beside what is held
        "steps": int(draw.integers(2, 4)),
    }


def prepared(case: dict[str, Any], batch: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Return the model and the arguments of `fit`. Batches default to the size of the case."""
    import tensorflow as tf

    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(case["seed"])
    keras.config.set_dtype_policy(case["policy"])
    draw = np.random.default_rng((case["seed"], 1))
    inputs, parts = MODELS[case["model"]](draw)
    kind = {"super": Super, "own step": Own}.get(case["loop"], keras.Sequential)
    model = kind([inputs, *parts, L.Dense(1, dtype="float32")])
    model.compile(OPTIMIZERS[case["optimizer"]](), "mse", jit_compile=False)
    size = {"mlp": 4096, "normed": 4096, "convnet": 192, "text": 512}[case["model"]]
    rows = size * case["steps"] - size // 3  # the last batch is smaller
    shape = (rows, *model.input_shape[1:])
    size = batch or size
    x = draw.integers(0, 2000, shape, "int32") if case["model"] == "text" else draw.random(shape, "float32")
    y = draw.random((rows, 1), "float32")
    loop = case["loop"]
    if loop == "dataset":
        return model, {"x": Batches(x, y, size), "shuffle": False}
    if loop == "pipeline":
        return model, {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(size)}
    if loop == "generator":
        batches = ((x[at : at + size], y[at : at + size]) for at in range(0, rows, size))
        return model, {"x": batches}
    return model, {"x": x, "y": y, "batch_size": size, "shuffle": False}


def state(model: Any) -> list[np.ndarray]:
    return [np.asarray(variable.value, "float64") for variable in model.trainable_variables]


def undisturbed(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train with enough memory and return the bytes before a step and at its peak."""
    import tensorflow as tf

    model, arguments = prepared(case)
    model.optimizer.build(model.trainable_variables)
    held = tf.config.experimental.get_memory_info("CPU:0")["current"]
    model.fit(**arguments, verbose=0)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    np.savez(f"{folder}/{case['seed']}.npz", *state(model))
    return {"held": held, "peak": peak}


def limited(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train under the limit and return the outcome and the distance to the undisturbed weights."""
    model, arguments = prepared(case)
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            history = kerasmem.fit(model, **arguments, verbose=0, isolated=ONEDNN)
            recoveries = [recovery.to_dict() for recovery in history.recoveries]
        except kerasmem.KerasmemError as error:
            return {
                "outcome": _refusal(str(error)),
                "failures": 1 + sum("ran out of memory" in str(warning.message) for warning in caught),
                "said": str(error).splitlines()[0][:300],
                "seconds": round(time.monotonic() - begin, 1),
            }
    texts = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    failures = sum("ran out of memory" in text for text in texts)
    with np.load(f"{folder}/{case['seed']}.npz") as stored:
        whole = [stored[name] for name in stored.files]
    difference = _norm([a - b for a, b in zip(state(model), whole, strict=True)]) / _norm(whole)
    uneven = uneven_layers(model)
    is_warned = uneven is not None and any(uneven in text for text in texts)
    outcome = (
        "did not run out" if not failures
        else "same weights" if difference <= 1e-5
        else "other weights, with a warning" if is_warned
        else "other"
    )  # fmt: skip
    return {
        "outcome": outcome,
        "failures": failures,
        "micro_batch_rows": [recovery["micro_batch_rows"] for recovery in recoveries],
        "difference": difference,
        "seconds": round(time.monotonic() - begin, 1),
    }


def _refusal(text: str) -> str:
    first = text.splitlines()[0]
    if "divided" in text and "one row" not in first:
        return "refused, as documented"
    outcomes = {
        "one row": ONE_ROW,
        "arrays": "stopped: the arrays do not fit",
        "update": "stopped: the update does not fit",
    }
    return next((outcome for words, outcome in outcomes.items() if words in first), "another error")


def by_one(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train by Keras alone on batches of one row."""
    model, arguments = prepared(case, 1)
    try:
        model.fit(**arguments, steps_per_epoch=4, verbose=0)
    except Exception:
        return {"outcome": RUNS_OUT}
    return {"outcome": FITS}


def _norm(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(sum((array**2).sum() for array in arrays)))


def in_a_fork(work: Any, case: dict[str, Any], folder: str) -> Any:
    """Run a part of a case in a fork and return its answer, or {"outcome": "crashed"} without one."""
    path = Path(folder) / f"{case['seed']}.json"
    path.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            answer = work(case, folder)
        except BaseException as error:
            answer = {"outcome": "another error", "said": f"{type(error).__name__}: {error}"[:300]}
        path.write_text(json.dumps(answer))
        os._exit(0)
    os.waitpid(child, 0)
    return json.loads(path.read_text()) if path.exists() else {"outcome": CRASHED}


def of_case(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Run both parts of a case, in a process that has imported TensorFlow but not started it."""
    case = case | in_a_fork(undisturbed, case, folder)
    if "peak" not in case:
        return case
    case["limit_mib"] = int(case["held"] + case["share"] * (case["peak"] - case["held"])) // MIB
    os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(case["limit_mib"])
    case |= in_a_fork(limited, case, folder)
    if case["outcome"] in (ONE_ROW, CRASHED):
        turns = [in_a_fork(by_one, case, folder)["outcome"] for _ in range(2)]
        case["keras_by_one_row"] = turns
        if case["outcome"] == ONE_ROW and turns == [FITS] * 2:
            case["outcome"] = "stopped wrongly: one row fits"
        elif case["outcome"] == turns[0] == turns[1] == CRASHED:
            case["outcome"] = "crashed; Keras crashes on one row, too"
    return case


def main(beside: str, *seeds: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        waiting = 0
        for seed in map(int, seeds):
            if waiting == int(beside):
                os.wait()
                waiting -= 1
            if not os.fork():
                print(json.dumps(of_case(drawn(seed), folder)), flush=True)
                os._exit(0)
            waiting += 1
        for _ in range(waiting):
            os.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
