#!/usr/bin/env python3
"""Measure the savings and the cost of recomputation, beside the predicted ones.

    python scripts/bench/recompute.py [--only dense/graph] [--again 2] [--curve onednn eigen]

Each row runs in a process of its own with the real BFC allocator and is stored when it ends; stored rows are not
measured again. Processes differ by up to a fifth in speed: with `--again` the plain models and the automatic plans
take turns for so many more rounds, and figures are medians over all. In results/recompute.json `activations` is the
peak less weights and gradients, `above_start` the peak less what was in memory before the step. The optimizer, SGD,
has no slots. `--curve` measures more architectures on the named CPU kernels, against the 2 √n of n layers that √n
segments keep (Chen et al., 2016).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from typing import Any

from common import environment, read_results, run_python, tensorflow_environ, write_results

TIMEOUT = 600
KERNELS = ("onednn", "eigen")
CURVE = (  # the slowest last
    "deep_mlp", "encoder_in_model", "decoder", "mixer", "vision_transformer", "wavenet", "transformer", "unet",
    "conv3d", "transfer", "very_deep", "vgg16", "mobilenet_v2", "resnet50", "xception", "convnext_tiny",
    "efficientnet_b0", "dense", "densenet121",
)  # fmt: skip
MIXED = frozenset(("decoder", "encoder_in_model", "mixer"))  # in mixed_bfloat16
Row = dict[str, Any]


def dense(depth: int = 48, units: int = 1024, batch: int = 4096) -> tuple[Any, Any, Any, str]:
    """Return a stack of dense layers with a batch and its loss."""
    import keras

    layers = keras.layers
    stack = [layers.Dense(units, activation="gelu", name=f"dense_{number}") for number in range(depth)]
    model = keras.Sequential([keras.Input((units,)), *stack, layers.Dense(1, dtype="float32", name="out")])
    return model, _random((batch, units)), _random((batch, 1)), "mse"


def resnet50(batch: int = 16) -> tuple[Any, Any, Any, str]:
    import keras

    model = keras.applications.ResNet50(weights=None, input_shape=(128, 128, 3), classes=10)
    return model, _random((batch, 128, 128, 3)), _classes(batch), "sparse_categorical_crossentropy"


def _encoded(x: Any, blocks: int, heads: int, dropout: float) -> Any:
    """Apply some encoder blocks."""
    import keras

    layers = keras.layers
    width = x.shape[-1]
    for number in range(blocks):
        y = layers.LayerNormalization(name=f"norm_{number}a")(x)
        attention = layers.MultiHeadAttention(heads, width // heads, dropout=dropout, name=f"attend_{number}")
        x = layers.Add(name=f"add_{number}a")([x, attention(y, y)])
        y = layers.LayerNormalization(name=f"norm_{number}b")(x)
        y = layers.Dense(4 * width, activation="gelu", name=f"wide_{number}")(y)
        y = layers.Dense(width, name=f"narrow_{number}")(y)
        y = layers.Dropout(dropout, name=f"drop_{number}")(y) if dropout else y
        x = layers.Add(name=f"add_{number}b")([x, y])
    return x


def transformer(batch: int = 16) -> tuple[Any, Any, Any, str]:
    """Return an encoder of 12 blocks with dropout."""
    import keras
    import numpy as np

    layers = keras.layers
    inputs = keras.Input((128,), dtype="int32")
    x = _encoded(layers.Embedding(1000, 256)(inputs), 12, 8, 0.1)
    outputs = layers.Dense(10, activation="softmax", dtype="float32")(layers.GlobalAveragePooling1D()(x))
    tokens = np.random.default_rng(0).integers(0, 1000, (batch, 128))
    return keras.Model(inputs, outputs), tokens, _classes(batch), "sparse_categorical_crossentropy"


def transfer(batch: int = 16) -> tuple[Any, Any, Any, str]:
    """Return a backbone inside a model, all of it trained."""
    import keras

    backbone = keras.applications.MobileNet(weights=None, include_top=False, input_shape=(96, 96, 3), pooling="avg")
    inputs = keras.Input((96, 96, 3))
    outputs = keras.layers.Dense(10, activation="softmax")(backbone(keras.layers.Rescaling(2.0, -1.0)(inputs)))
    x, y = _random((batch, 96, 96, 3)), _classes(batch)
    return keras.Model(inputs, outputs), x, y, "sparse_categorical_crossentropy"


def encoder_in_model(batch: int = 32) -> tuple[Any, Any, Any, str]:
    """Return a deep encoder as a model inside a classifier of images in patches."""
    import keras

    layers = keras.layers
    entry = keras.Input((96, 128))
    encoder = keras.Model(entry, _encoded(entry, 12, 4, 0.0), name="encoder")
    inputs = keras.Input((96, 48))
    pooled = layers.GlobalAveragePooling1D()(encoder(layers.Dense(128)(inputs)))
    outputs = layers.Dense(10, activation="softmax", dtype="float32")(pooled)
    x, y = _random((batch, 96, 48)), _classes(batch)
    return keras.Model(inputs, outputs), x, y, "sparse_categorical_crossentropy"


def _random(shape: tuple[int, ...]) -> Any:
    import numpy as np

    return np.random.default_rng(0).random(shape, "float32")


def _classes(batch: int) -> Any:
    import numpy as np

    return np.random.default_rng(1).integers(0, 10, batch)


def of_zoo(name: str) -> tuple[Any, Any, Any, Any]:
    """Return a network of the zoo with a batch and its loss."""
    import zoo

    entry = zoo.ZOO[name]
    model = entry.build()
    return model, *zoo.batch_of(name, model, entry.batches[-1]), zoo.loss(entry.losses[0])


MODELS = {build.__name__: build for build in (dense, resnet50, transformer, transfer, encoder_in_model)}


def layer_count(model: Any) -> int:
    """Return the number of layers that compute something, those of nested models too."""
    import keras

    inner = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    return sum(layer_count(layer) if isinstance(layer, keras.Model) else 1 for layer in inner)


def measure(row: Row) -> Row:
    """Run the row's steps and return their memory and times. Runs in a new process."""
    import keras
    import tensorflow as tf

    import kerasmem

    keras.config.set_dtype_policy(row["policy"])
    keras.utils.set_random_seed(0)
    model, x, y, loss = MODELS[row["model"]]() if row["model"] in MODELS else of_zoo(row["model"])
    predicted: Row = {"layers": layer_count(model)}
    model.compile("sgd", loss, jit_compile=row["mode"] == "xla")
    if row["segments"] is not None:
        model = kerasmem.recompute(model, batch_size=len(x), segments=row["segments"])
        for name in ("activation_bytes", "plain_activation_bytes", "extra_time"):
            predicted[name] = getattr(model.plan, name)

    def size_of(variables: list[Any]) -> int:
        return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)

    x, y = tf.constant(x), tf.constant(y)
    model.train_on_batch(x, y)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    peaks, seconds = [], []
    for _ in range(3):
        tf.config.experimental.reset_memory_stats("CPU:0")
        begin = time.perf_counter()
        model.train_on_batch(x, y)
        seconds.append(round(time.perf_counter() - begin, 4))
        peaks.append(int(tf.config.experimental.get_memory_info("CPU:0")["peak"]))
    return {
        "peak_bytes": peaks,
        "step_seconds": seconds,
        "before_bytes": before,
        "weight_bytes": size_of(model.weights),
        "gradient_bytes": size_of(model.trainable_weights),
        "predicted": predicted,
        "load_average": round(os.getloadavg()[0], 1),
    }


