"""Recomputation: what it saves and what it costs, measured, with what was predicted and its rivals beside it.

    python scripts/bench/recompute.py [--quick] [--only dense/graph] [--restart] [--again 2]

Each row runs in a process of its own with the real BFC allocator and is saved when it is done, so that a run that was
stopped goes on where it was. One process is up to a fifth faster than the next: with `--again` the plain models and the
plans that `auto` chose take turns for so many more rounds, and a row's figures are the medians over all. In
results/recompute.json, `activations` is the peak less weights, optimizer and gradients; `above_start` is the peak less
what was in memory before the step. The optimizer, SGD, has no slots.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environment import RESULTS, environment, write_results

CHILD = Path(__file__).with_name("recompute_child.py")
SWEEP = [2, 4, 8, 16, 24, 49]
BAD_CUT = [
    "dense_0",
    "dense_1",
    "dense_2",
]  # three short segments at the front, and all the rest kept
TIMEOUT = 600
# Architectures that are compared with the curve of Chen et al.: of n layers that keep as much each, 2 √n are kept.
CURVE = (  # the slowest last
    "deep_mlp", "encoder_in_model", "decoder", "mixer", "vision_transformer", "residual_wavenet", "stacked_lstm",
    "transformer", "very_deep", "resnet50", "transfer", "wavenet", "unet", "conv3d", "vgg16", "mobilenet_v2",
    "xception", "convnext_tiny", "efficientnet_b0", "dense", "densenet121",
)  # fmt: skip
MIXED = frozenset(("decoder", "encoder_in_model", "mixer"))  # in mixed_bfloat16
KERNELS = {"onednn": "1", "eigen": "0"}


def design(quick: bool) -> list[dict[str, Any]]:
    """Return the rows to measure."""

    def row(
        model: str,
        mode: str,
        way: str,
        segments: Any = None,
        policy: str = "float32",
        steps: int = 3,
    ) -> dict[str, Any]:
        return {
            "model": model,
            "mode": mode,
            "way": way,
            "segments": segments,
            "policy": policy,
            "steps": steps,
        }

    if quick:
        return [row("small", "graph", "plain"), row("small", "graph", "kerasmem", 3)]
    rows = []
    for model in ("dense", "resnet50", "transformer"):
        for mode in ("graph", "xla"):
            rows += [
                row(model, mode, "plain"),
                row(model, mode, "kerasmem", "auto"),
            ]
        rows.append(row(model, "graph", "RematScope"))
    rows += [row("dense", "graph", "recompute_grad")]
    rows += [row("dense", "xla", "RematScope")]
    rows += [row("dense", "graph", "kerasmem", count) for count in SWEEP]
    rows += [row("dense", "graph", "kerasmem bad cut", BAD_CUT)]
    rows += [row("dense", "graph", "plain", policy="mixed_bfloat16")]
    rows += [row("dense", "graph", "kerasmem", count, "mixed_bfloat16") for count in ("auto", 2, 4, 16, 49)]
    return rows


def key_of(row: dict[str, Any]) -> str:
    """Return the row's name."""
    segments = (
        "" if row["segments"] is None else f"/{row['segments'] if not isinstance(row['segments'], list) else 'bad'}"
    )
    return f"{row['model']}/{row['mode']}/{row['policy']}/{row['way']}{segments}"


