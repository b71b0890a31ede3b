#!/usr/bin/env python3
"""What `kerasmem.fit` costs and whether it keeps its word: overhead, time lost where it ran out, kills, peers.

    python scripts/bench/recovery.py [--pairs 10] [--kills 100] [--cases 200] [--first 200] [--only PART …] [--quick]

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
from collections.abc import Callable
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


EVERY, BATCHES, CHUNK = 4, 16, 10  # batches between two savings, batches of an epoch, kills a process
Kept = dict[str, Any]
Save = Callable[[Kept], None]


def kills(count: int, kept: Kept, save: Save) -> Kept:
    """Kill runs at random moments, start each once more, and compare it with one that was not; Keras's beside it.

    Args:
        count: of kills, by `kerasmem.fit` with a checkpoint; a fifth of them by `fit` with `BackupAndRestore` too.
        kept: what an earlier run has measured; its rows are not measured again.
        save: called after each `CHUNK` of them.
    """
    import numpy as np

    draw = np.random.default_rng(11)
    moments = [(int(draw.integers(1, 2 * BATCHES)), float(draw.uniform(0.001, 0.05))) for _ in range(count)]
    rows = kept.get("rows", [])
    while True:
        killed = [row for row in rows if not row["ended_first"]]
        theirs = [row["backup_and_restore"] for row in killed if "backup_and_restore" in row]
        kept = {
            "every": EVERY,
            "kills": len(killed),
            "bit_equal": sum(row["bit_equal"] for row in killed),
            "most_batches_lost": max((row["batches_lost"] for row in killed), default=0),
            "backup_and_restore": {"kills": len(theirs), "bit_equal": sum(row["bit_equal"] for row in theirs)},
            "rows": rows,
        }
        if rows:
            save(kept)
        if len(rows) >= count:
            return kept
        rows = [*rows, *_killed(moments[len(rows) : len(rows) + CHUNK])]


def _killed(moments: list[tuple[int, float]]) -> list[Kept]:
    """Return what came of runs that were killed so many seconds after so many batches, and of those begun again."""
    common = {"model": "small", "rows": 1000, "size": 64}
    runs: list[Kept] = [
        {"name": "whole", **common, "fit": {"checkpoint": "whole.ckpt", "save_freq": EVERY}},
        {"name": "whole, plain", "plain": True, **common},
    ]
    for number, (place, delay) in enumerate(moments):
        ours = {**common, "fit": {"checkpoint": f"{number}.ckpt", "save_freq": EVERY}}
        theirs = {**common, "plain": True, "backup": [f"backup{number}", EVERY]}
        for name, way in [(f"{number}", ours), (f"{number}, plain", theirs)][: 1 if number % 5 else 2]:
            runs += [
                {**way, "name": name, "kill": place, "delay": delay},
                {**way, "name": f"{name}, again", "seed": 99},
            ]
    with tempfile.TemporaryDirectory() as folder:
        found = ask(FITTED, folder, json.dumps(runs))["runs"]
        losses = {path.stem: path.read_text().split() for path in Path(folder).glob("*.steps")}
    if wrong := [each["error"] for name, each in found.items() if each and "error" in each and ", plain" not in name]:
        raise SystemExit(wrong[0])

    rows = []
    for number, (place, delay) in enumerate(moments):
        name = f"{number}"
        row = {"killed_after_batch": place, "milliseconds_later": round(1e3 * delay), "ended_first": bool(found[name])}
        if not found[name]:
            row["batches_lost"] = len(losses[name]) - _gone_on_from(losses[f"{name}, again"])
            row["bit_equal"] = found[f"{name}, again"]["digest"] == found["whole"]["digest"]
        theirs = found.get(f"{name}, plain, again")
        if theirs and not found[f"{name}, plain"]:
            row["backup_and_restore"] = {
                "bit_equal": theirs.get("digest") == found["whole, plain"]["digest"],
                **({"error": theirs["error"]} if "error" in theirs else {}),
            }
        rows.append(row)
    return rows


def _gone_on_from(losses: list[str]) -> int:
    """Return the batch that a second run went on from: callbacks see those before it in its epoch, with one loss."""
    skipped = next((place for place, loss in enumerate(losses) if loss != losses[0]), 0)
    return 2 * BATCHES - len(losses) + (skipped if skipped > 1 else 0)


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


def cases(seeds: range, beside: int, kept: Kept, save: Save, onednn: bool = False) -> Kept:
    """Seeded runs that run out, by what came of them; see `recovery_cases.py`.

    Args:
        seeds: of the cases.
        beside: cases at once.
        kept: what an earlier run has measured; its seeds are not measured again.
        save: called after each case.
        onednn: whether oneDNN's kernels run, in a process of their own.
    """
    rows = {row["seed"]: row for row in kept.get("rows", [])}
    missing = [seed for seed in seeds if seed not in rows]
    command = [sys.executable, str(CASES), str(beside), *map(str, missing)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_ENABLE_ONEDNN_OPTS": "1" if onednn else "0"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        for line in process.stdout or ():
            row = {**json.loads(line), "load_average": round(os.getloadavg()[0], 1)}
            rows[row["seed"]] = row
            print(row, file=sys.stderr)
            kept = _counted([rows[seed] for seed in sorted(rows)])
            save(kept)
    if process.returncode:
        raise SystemExit(f"{CASES.name} ended with {process.returncode}")
    return kept


def _counted(rows: list[Kept]) -> Kept:
    tried = [row for row in rows if row.get("failures")]
    exact = [row["difference"] for row in tried if row["outcome"] == "as the undisturbed run"]
    return {
        "cases": len(rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows).most_common()),
        "failures": dict(sorted(Counter(str(row["failures"]) for row in tried).items())),
        "largest_difference_of_the_exact": max(exact, default=None),
        "rows": rows,
    }


ONEDNN_CASES = 20
# The limit in MB under which nothing helps, by what does not fit.
HOPELESS = {"activations": 64, "gradients": 56, "slots": 40}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=200, help="the first case's seed (default: 200)")
    parser.add_argument("--beside", type=int, default=4, help="cases at once (default: 4)")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="measure these, keep the others' results")
    parser.add_argument("--quick", action="store_true", help="few of each, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.kills, options.cases = 2, 2, 2

    name = "recovery_quick" if options.quick else "recovery"
    before = RESULTS / f"{name}.json"
    results: Kept = json.loads(before.read_text()) if options.only and before.exists() else {}

    def saving(part: str) -> Save:
        def save(found: Kept) -> None:
            results[part] = found
            write_results(name, results)

        return save

    seeds = range(options.first, options.first + options.cases)
    parts = {
        "overhead": lambda: ask(CHILD, "overhead", options.pairs),
        "kills": lambda: kills(options.kills, results.get("kills", {}), saving("kills")),
        "checkpoint": lambda: ask(CHILD, "checkpoint"),
        "peers": lambda: {"ragged": ask(CHILD, "ragged")},
        "peaks": lambda: [ask(CHILD, "peak", pieces) for pieces in (1, 2, 4, 8)],
        "differences": differences,
        "lost_where_it_ran_out": lambda: {mode: lost(mode) for mode in ("graph", "xla")},
        "hopeless": lambda: {name: ask(CHILD, "hopeless", name, limit=limit) for name, limit in HOPELESS.items()},
        "cases": lambda: cases(seeds, options.beside, results.get("cases", {}), saving("cases")),
        "cases_onednn": lambda: cases(
            seeds[:ONEDNN_CASES], options.beside, results.get("cases_onednn", {}), saving("cases_onednn"), onednn=True
        ),
    }
    if unknown := set(options.only) - set(parts):
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    results["environment"] = environment("tensorflow", "keras", "numpy")
    settings = {
        "overhead": ("pairs", options.pairs),
        "kills": ("kills", options.kills),
        "cases": ("cases", [seeds.start, seeds.stop - 1]),
    }
    for part, measure in parts.items():  # what was measured is kept, should a later part fail
        if not options.only or part in options.only:
            results.setdefault("load_average", {})[part] = round(os.getloadavg()[0], 1)
            results.setdefault("settings", {}).update([settings[part]] if part in settings else [])
            saving(part)(measure())


if __name__ == "__main__":
    main()
