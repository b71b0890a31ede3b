#!/usr/bin/env python3
"""Compare estimates of Keras on JAX with real steps on the CPU.

    python scripts/bench/jax_estimates.py [--only NAME] [--steps 5]

The estimate is XLA's plan of the step that Keras's trainer compiles; the measurement is the median of
`kerasmem.measure`. JAX counts nothing on a CPU, so a process that really trains reports how much resident memory rose
during a step, above the live arrays before it. Kernel scratch of 64 KiB and more is included, machine code loaded in
the first step is not.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.update(KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")

from common import environment, write_results

ZOO = Path(__file__).with_name("zoo.py")
# model, batch size, optimizer, dtype policy, mode
ROWS = (
    ("mnist_cnn", 128, "adam", "float32", "train"),
    ("wide_mlp", 128, "sgd", "float32", "train"),
    ("deep_mlp", 1024, "adamw", "float32", "train"),
    ("unet", 16, "adam", "float32", "train"),
    ("unet", 16, "adam", "mixed_bfloat16", "train"),
    ("transformer", 32, "adamw", "float32", "train"),
    ("text_classifier", 64, "rmsprop", "float32", "train"),
    ("bidirectional", 64, "adam", "float32", "train"),
    ("conv3d", 16, "sgd", "float32", "train"),
    ("keras.applications:MobileNetV2", 16, "adam", "float32", "train"),
    ("keras.applications:MobileNetV2", 32, "adam", "float32", "inference"),
    ("wavenet", 16, "adam", "float32", "train"),
    ("decoder", 8, "adamw", "float32", "train"),
    ("vision_transformer", 32, "lion", "float32", "train"),
    ("mixer", 64, "sgd", "mixed_bfloat16", "train"),
    ("autoencoder", 32, "adam", "float32", "evaluate"),
    ("keras.applications:ResNet50", 8, "adam", "float32", "train"),
    ("siamese", 32, "adam", "float32", "train"),
    ("keras.applications:VGG16", 4, "sgd", "float32", "inference"),
)


def measure(model: str, batch: int, optimizer: str, policy: str, mode: str, steps: int) -> dict[str, Any]:
    import kerasmem

    source = model if ":" in model else f"{ZOO}:{model}"
    settings = {"batch_size": batch, "optimizer": optimizer, "dtype_policy": policy, "mode": mode}
    estimate = kerasmem.estimate(source, **settings).bytes
    measured = kerasmem.measure(source, steps=steps, **settings).bytes
    return {
        "model": model, **settings,
        "estimated": estimate.total, "low": estimate.low, "high": estimate.high,
        "measured": measured.total, "least": measured.low, "most": measured.high,
    }  # fmt: skip


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors in percent, and how many largest steps `high` covers."""
    errors = [100 * abs(row["estimated"] / row["measured"] - 1) for row in rows]
    return {
        "rows": len(rows),
        "median_absolute_error_percent": round(statistics.median(errors), 2),
        "worst_percent": round(max(errors), 2),
        "maximum_within_high": sum(row["most"] <= row["high"] for row in rows),
        "median_high_to_measured": round(statistics.median(row["high"] / row["measured"] for row in rows), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose model contains this; nothing is written")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    options = parser.parse_args()
    rows = []
    for row in ROWS:
        if options.only in row[0]:
            rows.append(measure(*row, options.steps))
            print(rows[-1], flush=True)
    summary = summarise(rows)
    print(summary)
    if not options.only:
        data = {"environment": environment("keras", "jax", "jaxlib"), "summary": summary, "rows": rows}
        write_results("jax_estimates", data)


if __name__ == "__main__":
    main()
