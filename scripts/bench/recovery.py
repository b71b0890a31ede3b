#!/usr/bin/env python3
"""Measure overhead and reliability of `kerasmem.fit`: killed runs and runs out of memory.

    python scripts/bench/recovery.py [--pairs 10] [--kills 100] [--cases 200] [--first 200] [--only PART …]

On the CPU, under TensorFlow's BFC allocator and with TF_ENABLE_ONEDNN_OPTS=0, since with oneDNN a failed step ends the
process. `tests/training/fitted.py` runs the killed fits, `recovery_cases.py` those that run out of memory.

- overhead: the same epoch by `model.fit` and by `kerasmem.fit`, in turns.
- kills: runs killed at random moments and started again, compared with a run that was not; a fifth of them also with
  Keras's `BackupAndRestore`.
- cases: seeded runs under limits that they exceed, each beside the same run with enough memory.
- cases_onednn: the first of them with oneDNN's kernels, each step in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, answer_of, environment, read_results, tensorflow_environ, write_results

CASES = Path(__file__).with_name("recovery_cases.py")
FITTED = ROOT / "tests" / "training" / "fitted.py"
ENVIRON = tensorflow_environ(onednn=False)
EVERY, BATCHES, CHUNK = 4, 16, 10  # batches between two checkpoints, batches of an epoch, kills a process
ONEDNN_CASES, BESIDE = 20, 4  # cases at once
Results = dict[str, Any]
Save = Callable[[Results], None]


def overhead(pairs: int) -> Results:
    """Return the overhead of `kerasmem.fit` for two models. Runs in a new process."""
    import keras
    import numpy as np
    import zoo

    import kerasmem

    dense = [keras.layers.Dense(units, "relu" if units > 10 else None) for units in (1024, 1024, 1024, 1024, 10)]
    models = {
        "small CNN, batches of 64": (zoo.small_cnn(), 64, 100),
        "MLP of 3.4 M parameters, batches of 256": (keras.Sequential([keras.Input((256,)), *dense]), 256, 40),
    }
    results = {}
    for name, (model, batch, steps) in models.items():
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        random = np.random.default_rng(0)
        x, y = random.random((batch * steps, *model.input_shape[1:]), "float32"), random.integers(0, 10, batch * steps)
        ways = {"plain": model.fit, "kerasmem": lambda *args, model=model, **kw: kerasmem.fit(model, *args, **kw)}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(pairs + 1):  # the first warms up
            for way in list(ways) if turn % 2 else list(ways)[::-1]:
                start = time.perf_counter()
                ways[way](x, y, batch_size=batch, verbose=0)
                if turn:
                    times[way].append(time.perf_counter() - start)
        shares = [ours / plain for plain, ours in zip(times["plain"], times["kerasmem"], strict=True)]
        results[name] = {
            "step_milliseconds": round(statistics.median(times["plain"]) / steps * 1e3, 3),
            "overhead_share": round(statistics.median(shares) - 1, 4),
        }
    return results


def kills(count: int, results: Results, save: Save) -> None:
    """Kill runs until `count` are stored, and save after each chunk."""
    import numpy as np

    draw = np.random.default_rng(11)
    moments = [(int(draw.integers(1, 2 * BATCHES)), float(draw.uniform(0.001, 0.05))) for _ in range(count)]
    rows = results.get("rows", [])
    while len(rows) < count:
        rows = [*rows, *_killed(moments[len(rows) : len(rows) + CHUNK])]
        killed = [row for row in rows if not row["ended_first"]]
        theirs = [row["backup_and_restore"] for row in killed if "backup_and_restore" in row]
        save({
            "every": EVERY,
            "kills": len(killed),
            "bit_equal": sum(row["bit_equal"] for row in killed),
            "most_batches_lost": max((row["batches_lost"] for row in killed), default=0),
            "backup_and_restore": {"kills": len(theirs), "bit_equal": sum(row["bit_equal"] for row in theirs)},
            "rows": rows,
        })  # fmt: skip


def _killed(moments: list[tuple[int, float]]) -> list[Results]:
    """Kill runs at moments (batch, seconds after it), start them again, and return the outcomes."""
    common = {"model": "small", "rows": 1000, "size": 64}
    runs: list[Results] = [
        {"name": "whole", **common, "fit": {"checkpoint": "whole.ckpt", "save_freq": EVERY}},
        {"name": "whole, plain", "plain": True, **common},
    ]
    for number, (batch, delay) in enumerate(moments):
        ours = {**common, "fit": {"checkpoint": f"{number}.ckpt", "save_freq": EVERY}}
        theirs = {**common, "plain": True, "backup": [f"backup{number}", EVERY]}
        for name, way in [(f"{number}", ours), (f"{number}, plain", theirs)][: 1 if number % 5 else 2]:
            runs += [
                {**way, "name": name, "kill": batch, "delay": delay},
                {**way, "name": f"{name}, again", "seed": 99},
            ]
    with tempfile.TemporaryDirectory() as folder:
        ended = answer_of(FITTED, folder, json.dumps(runs), environ=ENVIRON)["runs"]
        losses = {path.stem: path.read_text().split() for path in Path(folder).glob("*.steps")}
    errors = [run["error"] for name, run in ended.items() if run and "error" in run and ", plain" not in name]
    if errors:
        raise SystemExit(errors[0])
    rows = []
    for number, (batch, delay) in enumerate(moments):
        name = f"{number}"
        row = {"killed_after_batch": batch, "milliseconds_later": round(1e3 * delay), "ended_first": bool(ended[name])}
        if not ended[name]:
            row["batches_lost"] = len(losses[name]) - _resumed_at(losses[f"{name}, again"])
            row["bit_equal"] = ended[f"{name}, again"]["digest"] == ended["whole"]["digest"]
        theirs = ended.get(f"{name}, plain, again")
        if theirs and not ended[f"{name}, plain"]:
            row["backup_and_restore"] = {
                "bit_equal": theirs.get("digest") == ended["whole, plain"]["digest"],
                **({"error": theirs["error"]} if "error" in theirs else {}),
            }
        rows.append(row)
    return rows


def _resumed_at(losses: list[str]) -> int:
    """Return the batch at which a second run resumed. Callbacks get one loss for all batches before it."""
    skipped = next((number for number, loss in enumerate(losses) if loss != losses[0]), 0)
    return 2 * BATCHES - len(losses) + (skipped if skipped > 1 else 0)


def cases(seeds: range, results: Results, save: Save, onednn: bool = False) -> None:
    """Run the seeds that are not stored, and save after each."""
    rows = {row["seed"]: row for row in results.get("rows", [])}
    missing = [seed for seed in seeds if seed not in rows]
    command = [sys.executable, str(CASES), str(BESIDE), *map(str, missing)]
    environ = {**os.environ, **tensorflow_environ(onednn=onednn)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as process:
        for line in process.stdout or ():
            row = {**json.loads(line), "load_average": round(os.getloadavg()[0], 1)}
            rows[row["seed"]] = row
            print(row)
            save(_counted([rows[seed] for seed in sorted(rows)]))
    if process.returncode:
        raise SystemExit(f"{CASES.name} ended with {process.returncode}")


def _counted(rows: list[Results]) -> Results:
    failed = [row for row in rows if row.get("failures")]
    exact = [row["difference"] for row in failed if row["outcome"] == "same weights"]
    return {
        "cases": len(rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows).most_common()),
        "failures": dict(sorted(Counter(str(row["failures"]) for row in failed).items())),
        "largest_difference_of_the_exact": max(exact, default=None),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pairs", type=int, default=10, help="pairs of epochs to time. Defaults to 10")
    add("--kills", type=int, default=100, help="runs to kill. Defaults to 100")
    add("--cases", type=int, default=200, help="runs that run out of memory. Defaults to 200")
    add("--first", type=int, default=200, help="seed of the first case. Defaults to 200")
    parts = ("overhead", "kills", "cases", "cases_onednn")
    add("--only", nargs="+", default=parts, choices=parts, metavar="PART", help="measure these parts. Defaults to all")
    options = parser.parse_args()
    results = read_results("recovery")

    def saving(part: str) -> Save:
        def save(figures: Results) -> None:
            results[part] = figures
            results["environment"] = environment("tensorflow", "keras", "numpy")
            write_results("recovery", results)

        return save

    seeds = range(options.first, options.first + options.cases)
    if "overhead" in options.only:
        saving("overhead")(answer_of(__file__, "--child", options.pairs, environ=ENVIRON))
    if "kills" in options.only:
        kills(options.kills, results.get("kills", {}), saving("kills"))
    if "cases" in options.only:
        cases(seeds, results.get("cases", {}), saving("cases"))
    if "cases_onednn" in options.only:
        part = "cases_onednn"
        cases(seeds[:ONEDNN_CASES], results.get(part, {}), saving(part), onednn=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(overhead(int(sys.argv[2]))))
    else:
        main()
