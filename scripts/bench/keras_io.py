#!/usr/bin/env python3
"""Compare estimates of the examples of keras.io with the memory that their training takes.

    python scripts/bench/keras_io.py --source FOLDER [--examples PATTERN …] [--only PART …] [--refresh PART …]
                                     [--kernels onednn,eigen] [--summary]

FOLDER is `examples/` of a checkout of GitHub's keras-team/keras-io; the examples that are run and their data stand in
keras_io.toml. Each part of an example runs in a process of its own, which executes the statements that the call of
`fit` needs and stops at that call:

- truth: `fit` on 15 batches of the data under the real BFC allocator on the CPU; the peak in use of the last 12 steps,
  without tensors and variables that are not the model's. Two processes do so, because the same step differs between
  processes. The batches are drawn before: the buffers of a data pipeline are host memory.
- estimate: by method "graph" from the live model and what the example passes to `fit`.

Results are stored in results/keras_io.json as they are measured, and stored parts are not measured again without
`--refresh`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tomllib
from common import MIB, environment, read_results, write_results
from estimates import KERNELS, in_a_process

HERE = Path(__file__).resolve().parent
CHILD = HERE / "keras_io_child.py"
PARTS = ("truth", "estimate")
PROCESSES = 2  # that measure a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--source", type=Path, required=True, metavar="FOLDER", help="folder of the examples")
    add("--examples", nargs="+", default=["*"], metavar="PATTERN", help="examples to run. Defaults to all")
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="run these parts. Defaults to both")
    add("--refresh", nargs="+", choices=PARTS, default=[], help="run stored parts again")
    add("--kernels", default=KERNELS[0], help="onednn, eigen or onednn,eigen. Defaults to onednn")
    add("--summary", action="store_true", help="only summarise the stored results")
    options = parser.parse_args()
    listed = tomllib.loads((HERE / "keras_io.toml").read_text())
    try:
        for file, entry in [] if options.summary else listed.items():
            if any(fnmatch.fnmatch(file, f"*{pattern}*") for pattern in options.examples):
                for kernels in options.kernels.split(","):
                    for part in options.only:
                        run(part, file, entry | {"path": str((options.source / file).resolve())}, kernels, options)
    except KeyboardInterrupt:
        print("stopped; finished parts are stored", file=sys.stderr)
    store({})
    print(json.dumps(read_results("keras_io")["summary"], indent=1))


def run(part: str, file: str, entry: dict[str, Any], kernels: str, options: argparse.Namespace) -> None:
    """Run and store one part of an example, unless it is stored."""
    stored = read_results("keras_io").get("examples", {}).get(file, {})
    if "error" not in stored.get(kernels, {}).get(part, {"error": None}) and part not in options.refresh:
        return
    repeats = PROCESSES if part == "truth" else 1
    answers = [in_a_process(part, entry | {"kernels": kernels}, child=CHILD) for _ in range(repeats)]
    answer = next((answer for answer in answers if "error" in answer), answers[0])
    facts = {"changed": entry["changed"]} if "changed" in entry else {}
    if "peak_bytes" in answer:
        facts["features"] = answer["features"]
        answer = answer | joined(answers)
        del answer["features"], answer["peak_bytes"]
    value = {**stored.get(kernels, {}), part: answer}
    store({file: {**stored, **facts, kernels: value}})
    size = answer.get("median", answer.get("total"))
    text = f"{size / MIB:.1f} MiB" if size else answer.get("refusal", answer.get("error"))
    if size and (error := error_percent(value)) is not None:
        text += f" ({error:+.1f} %)"
    print(f"{time.strftime('%H:%M:%S')} {part:8} {kernels:6} {file:50} {text}", file=sys.stderr, flush=True)


def joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the peaks of all processes, without what is not the model's."""
    peaks = [peak - answer["other_bytes"] for answer in answers for peak in answer["peak_bytes"]]
    loads = [answer["load_average"] for answer in answers]
    return {
        "median": statistics.median(peaks), "min": min(peaks), "max": max(peaks), "load_average": max(loads),
        "medians": [statistics.median(answer["peak_bytes"]) - answer["other_bytes"] for answer in answers],
    }  # fmt: skip


def store(examples: dict[str, Any]) -> None:
    """Store examples and the summary of all."""
    stored = read_results("keras_io").get("examples", {}) | examples
    stored = dict(sorted(stored.items()))
    here = environment("tensorflow", "keras", "numpy")
    summary = {kernels: summarise(stored, kernels) for kernels in KERNELS}
    data = {"license": "Apache-2.0", "machine": here, "summary": summary, "examples": stored}
    write_results("keras_io", data)


def error_percent(value: dict[str, Any]) -> float | None:
    """Return the error of an estimate against the median step, or None if one of them is missing."""
    total, median = value.get("estimate", {}).get("total"), value.get("truth", {}).get("median")
    return 100 * (total / median - 1) if total and median else None


def summarise(examples: dict[str, Any], kernels: str) -> dict[str, Any]:
    """Return the figures of the examples measured on one kind of CPU kernels."""
    values = {
        file: example[kernels]
        for file, example in examples.items()
        if "median" in example.get(kernels, {}).get("truth", {})
    }
    estimated = {file: value for file, value in values.items() if "estimate" in value}
    errors = {file: error for file, value in estimated.items() if (error := error_percent(value)) is not None}
    if not errors:
        return {"examples": len(values), "estimated": len(estimated), "answered": 0}
    by_graph = [file for file in errors if estimated[file]["estimate"]["method"] == "graph"]
    sizes = [abs(error) for error in errors.values()]
    outside = [file for file in errors if not covers(estimated[file])]
    above = [file for file in errors if estimated[file]["truth"]["max"] > estimated[file]["estimate"]["high"]]
    worst = sorted(errors, key=lambda file: -abs(errors[file]))[:8]
    return {
        "examples": len(values),
        "estimated": len(estimated),
        "answered": len(by_graph),
        "refused": sorted(set(estimated) - set(errors)),
        "median_absolute_error_percent": round(statistics.median(sizes), 2),
        "p95_absolute_error_percent": round(float(np.percentile(sizes, 95)), 2),
        "covered_percent": round(100 * (1 - len(outside) / len(errors)), 1),
        "largest_within_high_percent": round(100 * (1 - len(above) / len(errors)), 1),
        "steps_outside_interval": outside,
        "worst": {file: round(errors[file], 2) for file in worst},
    }


def covers(value: dict[str, Any]) -> bool:
    """Return whether all measured steps lie in the estimate's interval."""
    truth, made = value["truth"], value["estimate"]
    return bool(made["low"] <= truth["min"] and truth["max"] <= made["high"])


if __name__ == "__main__":
    main()