def design() -> dict[str, Row]:
    """Return the rows of the main tables by key."""
    rows: dict[str, Row] = {}

    def add(model: str, mode: str, policy: str, segments: int | str | None) -> None:
        way = "plain" if segments is None else f"kerasmem/{segments}"
        row = {"model": model, "mode": mode, "policy": policy, "segments": segments}
        rows[f"{model}/{mode}/{policy}/{way}"] = row

    for model in ("dense", "resnet50", "transformer"):
        for mode in ("graph", "xla"):
            add(model, mode, "float32", None)
            add(model, mode, "float32", "auto")
    for count in (2, 4, 8, 16, 24, 49):
        add("dense", "graph", "float32", count)
    for segments in (None, "auto", 2, 4, 16, 49):
        add("dense", "graph", "mixed_bfloat16", segments)
    return rows


def run(row: Row, kernels: str | None = None) -> Row:
    """Measure a row in a new process. A failure is a result too."""
    environ = tensorflow_environ(onednn=None if kernels is None else kernels == "onednn")
    ended = run_python(__file__, "--child", json.dumps(row), environ=environ, timeout=TIMEOUT)
    if ended.code == 0:
        answer: Row = ended.answer
        return answer
    lines = [line.strip() for line in ended.error.splitlines() if "Error" in line]
    return {"error": (lines or [ended.error])[-1][:300]}


