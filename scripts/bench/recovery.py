#!/usr/bin/env python3
"""What `kerasmem.fit` costs and whether it keeps its word: overhead, time lost where it ran out, kills, peers.

    python scripts/bench/recovery.py [--pairs 10] [--kills 20] [--cases 200] [--only PART …] [--quick]

On the CPU, under TensorFlow's BFC allocator and with TF_ENABLE_ONEDNN_OPTS=0 (with oneDNN a failed step ends the
process). Each part runs in a process of its own (`recovery_child.py`); the kills are by `tests/training/fitted.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from environment import RESULTS, ROOT, environment, write_results

CHILD = Path(__file__).with_name("recovery_child.py")
CASES = Path(__file__).with_name("recovery_cases.py")
LIMIT = 150  # MB: a whole batch of the wide model takes more, half of it less
FITTED = ROOT / "tests" / "training" / "fitted.py"


def ask(*arguments: Any, limit: int | None = None) -> Any:
    """Run a part in a process of its own and return what it prints last."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    env.update(TF_CPU_ALLOCATOR_USE_BFC="true", TF_ENABLE_ONEDNN_OPTS="0")
    if limit:
        env["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit)
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    print(arguments[1:], done.stdout.strip().splitlines()[-1][:300], file=sys.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def kills(count: int) -> dict[str, Any]:
    """Kill a run at random points, start it again each time, and compare it with one that was not."""
    import numpy as np

    every, batches = 4, 16
    common = {"model": "small", "rows": 1000, "size": 64}
    places = [int(place) for place in np.random.default_rng(11).integers(1, 2 * batches, count)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        runs = [{"name": "whole", **common, "fit": {"checkpoint": "whole.ckpt", "save_freq": every}}]
        for number, place in enumerate(places):  # each from the beginning, killed once
            name = f"killed {number}"
            settings = {**common, "name": name, "fit": {"checkpoint": f"{number}.ckpt", "save_freq": every}}
            runs += [{**settings, "kill": place}, {**settings, "seed": 99}]
        found = ask(FITTED, folder, json.dumps(runs))["runs"]
        for number, place in enumerate(places):
            steps = (Path(folder) / f"killed {number}.steps").read_text().splitlines()
            # the second process counts those before its place too: all that is above 2 epochs was trained on twice
            epoch_begun = place // batches * batches
            again = len(steps) - place - (2 * batches - epoch_begun)
            lost = place - epoch_begun - (place - epoch_begun) // every * every
            same = found[f"killed {number}"]["digest"] == found["whole"]["digest"]
            rows.append({"killed_after_batch": place, "batches_lost": lost, "bit_equal": same, "uncounted": again})
    return {
        "every": every,
        "kills": len(rows),
        "bit_equal": sum(row["bit_equal"] for row in rows),
        "most_batches_lost": max(row["batches_lost"] for row in rows),
        "rows": rows,
    }


def norm(arrays: list[Any]) -> float:
    return float(sum((array**2).sum() for array in arrays)) ** 0.5


def differences() -> dict[str, Any]:
    """Weights of runs that ran out against those of runs that did not, in graph mode and under XLA."""
    import numpy as np

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        modes = {"graph": (False, "sgd"), "xla": (True, "sgd"), "graph, adam": (False, "adam")}
        for mode, (xla, optimizer) in modes.items():
            common = {"xla": xla, "optimizer": optimizer, "fit": {"shuffle": False}}
            runs += [{"name": mode, "plain": True, **common}, {"name": f"{mode}, limited", "limit": 16, **common}]
        told = ask(FITTED, folder, json.dumps(runs))["runs"]
        for mode in modes:
            with np.load(f"{folder}/{mode}.npz") as one, np.load(f"{folder}/{mode}, limited.npz") as other:
                pairs = [(one[name].astype("f8"), other[name].astype("f8")) for name in one if one[name].ndim]
            found[mode] = {
                "largest_relative_to_largest_value": max(np.abs(a - b).max() for a, b in pairs)
                / max(np.abs(a).max() for a, _ in pairs),
                "norm": norm([a - b for a, b in pairs]) / norm([a for a, _ in pairs]),
                "recoveries": len(told[f"{mode}, limited"]["recoveries"]),
            }
    return found


def lost(mode: str) -> dict[str, Any]:
    """A run whose first step runs out, against one in pieces of that size from the start; each in its own process."""
    import math

    ran_out = ask(CHILD, "lost", mode, limit=LIMIT)
    size = ran_out["micro_batch_rows"]
    if size is None:
        raise SystemExit(f"in {mode} mode nothing ran out under {LIMIT} MB")
    in_pieces = ask(CHILD, "lost", mode, size, limit=LIMIT)
    failures = round(math.log2(4096 / size))
    return {
        "limit_mb": LIMIT,
        "seconds": {"ran out": ran_out["seconds"], "in pieces": in_pieces["seconds"]},
        "micro_batch_rows": size,
        "failures": failures,
        "seconds_lost_per_failure": round((ran_out["seconds"] - in_pieces["seconds"]) / failures, 2),
    }


def cases(count: int) -> dict[str, Any]:
    """Seeded runs that run out, by what came of them; see `recovery_cases.py`."""
    rows = ask(CASES, 0, count)
    outcomes = Counter(row["outcome"] for row in rows)
    tried = [row for row in rows if row.get("failures")]
    exact = [row["difference"] for row in tried if row["outcome"] == "as the undisturbed run"]
    return {
        "cases": len(rows),
        "outcomes": dict(outcomes.most_common()),
        "failures": dict(sorted(Counter(row["failures"] for row in tried).items())),
        "largest_difference_of_the_exact": max(exact, default=None),
        "rows": rows,
    }


# The limit in MB under which nothing helps, by what does not fit.
HOPELESS = {"activations": 64, "gradients": 56, "slots": 40}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="measure these, keep the others' results")
    parser.add_argument("--quick", action="store_true", help="few of each, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.kills, options.cases = 2, 2, 2
    parts = {
        "overhead": lambda: ask(CHILD, "overhead", options.pairs),
        "kills": lambda: kills(options.kills),
        "checkpoint": lambda: ask(CHILD, "checkpoint"),
        "peers": lambda: {"ragged": ask(CHILD, "ragged"), "backup": ask(CHILD, "backup")},
        "peaks": lambda: [ask(CHILD, "peak", pieces) for pieces in (1, 2, 4, 8)],
        "differences": differences,
        "lost_where_it_ran_out": lambda: {mode: lost(mode) for mode in ("graph", "xla")},
        "hopeless": lambda: {name: ask(CHILD, "hopeless", name, limit=limit) for name, limit in HOPELESS.items()},
        "cases": lambda: cases(options.cases),
    }
    name = "recovery_quick" if options.quick else "recovery"
    if unknown := set(options.only) - set(parts):
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    before = RESULTS / f"{name}.json"
    results: dict[str, Any] = json.loads(before.read_text()) if options.only and before.exists() else {}
    results["environment"] = {
        **environment("tensorflow", "keras", "numpy"), "load_average": round(os.getloadavg()[0], 1)
    }  # fmt: skip
    results["settings"] = {"pairs": options.pairs, "kills": options.kills, "cases": options.cases}
    for part, measure in parts.items():  # what was measured is kept, should a later part fail
        if not options.only or part in options.only:
            results[part] = measure()
            write_results(name, results)


if __name__ == "__main__":
    main()
