#!/usr/bin/env python3
"""Estimates against the memory that real training steps take, and against other people's estimates.

    python scripts/bench/estimates.py [--quick] [--rows PATTERN …] [--only PART …] [--refresh PART …]
                                      [--time-limit SECONDS] [--quiet LOAD] [--jobs N] [--steps 12] [--repeats N]
                                      [--kernels onednn,eigen] [--one-a-model] [--list] [--summary]

Every part of every row runs in a process of its own:

- truth: train under the real BFC allocator on the CPU, the batch held by the caller; the peak in use of each of
  `--steps` steps after two of warm-up. Graph rows in two processes (identical steps differ), XLA rows in one.
- estimate: the method of the row's mode, and on some rows `probe`.
- capped: train again under a limit of the estimate's `high`, which must not run out, and of 0.9 × the need, which
  must. The need is what the tensors were measured to ask for: under a limit the allocator takes smaller regions and
  wastes less, so the free peak in use is no bound.
- rivals: the formula, `model-profiler` and Grappler's virtual cluster.

A step in graph mode takes other memory on oneDNN's kernels than on TensorFlow's own: `--kernels onednn,eigen` measures
and estimates each graph row on both, and the summary has them apart.

Other work on the machine changes the order in which a graph's operations run, and so the peak: each run keeps the load
average and whether it came first, as under `nice -n -20` (as root), where all other work waits. `--quiet 3` measures
again what ran under a higher load and did not come first. XLA rows repeat to the byte whatever else runs.

What is done is kept in results/estimates.jsonl, and a later run goes on from there; `--refresh` does parts again. The
summary goes to results/estimates.json, a plot of the errors to docs/images/estimates.png. Rows of models that are held
out (`zoo.ZOO`) are reported apart: nothing may be tuned to them.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from environment import ROOT, environment, facts_of_rows, write_results
from estimates_rows import KERNELS, Row, design, on_kernels, one_a_model, quick, select
from estimates_store import Store, in_a_fresh_process
from estimates_summary import by_kernels, least_need, measured, plot, summarise, table

PARTS = ("truth", "estimate", "capped", "rivals")
REPEATS = {"graph": 2, "xla": 1}
TIMEOUTS = {"truth": 900.0, "estimate": 300.0, "capped": 600.0, "rivals": 240.0}
QUICK_SECONDS = 840.0
BLOCK = 24  # rows that get all their parts before the next rows begin
PROBE_EVERY = 5
MIB = 2**20


class Bench:
    """One run over some rows: what is missing is measured and stored."""

    def __init__(self, store: Store, options: argparse.Namespace, probed: set[str]) -> None:
        self.store, self.options, self.probed = store, options, probed
        self.ends = time.monotonic() + options.time_limit if options.time_limit else math.inf
        self.done = 0

    def run(self, rows: list[Row]) -> None:
        """Do the parts asked for, block by block."""
        parts: dict[str, Callable[[Row, dict[str, Any]], None]] = {
            "truth": self.truth, "estimate": self.estimate, "capped": self.capped, "rivals": self.rivals,
        }  # fmt: skip
        for start in range(0, len(rows), BLOCK):
            for part in self.options.only or PARTS:
                jobs = 1 if part == "truth" else self.options.jobs  # a neighbour would change the order of operations

                def one(row: Row, do: Callable[[Row, dict[str, Any]], None] = parts[part]) -> None:
                    if not self.is_over():
                        do(row, self.store.read().get(row.key, {}))

                block = rows[start : start + BLOCK]
                if jobs == 1:
                    for row in block:
                        one(row)
                else:
                    with ThreadPoolExecutor(jobs) as pool:
                        list(pool.map(one, block))

    def is_over(self) -> bool:
        """Return whether the time limit has passed."""
        return time.monotonic() > self.ends

    def was_quiet(self, run: dict[str, Any]) -> bool:
        """Return whether little else ran on the machine then, or had to wait for this, as far as that was asked for."""
        if self.options.quiet is None or run.get("comes_first"):
            return True
        return bool(run.get("load_average", math.inf) <= self.options.quiet)

    def truth(self, row: Row, stored: dict[str, Any]) -> None:
        wanted = self.options.repeats or REPEATS[row.mode]
        found = {} if "truth" in self.options.refresh else stored.get("truth", {})
        if "no answer" not in found.get("error", "no answer"):
            return
        runs = [run for run in found.get("runs", []) if row.mode == "xla" or self.was_quiet(run)]
        while len(runs) < wanted and not self.is_over():
            answer = in_a_fresh_process("truth", asdict(row) | {"steps": self.options.steps}, TIMEOUTS["truth"])
            if "error" in answer:
                self.keep(row, "truth", {"runs": runs, "error": answer["error"]}, answer["error"])
                return
            runs.append(answer)
            low, high = min(answer["peak_bytes"]), max(answer["peak_bytes"])
            said = f"{low / MIB:.1f}–{high / MIB:.1f} MiB, {answer['step_seconds']} s a step"
            self.keep(row, "truth", {"runs": runs}, said)

    def estimate(self, row: Row, stored: dict[str, Any]) -> None:
        refreshed = {"estimate": row.mode, "probe": "probe"}
        again = {method for part, method in refreshed.items() if part in self.options.refresh}
        found = {method: each for method, each in stored.get("estimates", {}).items() if method not in again}
        for method in (row.mode, *(["probe"] if row.key in self.probed else [])):
            if found.get(method, {}).get("total") is not None or self.is_over():
                continue
            answer = in_a_fresh_process("estimate", asdict(row) | {"method": method}, TIMEOUTS["estimate"])
            found[method] = answer
            need = measured(stored)
            error = f" ({100 * (answer['total'] / need - 1):+.1f} %)" if need and answer.get("total") else ""
            said = answer.get("error") or f"{method} {answer['total'] / MIB:.1f} MiB{error} {answer['wall_seconds']} s"
            self.keep(row, "estimates", found, said)

    def capped(self, row: Row, stored: dict[str, Any]) -> None:
        """Train under two limits; a limit that was tried before is not tried again."""
        need = least_need(stored)
        high = stored.get("estimates", {}).get(row.mode, {}).get("high")
        if need is None or high is None:
            return
        found = {} if "capped" in self.options.refresh else dict(stored.get("capped", {}))
        limits = {"high": math.ceil(high / MIB), "below": math.floor(0.9 * need / MIB)}
        for name, limit in list(limits.items())[: 1 if self.options.quick else 2]:
            if found.get(name, {}).get("limit_mib") == limit or self.is_over():
                continue
            answer = in_a_fresh_process("capped", asdict(row), TIMEOUTS["capped"], limit)
            outcome = answer.get("outcome", "failed")
            found[name] = {"limit_mib": limit, "outcome": outcome}
            if outcome == "failed":
                found[name]["error"] = answer.get("error")
            self.keep(row, "capped", found, f"{name}, {limit} MiB: {outcome}")

    def rivals(self, row: Row, stored: dict[str, Any]) -> None:
        if stored.get("rivals") and "rivals" not in self.options.refresh:
            return
        answer = in_a_fresh_process("rivals", asdict(row), TIMEOUTS["rivals"])
        if "error" in answer:
            answer = {name: {"error": answer["error"]} for name in ("formula", "model-profiler", "grappler")}
        figures = [f"{name} {each['total'] / MIB:.0f}" for name, each in answer.items() if "total" in each]
        self.keep(row, "rivals", answer, ", ".join(figures) + " MiB")

    def keep(self, row: Row, part: str, value: Any, said: str) -> None:
        """Store a part and say so. The machine that a row names is the one that it was measured on."""
        is_known = part != "truth" and row.key in self.store.read()
        self.store.put(row.key, asdict(row) | ({} if is_known else facts_of_rows()), part, value)
        self.done += 1
        print(f"{time.strftime('%H:%M:%S')} {part:9} {row.key:58} {said}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="24 rows, at most 14 minutes; no rivals")
    parser.add_argument("--rows", nargs="+", default=[], metavar="PATTERN", help="rows whose key matches")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts only")
    parser.add_argument("--refresh", nargs="+", default=[], choices=(*PARTS, "probe"), help="do these again")
    parser.add_argument("--time-limit", type=float, default=0, metavar="SECONDS", help="begin nothing after that")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, except for truth")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a process")
    parser.add_argument("--repeats", type=int, help="processes that measure a row (graph 2, xla 1)")
    parser.add_argument(
        "--quiet", type=float, metavar="LOAD", help="measure graph rows again that a busier machine ran"
    )
    parser.add_argument(
        "--kernels", type=lambda text: text.split(","), default=list(KERNELS[:1]), metavar="KIND[,KIND]",
        help="run graph rows on these kernels: onednn, eigen",
    )  # fmt: skip
    parser.add_argument("--one-a-model", action="store_true", help="one graph row of each model that is not heavy")
    parser.add_argument("--list", action="store_true", help="print the rows and leave")
    parser.add_argument("--summary", action="store_true", help="summarise what there is and leave")
    options = parser.parse_args()
    if unknown := set(options.kernels) - set(KERNELS):
        parser.error(f"--kernels: {', '.join(sorted(unknown))} is none of {', '.join(KERNELS)}")
    return options


def main() -> None:
    options = arguments()
    from zoo import ZOO

    every = design(ZOO)
    chosen_rows = quick(every) if options.quick else one_a_model(every) if options.one_a_model else every
    rows = select(on_kernels(chosen_rows, options.kernels), options.rows)
    if options.list:
        print("\n".join(f"{row.key}{'  (held out)' if row.held_out else ''}" for row in rows))
        return
    if options.quick:
        options.only = options.only or [part for part in PARTS if part != "rivals"]
        options.repeats = options.repeats or 1
        options.time_limit = options.time_limit or QUICK_SECONDS
    store = Store()
    bench = Bench(store, options, {row.key for row in every[::PROBE_EVERY]})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it otherwise
    try:
        if not options.summary:
            bench.run(rows)
    except KeyboardInterrupt:
        print("stopped; what was done is kept", file=sys.stderr)
    stored = store.read()
    chosen = [stored[row.key] for row in rows if row.key in stored]
    if len(options.kernels) > 1:
        kinds = by_kernels(chosen)
        for kind, found in kinds.items():
            each = found["graph"]
            errors = f"median {each['median_absolute_error_percent']} %, 95th {each['p95_absolute_error_percent']} %"
            covers = f"{each['maximum_within_high_percent']} % at {each['median_high_to_measured']} x"
            print(f"{kind}: {each['rows']} rows, error {errors}, high covers {covers}")
        settings = {"steps": options.steps, "repeats": options.repeats or REPEATS["graph"], "asked": sys.argv[1:]}
        write_results(
            "estimates_kernels",
            {"environment": environment("tensorflow", "keras", "numpy"), "settings": settings, "kernels": kinds},
        )
        return
    summary = summarise(chosen)
    print(table(summary))
    if not options.rows and not options.quick and not options.one_a_model:
        data = {
            "environment": environment("tensorflow", "keras", "numpy"),
            "settings": {
                "rows": len(every), "steps": options.steps, "warm_up": 2, "repeats": REPEATS,
                "allocator": "BFC on the CPU, no limit; limits in MiB for the capped runs",
            },
            "summary": summary,
        }  # fmt: skip
        write_results("estimates", data)
        plot(chosen, ROOT / "docs" / "images" / "estimates.png")


if __name__ == "__main__":
    main()
