#!/usr/bin/env python3
"""Compare estimates with the memory that real training steps take.

    python scripts/bench/estimates.py [--rows PATTERN …] [--only PART …] [--refresh PART …] [--kernels onednn,eigen]
                                      [--one-a-model] [--steps 12] [--repeats N] [--summary]

Every part of every row runs in a process of its own:

- truth: train under the real BFC allocator on the CPU; the peak in use of each of `--steps` steps after two of warm-up.
  Graph rows run in two processes, because identical steps differ; XLA rows in one.
- estimate: the method of the row's mode, and `probe` for some rows.
- capped: train again under a limit of the estimate's `high`, which must suffice, and of 0.9 × the need, which must not.
  The need is what the tensors ask for: under a limit the allocator takes smaller regions and wastes less.

A step in graph mode takes other memory on oneDNN's kernels than on TensorFlow's own: `--kernels onednn,eigen` measures
and estimates each graph row on both, and the summary lists them apart.

Other work on the machine changes the order of a graph's operations and so the peak. Each run records the load average.
XLA rows repeat to the byte.

Rows are stored in results/estimates.jsonl as they are measured, and stored parts are not measured again without
`--refresh`. The summary goes to results/estimates.json, with several kernels to results/estimates_kernels.json. Rows of
held-out models are also summarised apart: nothing may be tuned to them.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import MIB, RESULTS, environment, run_python, tensorflow_environ, write_results
from estimates_summary import by_kernels, least_need, measured, summarise

CHILD = Path(__file__).with_name("estimates_child.py")
ROWS = RESULTS / "estimates.jsonl"
KERNELS = ("onednn", "eigen")  # the key of a row names the second kind only
PARTS = ("truth", "estimate", "capped")
REPEATS = {"graph": 2, "xla": 1}
TIMEOUTS = {"truth": 900.0, "estimate": 300.0, "capped": 600.0}
PROBE_EVERY = 5
OUT_OF_MEMORY = re.compile(r"OOM when allocating|RESOURCE_EXHAUSTED|ResourceExhausted|ran out of memory|Out of memory")
FOLDERS = re.compile(r"(?<![\w.])/[\w./+-]*/")

ROUNDS = 5
HEAVY_ROUNDS = 4
# Eleven entries, a prime, so that any stride visits all of them; the most common optimizers have two.
OPTIMIZER_CYCLE = (
    "adam", "sgd", "adamw", "momentum", "rmsprop", "adam", "lion", "adafactor", "adam_ema", "sgd", "adam_accumulate",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One configuration to estimate and to train. XLA ignores `kernels`."""

    model: str
    batch_size: int
    optimizer: str
    mode: str
    dtype: str
    metrics: bool
    held_out: bool
    heavy: bool
    kernels: str = KERNELS[0]

    @property
    def key(self) -> str:
        """The row's stable name."""
        tail = ("/metrics" if self.metrics else "") + ("" if self.kernels == KERNELS[0] else f"/{self.kernels}")
        return f"{self.model}/b{self.batch_size}/{self.optimizer}/{self.mode}/{self.dtype}{tail}"


