"""What `auto` says of the models of example_answers.py, and what their steps were measured to take: example_truth.json.

    python scripts/bench/example_truth.py                             # what has no row yet, on both kinds of kernels
    python scripts/bench/example_truth.py --only vae,hub/bert         # these again
    python scripts/bench/example_truth.py --kernels eigen --match loop/ --seconds 600
    python scripts/bench/example_truth.py --drawn 0-99                # models of these seeds (drawn_models.py), which
                                                                      # nobody has looked at: drawn_truth.json
    python scripts/bench/example_truth.py --drawn 0-99 --ask-again    # what was measured is kept

Each estimate and each run of steps is a process of its own, forked from one that has loaded TensorFlow. A step's batch
is zeros. The peak that is compared is the median of ten steps under TensorFlow's own BFC allocator, after a first one.
In graph mode identical steps differ, more so on a machine that does other work: `least` and `most` are of those ten.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from drawn_models import batch_size_of
from environment import RESULTS, environment, write_results
from example_answers import EXAMPLES, Example, answer, can_be_asked

NAME, OF_DRAWN = "example_truth", "drawn_truth"
STEPS = 10
TIMEOUT = 400.0
KERNELS = {"onednn": "1", "eigen": "0"}
CHILD = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPP_MIN_LOG_LEVEL": "3"}


def measured(name: str) -> dict[str, Any]:
    """Run steps of an example in this process and return the peaks of them."""
    from kerasmem.estimation.probe.worker import work
    from kerasmem.models.request import request_for

    example = EXAMPLES[name]
    with request_for(example.source, batch_size=example.batch, **example.options) as request:
        found = work({"request": request.to_dict(), "runs": [{"batch_size": example.batch, "steps": STEPS}]})
    peaks = found["runs"][0]["peaks"]
    return {"measured": int(statistics.median(peaks)), "least": min(peaks), "most": max(peaks)}


def one(name: str, functions: Sequence[Callable[[str], dict[str, Any]]]) -> dict[str, Any]:
    """Return the row of an example on the kernels that run here."""
    row: dict[str, Any] = {}
    for function in functions:
        # Forked between TensorFlow's import and its first operation, which is where it can be.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            try:
                row.update(pool.apply_async(function, (name,)).get(TIMEOUT))
            except Exception as error:
                return {**row, "error": f"{function.__name__}: {type(error).__name__}: {error}"[:500]}
    return {key: value for key, value in row.items() if key not in ("why", "optimizer", "unmodelled")}


def rows_here(names: list[str], ends: float, ask_alone: bool) -> None:
    """Print a row for each example, as a line of JSON."""
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401

    import kerasmem.estimation.probe.worker  # noqa: F401

    for name in names:
        if time.monotonic() < ends:
            load = {} if ask_alone else {"load": round(os.getloadavg()[0], 1)}
            row = one(name, (answer,) if ask_alone else (answer, measured))
            print(json.dumps({"name": name, **load, **row}), flush=True)


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return for each kind of kernels how far the estimates are off, and what is worst."""
    found = {}
    for kind in KERNELS:
        told = {name: row[kind] for name, row in rows.items() if "error_percent" in row.get(kind, {})}
        errors = sorted((abs(row["error_percent"]), name) for name, row in told.items())
        if errors:
            found[kind] = {
                "models": len(errors),
                "median_absolute_error_percent": round(statistics.median(each for each, _ in errors), 2),
                "p95_absolute_error_percent": errors[int(0.95 * (len(errors) - 1))][0],
                "most_covered_by_high": sum(row["high"] >= row["most"] for row in told.values()),
                "measured_within_interval": sum(row["low"] <= row["measured"] <= row["high"] for row in told.values()),
                "worst": {name: told[name]["error_percent"] for _, name in errors[::-1][:8]},
                "not_measured": {
                    name: row[kind]["error"] for name, row in rows.items() if "error" in row.get(kind, {})
                },
            }  # fmt: skip
    return found


def examples_of(seeds: str) -> dict[str, Example]:
    """Return the drawn models of seeds, as "0-99" says them."""
    first, _, last = seeds.partition("-")
    return {
        f"drawn/{seed}": Example("drawn_models.py", "drawn", batch_size_of(seed), {"factory_args": {"seed": seed}})
        for seed in range(int(first), int(last or first) + 1)
    }


def main() -> None:
    """Ask and measure, and write after each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of examples, with commas")
    parser.add_argument("--match", default="", help="those whose name has this in it")
    parser.add_argument("--drawn", default="", help="models of these seeds in place of examples: 0-99")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="onednn, eigen, or both with a comma")
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin none after so long")
    parser.add_argument(
        "--ask-again", action="store_true", help="estimate again what was measured, and measure nothing"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    if options.drawn:
        EXAMPLES.clear()
        EXAMPLES.update(examples_of(options.drawn))
    if options.child:
        rows_here(options.only.split(","), ends, options.ask_again)
        return
    name_of_results = OF_DRAWN if options.drawn else NAME
    path = RESULTS / f"{name_of_results}.json"
    rows: dict[str, dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else {}
    for kind in options.kernels.split(","):
        wanted = [name for name in EXAMPLES if options.match in name and can_be_asked(name)]
        if options.only:
            wanted = options.only.split(",")
        elif not options.ask_again:
            wanted = [name for name in wanted if kind not in rows.get(name, {})]
        if options.ask_again:
            wanted = [name for name in wanted if "measured" in rows.get(name, {}).get(kind, {})]
        if not wanted:
            continue
        command = [sys.executable, __file__, "--child", "--only", ",".join(wanted), "--drawn", options.drawn]
        command += ["--seconds", str(max(ends - time.monotonic(), 0.0)), *["--ask-again"] * options.ask_again]
        variables = {**os.environ, **CHILD, "TF_ENABLE_ONEDNN_OPTS": KERNELS[kind]}
        with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout or ():
                if not line.startswith("{"):
                    continue
                row = json.loads(line)
                name = row.pop("name")
                if options.ask_again:
                    row |= {key: rows[name][kind][key] for key in ("load", "measured", "least", "most")}
                if "error" not in row:
                    row["error_percent"] = round(100 * (row["total"] / row["measured"] - 1), 2)
                rows.setdefault(name, {})[kind] = row
                print(kind, name, row.get("error_percent", row.get("error")), flush=True)
                kept = rows if options.drawn else {each: rows[each] for each in EXAMPLES if each in rows}
                write_results(name_of_results, {"environment": environment("keras", "tensorflow"),
                                                "summary": summary(kept), "rows": kept})  # fmt: skip


if __name__ == "__main__":
    main()
