#!/usr/bin/env python3
"""The probe (steps at small batches, replayed at a large one) against real steps at the large batch.

    python scripts/bench/probe.py [MODEL …] [--repeats 3] [--steps 10] [--keep]

For each model the probe runs three small batches (at most 16, 32 and 48) in one process; the target batch runs in
fresh processes. `error` is the probe's total over the median of those processes' medians; `covered` says whether that
lies within the probe's range, `measured` the medians, `least` and `most` the extremes of single steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from environment import RESULTS, ROOT, environment, write_results

sys.path.insert(0, str(ROOT))

# model, optimizer, whether XLA compiles the step, target batch
ROWS = (
    ("mnist_cnn", "adam", False, 128),
    ("mnist_cnn", "sgd", False, 128),
    ("wide_mlp", "adam", False, 256),
    ("deep_mlp", "adam", False, 512),
    ("transformer", "adam", False, 64),
    ("lstm", "adam", False, 128),
    ("vgg16", "sgd", False, 64),
    ("unet", "adam", False, 64),
    ("mnist_cnn", "adam", True, 128),
    ("mobilenet_v2", "adam", False, 64),
    ("siamese", "adam", False, 128),
    ("transformer", "adam", True, 64),
    ("resnet50", "adam", False, 48),
    ("text_classifier", "adam", False, 256),
    ("conv3d", "sgd", False, 48),
    ("wavenet", "sgd", False, 64),
    ("efficientnet_b0", "sgd", False, 48),
)


def build(name: str) -> Any:
    """Return a model of the zoo; the processes call it."""
    from zoo import MODELS

    return MODELS[name][0]()


def row(name: str, optimizer: str, jit: bool, target: int, repeats: int, steps: int) -> dict[str, Any]:
    """Probe and measure one model."""
    from kerasmem.errors import KerasmemError
    from kerasmem.estimation.probe.probing import probe
    from kerasmem.estimation.probe.running import run_steps
    from kerasmem.models.request import ModelRequest

    request = ModelRequest(
        source=f"{Path(__file__).resolve()}:build", factory_args={"name": name}, optimizer=optimizer,
        loss="sparse_categorical_crossentropy", batch_size=target, jit_compile=jit,
    )  # fmt: skip
    runs = [run_steps(request, [(target, steps)]).runs[0] for _ in range(repeats)]
    medians = [int(statistics.median(run.peaks)) for run in runs]
    measured = int(statistics.median(medians))
    found: dict[str, Any] = {
        "model": name,
        "optimizer": optimizer,
        "jit_compile": jit,
        "batch_size": target,
        "measured_bytes": measured,
        "measured": medians,
        "least": min(min(run.peaks) for run in runs),
        "most": max(max(run.peaks) for run in runs),
    }
    begin = time.monotonic()
    try:
        probed = probe(request)
    except KerasmemError as error:
        return {**found, "refused": str(error).replace(f"{Path(__file__).resolve().parent}/", "")}
    said = probed.outcome
    return {
        **found,
        "points": probed.points,
        "total": said.total,
        "low": said.low,
        "high": said.high,
        "requested": said.pool.requested,
        "reserved": said.pool.reserved,
        "smallest_limit": said.pool.smallest_limit,
        "error_percent": round(100 * (said.total / measured - 1), 2),
        "covered": said.low <= measured <= said.high,
        "seconds": round(time.monotonic() - begin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--repeats", type=int, default=3, help="processes at the target batch")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--keep", action="store_true", help="keep the rows that the results have")
    options = parser.parse_args()
    path = RESULTS / "probe.json"
    rows = json.loads(path.read_text())["rows"] if options.keep and path.exists() else []
    for each in ROWS:
        done = any((old["model"], old["optimizer"], old["jit_compile"]) == each[:3] for old in rows)
        if (options.models and each[0] not in options.models) or done:
            continue
        rows.append(row(*each, options.repeats, options.steps))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if not options.models:
            save(rows, options)


def save(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write the rows so far."""
    errors = sorted(abs(each["error_percent"]) for each in rows if "error_percent" in each)
    summary = {
        "rows": len(rows),
        "refused": sum("refused" in each for each in rows),
        "median_error_percent": statistics.median(errors) if errors else None,
        "worst_error_percent": errors[-1] if errors else None,
        "covered": sum(each.get("covered", False) for each in rows),
    }
    settings = {"repeats": options.repeats, "steps": options.steps}
    versions = environment("tensorflow", "keras")
    write_results("probe", {"environment": versions, "settings": settings, "summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