def design() -> list[Row]:
    """Return all rows in measuring order.

    Every round goes once through the models; settings advance by fixed strides, so that any prefix of the rows is
    balanced over models, modes and optimizers.
    """
    from zoo import ZOO

    rows: dict[str, Row] = {}
    for turn in range(ROUNDS):
        heavies = 0
        for index, (name, entry) in enumerate(ZOO.items()):
            heavies += entry.heavy
            if entry.heavy and turn >= HEAVY_ROUNDS:
                continue
            mode = ("graph", "xla")[((heavies if entry.heavy else index) + turn) % 2]
            row = Row(
                model=name,
                batch_size=entry.batches[(index + turn // 2) % len(entry.batches)],
                optimizer=OPTIMIZER_CYCLE[(3 * index + 4 * turn) % len(OPTIMIZER_CYCLE)],
                mode="graph" if entry.heavy and turn > 1 else mode,
                dtype=_dtype(entry.mixed, index, turn),
                metrics=(index + turn) % 3 == 0,
                held_out=entry.held_out,
                heavy=entry.heavy,
            )
            rows.setdefault(row.key, row)
    return sorted(rows.values(), key=lambda row: row.heavy and row.mode == "xla")  # minutes of compilation come last


def _dtype(mixed: tuple[str, ...], index: int, turn: int) -> str:
    if turn == 3 or (turn == 2 and index % 4 == 0):
        return mixed[(index // 2) % len(mixed)]
    if turn == 4 and index % 4 == 1:
        return mixed[(index // 4 + 1) % len(mixed)]
    return "float32"


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    """Return the rows that the options name."""
    rows = design()
    if options.one_a_model:
        first: dict[str, Row] = {}
        for row in rows:
            if row.mode == "graph" and not row.heavy:
                first.setdefault(row.model, row)
        rows = list(first.values())
    rows = [
        replace(row, kernels=kind)
        for row in rows
        for kind in (options.kernels if row.mode == "graph" else KERNELS[:1])
    ]  # fmt: skip
    globs = [pattern if "*" in pattern else f"*{pattern}*" for pattern in options.rows]
    return [row for row in rows if not globs or any(fnmatch.fnmatchcase(row.key, glob) for glob in globs)]


def read_rows() -> dict[str, dict[str, Any]]:
    """Return the stored rows by key."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def store(row: Row, part: str, value: Any, text: str) -> None:
    """Store one part of a row, and describe the machine in a row that is new or measured again."""
    rows = read_rows()
    facts: dict[str, Any] = asdict(row)
    if part == "truth" or row.key not in rows:
        here = environment("tensorflow", "keras", "numpy")
        facts["license"] = "Apache-2.0"
        facts["versions"] = {name: here.pop(name) for name in ("python", "tensorflow", "keras", "numpy")}
        facts["machine"] = {**here, "device": "cpu"}
    rows[row.key] = {**rows.get(row.key, {}), "key": row.key, **facts, part: value}
    partial = ROWS.with_suffix(".partial")
    partial.write_text("".join(json.dumps(stored, allow_nan=False) + "\n" for stored in rows.values()))
    partial.replace(ROWS)
    print(f"{time.strftime('%H:%M:%S')} {part:9} {row.key:58} {text}", file=sys.stderr, flush=True)


def in_a_process(part: str, row: dict[str, Any], limit_mib: int | None = None, child: Path = CHILD) -> dict[str, Any]:
    """Return the answer of a part, {"outcome": "out of memory", …} or {"error": …}."""
    environ = tensorflow_environ(bfc=part != "estimate", onednn=row["kernels"] == "onednn", limit_mib=limit_mib)
    ended = run_python(child, part, json.dumps(row), environ=environ, timeout=TIMEOUTS[part])
    if ended.code == 0:
        answer: dict[str, Any] = json.loads(FOLDERS.sub("", ended.out.splitlines()[-1]))
        return answer
    if ended.code is None:
        return {"error": ended.error}
    if OUT_OF_MEMORY.search(ended.error):
        return {"outcome": "out of memory", "error": "out of memory"}
    lines = re.findall(r"^\s*(\S*(?:Error|Exception|Interrupt)\b.*)$", ended.error, re.MULTILINE) or [ended.error]
    return {"error": f"exit {ended.code}: {FOLDERS.sub('', lines[-1].strip())[:300]}"}


def measure_truth(row: Row, stored: dict[str, Any], options: argparse.Namespace) -> None:
    """Train the row in as many processes as it lacks."""
    truth = {} if "truth" in options.refresh else stored.get("truth", {})
    if "no answer" not in truth.get("error", "no answer"):
        return
    runs = list(truth.get("runs", []))
    while len(runs) < (options.repeats or REPEATS[row.mode]):
        answer = in_a_process("truth", asdict(row) | {"steps": options.steps})
        if "error" in answer:
            store(row, "truth", {"runs": runs, "error": answer["error"]}, answer["error"])
            return
        runs.append(answer)
        low, high = min(answer["peak_bytes"]), max(answer["peak_bytes"])
        text = f"{low / MIB:.1f}–{high / MIB:.1f} MiB, {answer['step_seconds']} s a step"
        store(row, "truth", {"runs": runs}, text)


def make_estimates(row: Row, stored: dict[str, Any], options: argparse.Namespace) -> None:
    """Estimate the row by its mode's method, and by `probe` if it is one of the probed rows."""
    again = {row.mode} if "estimate" in options.refresh else set()
    again |= {"probe"} if "probe" in options.refresh else set()
    answers = {method: answer for method, answer in stored.get("estimates", {}).items() if method not in again}
    for method in (row.mode, *(["probe"] if row.key in options.probed else [])):
        if answers.get(method, {}).get("total") is not None:
            continue
        answer = answers[method] = in_a_process("estimate", asdict(row) | {"method": method})
        text = answer.get("error")
        if not text:
            need = measured(stored)
            error = f" ({100 * (answer['total'] / need - 1):+.1f} %)" if need else ""
            text = f"{method} {answer['total'] / MIB:.1f} MiB{error} {answer['wall_seconds']} s"
        store(row, "estimates", answers, text)


def train_capped(row: Row, stored: dict[str, Any], options: argparse.Namespace) -> None:
    """Train under two limits, unless the stored runs had the same ones."""
    need = least_need(stored)
    high = stored.get("estimates", {}).get(row.mode, {}).get("high")
    if need is None or high is None:
        return
    runs = {} if "capped" in options.refresh else dict(stored.get("capped", {}))
    for name, limit in {"high": math.ceil(high / MIB), "below": math.floor(0.9 * need / MIB)}.items():
        if runs.get(name, {}).get("limit_mib") == limit:
            continue
        answer = in_a_process("capped", asdict(row), limit)
        outcome = answer.get("outcome", "failed")
        runs[name] = {"limit_mib": limit, "outcome": outcome}
        if outcome == "failed":
            runs[name]["error"] = answer.get("error")
        store(row, "capped", runs, f"{name}, {limit} MiB: {outcome}")


WORK: dict[str, Callable[[Row, dict[str, Any], argparse.Namespace], None]] = {
    "truth": measure_truth, "estimate": make_estimates, "capped": train_capped,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", nargs="+", default=[], metavar="PATTERN", help="measure rows whose key matches. Defaults to all")
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="measure these parts. Defaults to all")
    add("--refresh", nargs="+", default=[], choices=(*PARTS, "probe"), help="measure stored parts again")
    add("--steps", type=int, default=12, help="measured steps of a process. Defaults to 12")
    add("--repeats", type=int, help="processes that measure a row. Defaults to 2 for graph, 1 for xla")
    add("--kernels", default=KERNELS[0], help="onednn, eigen, or onednn,eigen for graph rows. Defaults to onednn")
    add("--one-a-model", action="store_true", help="measure one graph row of each model that is not heavy")
    add("--summary", action="store_true", help="only summarise the stored rows")
    options = parser.parse_args()
    options.kernels = options.kernels.split(",")
    if unknown := set(options.kernels) - set(KERNELS):
        parser.error(f"--kernels must be of {', '.join(KERNELS)}; got {', '.join(sorted(unknown))}")
    options.probed = {row.key for row in design()[::PROBE_EVERY]}
    rows = chosen_rows(options)
    try:
        for row in [] if options.summary else rows:
            for part in options.only:
                WORK[part](row, read_rows().get(row.key, {}), options)
    except KeyboardInterrupt:
        print("stopped; finished rows are stored", file=sys.stderr)
    stored = read_rows()
    write_summary([stored[row.key] for row in rows if row.key in stored], options)


def write_summary(rows: Iterable[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the summary of the rows, and write it if they are all of the design or of several kernels."""
    if len(options.kernels) > 1:
        kinds = by_kernels(rows)
        print(json.dumps(kinds, indent=1))
        if not options.rows:
            write_results("estimates_kernels", {"kernels": kinds})
        return
    summary = summarise(rows)
    print(json.dumps(summary, indent=1))
    if not options.rows and not options.one_a_model:
        write_results("estimates", {"rows": len(design()), "summary": summary})


if __name__ == "__main__":
    main()