def summarise(rows: dict[str, Row]) -> dict[str, Row]:
    """Return each row against the plain one of its model, mode and policy."""
    summary = {}
    for key, row in rows.items():
        plain = rows.get("/".join([*key.split("/")[:3], "plain"]), row)
        if "error" in row or "error" in plain:
            continue
        peaks = [statistics.median(run["peak_bytes"]) for run in (row, plain)]
        above = [peak - run["before_bytes"] for peak, run in zip(peaks, (row, plain), strict=True)]
        held = [run["weight_bytes"] + run["gradient_bytes"] for run in (row, plain)]
        seconds = [statistics.median(run["step_seconds"]) for run in (row, plain)]
        summary[key] = {
            "peak": round(peaks[0] / peaks[1], 3),
            "above_start": round(above[0] / above[1], 3),
            "activations": round((peaks[0] - held[0]) / (peaks[1] - held[1]), 3),
            "step_time": round(seconds[0] / seconds[1], 3),
            "seconds": round(seconds[0], 2),
            "peak_mb": round(peaks[0] / 1e6, 1),
            "above_start_mb": round(above[0] / 1e6, 1),
            "predicted_mb": round(row["predicted"].get("activation_bytes", 0) / 1e6, 1) or None,
        }
    return summary


def on_curve(model: str, kind: str) -> Row:
    """Return the measured and planned share of activations that remains, beside 2 / √n."""
    common = {"model": model, "mode": "graph", "policy": "mixed_bfloat16" if model in MIXED else "float32"}
    plain, ours = (run({**common, "segments": segments}, kind) for segments in (None, "auto"))
    for row in (plain, ours):
        if "error" in row:
            return row
    # The gradients count: each is freed as soon as its weight is updated, so that they are never all there.
    active = [statistics.median(row["peak_bytes"]) - row["weight_bytes"] for row in (ours, plain)]
    planned, layers = ours["predicted"], plain["predicted"]["layers"]
    seconds = [statistics.median(row["step_seconds"]) for row in (ours, plain)]
    return {
        "layers": layers,
        "curve": round(2 / math.sqrt(layers), 3),
        "activations": round(active[0] / active[1], 3),
        "planned": round(planned["activation_bytes"] / planned["plain_activation_bytes"], 3),
        "extra_time": planned["extra_time"],
        "step_time": round(seconds[0] / seconds[1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", default="", help="measure rows or models whose name begins with TEXT again", metavar="TEXT")
    add("--again", type=int, default=0, metavar="ROUNDS", help="more rounds of the main rows. Defaults to 0")
    add("--curve", nargs="+", choices=KERNELS, help="measure the curve on these kernels instead of the rows")
    options = parser.parse_args()
    stored = read_results("recompute")
    if options.curve:
        for kind in options.curve:
            of_kind = stored.setdefault("curve", {}).setdefault(kind, {})
            for model in CURVE:
                if model.startswith(options.only) if options.only else model not in of_kind:
                    of_kind[model] = on_curve(model, kind)
                    print(kind, model, of_kind[model])
                    write_results("recompute", stored)
        return
    rows: dict[str, Row] = stored.setdefault("rows", {})
    chosen = {key: row for key, row in design().items() if key.startswith(options.only)}
    missing = [key for key in chosen if options.only or key not in rows]
    repeated = [key for key, row in chosen.items() if row["segments"] in (None, "auto")]
    for number, key in enumerate(missing + repeated * options.again):
        row = run(chosen[key])
        if number >= len(missing) and "error" not in row and "error" not in rows[key]:
            for name in ("peak_bytes", "step_seconds"):
                row[name] = [*rows[key][name], *row[name]]
        rows[key] = row
        stored["environment"] = environment("tensorflow", "keras", "numpy")
        stored["summary"] = summarise(rows)
        print(key, stored["summary"].get(key, row.get("error")))
        write_results("recompute", stored)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(json.loads(sys.argv[2]))))
    else:
        main()