def run(row: dict[str, Any], **variables: str) -> dict[str, Any]:
    """Measure a row in a fresh process; a failure is a result too."""
    process = {
        **os.environ,
        **variables,
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, str(CHILD), json.dumps(row)]
    try:
        done = subprocess.run(
            command,
            env=process,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {TIMEOUT} s"}
    if done.returncode:
        lines = [each.strip() for each in done.stderr.splitlines() if "Error" in each]
        return {"error": lines[-1][:300] if lines else f"exit {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def pooled(row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return a row with what another process measured for it."""
    if "error" in row or "error" in found:
        return found if "error" in row else row
    peaks, seconds = ([*row[name], *found[name]] for name in ("peak_bytes", "step_seconds"))
    return {
        **row,
        "peak_bytes": peaks,
        "step_seconds": seconds,
        "median_peak_bytes": statistics.median(peaks),
        "median_step_seconds": statistics.median(seconds),
        "load_average": max(row["load_average"], found["load_average"]),
    }


def summarise(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return each row against the plain one of its model, mode and policy."""
    summary = {}
    for key, row in rows.items():
        plain = rows.get("/".join([*key.split("/")[:3], "plain"]))
        if plain is None or "error" in row or "error" in plain:
            continue
        above = [each["median_peak_bytes"] - each["before_bytes"] for each in (row, plain)]
        active = [each["median_peak_bytes"] - each["weight_bytes"] - each["gradient_bytes"] for each in (row, plain)]
        summary[key] = {
            "peak": round(row["median_peak_bytes"] / plain["median_peak_bytes"], 3),
            "above_start": round(above[0] / above[1], 3),
            "activations": round(active[0] / active[1], 3),
            "step_time": round(row["median_step_seconds"] / plain["median_step_seconds"], 3),
            "peak_mb": round(row["median_peak_bytes"] / 1e6, 1),
            "above_start_mb": round(above[0] / 1e6, 1),
            "predicted_mb": round(row["predicted"].get("activation_bytes", 0) / 1e6, 1) or None,
        }
    return summary


def curve(kinds: list[str], only: str, restart: bool, rows: dict[str, Any], save: Callable[[], None]) -> None:
    """Measure the peaks of the architectures on each kind of CPU kernels.

    Args:
        kinds: of kernels.
        only: models whose name begins so.
        restart: whether what is there is measured again.
        rows: to add to, by kind and architecture.
        save: called after each.
    """
    for model, kind in itertools.product(CURVE, kinds):
        policy = "mixed_bfloat16" if model in MIXED else "float32"
        common = {"model": model, "mode": "graph", "policy": policy, "steps": 3}
        of_kind = rows.setdefault(kind, {})
        if (model in of_kind and not restart) or not model.startswith(only):
            continue
        ways = [
            run({**common, "way": way, "segments": segments, "levels": levels}, TF_ENABLE_ONEDNN_OPTS=KERNELS[kind])
            for way, segments, levels in (("plain", None, 1), ("kerasmem", "auto", 1), ("kerasmem", "auto", 2))
        ]
        of_kind[model] = on_curve(*ways)
        print(kind, model, of_kind[model], file=sys.stderr)
        save()


def on_curve(plain: dict[str, Any], ours: dict[str, Any], twice: dict[str, Any]) -> dict[str, Any]:
    """Return how much of the activations' peak is left beside what the curve promises.

    Args:
        plain: what was measured of the model as it is.
        ours: of the recomputed one.
        twice: of the one whose segments are cut themselves while they run again.
    """
    errors = [each["error"] for each in (plain, ours, twice) if "error" in each]
    if errors:
        return {"error": errors[0]}
    planned = ours["predicted"]
    promised, of_keeping = (min(1.0, 2 / math.sqrt(planned[each])) for each in ("layers", "keeping_layers"))
    return {
        "layers": planned["layers"],
        "keeping_layers": planned["keeping_layers"],
        "one_layer": round(planned["one_layer_bytes"] / planned["plain_activation_bytes"], 3),
        "curve": round(promised, 3),
        "curve_of_keeping": round(of_keeping, 3),
        "plain_peak_bytes": plain["median_peak_bytes"],
        "load_average": round(os.getloadavg()[0], 1),
        **left(plain, ours, promised, of_keeping),
        "two_levels": left(plain, twice, promised, of_keeping),
    }


def left(plain: dict[str, Any], ours: dict[str, Any], promised: float, of_keeping: float) -> dict[str, Any]:
    """Return what a recomputed model leaves of the activations, measured and planned, and what that costs."""
    # The gradients count: each is gone as soon as its weight is updated, so that they are never all there.
    active = [each["median_peak_bytes"] - each["weight_bytes"] for each in (ours, plain)]
    planned = ours["predicted"]
    share = active[0] / active[1]
    return {
        "segments": planned["segments"],
        "peak_bytes": ours["median_peak_bytes"],
        "planned_bytes": planned["activation_bytes"],
        "asked_bytes": ours["asked_bytes"],
        "activations": round(share, 3),
        "planned": round(planned["activation_bytes"] / planned["plain_activation_bytes"], 3),
        "asked": round(ours["asked_bytes"] / plain["asked_bytes"], 3),
        "extra_time": planned["extra_time"],
        "step_time": round(ours["median_step_seconds"] / plain["median_step_seconds"], 2),
        "is_on_it": share <= promised,
        "is_on_that_of_keeping": share <= of_keeping,
    }


def main() -> None:
    """Measure what is missing and write the results after each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two small rows")
    parser.add_argument("--only", default="", help="rows, or models of the curve, whose name begins so")
    parser.add_argument("--restart", action="store_true", help="measure again what is there")
    parser.add_argument("--curve", nargs="+", choices=KERNELS, help="the peaks of many architectures on these kernels")
    parser.add_argument("--again", type=int, default=0, metavar="ROUNDS", help="more rounds of the main rows")
    options = parser.parse_args()
    name = "recompute_quick" if options.quick else "recompute"
    path = RESULTS / f"{name}.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if options.curve:
        found = kept.setdefault("curve", {})
        curve(options.curve, options.only, options.restart, found, lambda: write_results(name, kept))
        return
    rows: dict[str, dict[str, Any]] = kept.get("rows", {})
    asked = [row for row in design(options.quick) if key_of(row).startswith(options.only)]
    first = [row for row in asked if options.restart or key_of(row) not in rows]
    again = [row for row in asked if row["way"] == "plain" or row["segments"] == "auto"]
    for number, row in enumerate(first + again * options.again):
        key = key_of(row)
        found = {**run(row), "load_average": round(os.getloadavg()[0], 1)}
        rows[key] = found if number < len(first) else pooled(rows[key], found)
        machine = environment("tensorflow", "keras", "numpy")
        write_results(name, {**kept, "environment": machine, "summary": summarise(rows), "rows": rows})
        print(key, summarise(rows).get(key, rows[key].get("error")), file=sys.stderr)
    print(json.dumps(summarise(rows), indent=1))


if __name__ == "__main__":
    main()
