#!/usr/bin/env python3
"""`kerasmem estimate` on Keras's JAX backend against real steps: each model in processes of its own.

    python scripts/bench/jax_estimates.py [--only NAME] [--steps 5]
    python scripts/bench/jax_estimates.py --keep-measured     # estimates again; measures new rows alone

The estimate is what `method="auto"` says: XLA's plan of the step that Keras's trainer compiles, its state donated. The
measurement is `kerasmem.measure`, the median of its steps. JAX counts nothing on a CPU, so a process that really trains
says how much more it came to hold while a step ran: live arrays before the step, plus what the kernel's high-water mark
of resident memory rose by from its reset to the step's end. glibc is told to take blocks from 64 KiB on straight from
the kernel and to give them back at once. So kernels' scratch counts where it is 64 KiB and more, machine code that was
loaded in the first step does not, and pages of a buffer that a step never writes do not either.

The rows were chosen before any of them was run. Those marked "held out" were run only after the last change to the
estimator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
SETTINGS = ("model", "batch_size", "optimizer", "dtype_policy", "mode")
# (model, batch, optimizer, dtype policy, mode, held out)
ROWS: tuple[tuple[str, int, str, str, str, bool], ...] = (
    ("zoo.py:mnist_cnn", 128, "adam", "float32", "train", False),
    ("zoo.py:wide_mlp", 128, "sgd", "float32", "train", False),
    ("zoo.py:deep_mlp", 1024, "adamw", "float32", "train", False),
    ("zoo.py:unet", 16, "adam", "float32", "train", False),
    ("zoo.py:unet", 16, "adam", "mixed_bfloat16", "train", False),
    ("zoo.py:transformer", 32, "adamw", "float32", "train", False),
    ("zoo.py:transformer", 32, "adam", "mixed_float16", "train", False),
    ("zoo.py:text_classifier", 64, "rmsprop", "float32", "train", False),
    ("zoo.py:bidirectional", 64, "adam", "float32", "train", False),
    ("zoo.py:conv3d", 16, "sgd", "float32", "train", False),
    ("keras.applications:MobileNetV2", 16, "adam", "float32", "train", False),
    ("keras.applications:MobileNetV2", 32, "adam", "float32", "inference", False),
    ("zoo.py:wavenet", 16, "adam", "float32", "train", False),
    ("zoo.py:decoder", 8, "adamw", "float32", "train", False),
    ("zoo.py:vision_transformer", 32, "lion", "float32", "train", False),
    ("zoo.py:mixer", 64, "sgd", "mixed_bfloat16", "train", False),
    ("zoo.py:separable", 64, "adam", "float32", "train", False),
    ("zoo.py:autoencoder", 32, "adam", "float32", "evaluate", False),
    ("zoo_language.py:miniature_gpt", 16, "adam", "float32", "train", False),
    ("keras.applications:ResNet50", 8, "adam", "float32", "train", False),
    ("zoo.py:siamese", 32, "adam", "float32", "train", True),
    ("keras.applications:VGG16", 4, "sgd", "float32", "inference", True),
    ("zoo_vision.py:convmixer", 16, "adam", "float32", "evaluate", True),
)


def row(
    model: str, batch: int, optimizer: str, policy: str, mode: str, held_out: bool, steps: int, before: Row | None
) -> Row:
    """Return one row: estimate, measurement (or the one before) and their ratio."""
    import kerasmem

    name = model if model.startswith("keras.") else f"{HERE}/{model}"
    settings = {"batch_size": batch, "optimizer": optimizer, "dtype_policy": policy, "mode": mode}
    found = kerasmem.estimate(name, **settings)
    measured = before and {name: before[name] for name in ("measured", "least", "most")}
    if measured is None:
        really = kerasmem.measure(name, steps=steps, **settings).bytes
        measured = {"measured": really.total, "least": really.low, "most": really.high}
    return {
        "model": model, **settings, "held_out": held_out,
        "estimated": found.bytes.total, "claimed": [found.bytes.low, found.bytes.high],
        "planned": None if found.pool is None else found.pool.requested,
        "formula": found.formula.total_bytes,
        **measured,
        "ratio": round(found.bytes.total / measured["measured"], 4),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median, the 95th percentile and the worst error of some rows in per cent, and how many are claimed."""
    errors = sorted(abs(each["ratio"] - 1) * 100 for each in rows)
    return {
        "rows": len(rows),
        "median_absolute_error_percent": round(statistics.median(errors), 2),
        "p95_absolute_error_percent": round(errors[min(len(errors) - 1, int(0.95 * len(errors)))], 2),
        "worst_percent": round(errors[-1], 2),
        "most_within_high": sum(each["most"] <= each["claimed"][1] for each in rows),
        "median_high_to_measured": round(statistics.median(each["claimed"][1] / each["measured"] for each in rows), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="rows whose model has this in its name; writes nothing")
    parser.add_argument("--steps", type=int, default=5, help="steps that are measured")
    parser.add_argument("--keep-measured", action="store_true", help="measure only what has no measurement yet")
    arguments = parser.parse_args()
    os.environ.update(KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
    sys.path.insert(0, str(HERE.parent.parent))
    from environment import RESULTS, environment, write_results

    from kerasmem.errors import KerasmemError

    rows, failed, before = [], [], {}
    if arguments.keep_measured:
        kept = json.loads((RESULTS / "jax_estimates.json").read_text())
        before = {tuple(each[name] for name in SETTINGS): each for each in kept["rows"]}
        failed = kept["failed"]
    without = {each["model"] for each in failed}
    for each in ROWS:
        if arguments.only is not None and arguments.only not in each[0]:
            continue
        if each[0] in without and each[:5] not in before:
            continue
        try:
            found = row(*each, arguments.steps, before.get(each[:5]))
        except KerasmemError as error:
            failed.append({"model": each[0], "reason": str(error).replace(f"{HERE}/", "")})
            print(each[0], error, file=sys.stderr, flush=True)
            continue
        rows.append(found)
        kind = f"{found['model']:34} {found['optimizer']:8} {found['dtype_policy']:15} {found['mode']:9}"
        sizes = f"{found['estimated']:13,} {found['measured']:13,} {found['ratio']:.3f}"
        print(kind, sizes, file=sys.stderr, flush=True)
    held_out = [each for each in rows if each["held_out"]]
    data = {
        "environment": environment("keras", "jax", "jaxlib"),
        "summary": {"all": summary(rows), **({"held_out": summary(held_out)} if held_out else {})},
        "rows": rows,
        "failed": failed,
    }
    print(json.dumps(data["summary"], indent=1))
    if arguments.only is None:
        write_results("jax_estimates", data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
