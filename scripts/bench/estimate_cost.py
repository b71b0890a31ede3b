#!/usr/bin/env python3
"""Measure seconds and host memory of whole `kerasmem` processes, beside those of `import keras`.

    python scripts/bench/estimate_cost.py [--only graph xla …]

Each row is a fresh process, one after another: the MNIST CNN, ResNet50 at 224² and batch 32, and a decoder of seven
billion parameters. `import keras` runs before the first row and after the last; rows are compared with its median,
since machines differ. `max-batch` is also compared with one estimate of the same model. Memory is what the process and
its children hold together, polled while they run. Rows that are not named keep their stored figures. Each row has the
load average and the CPU seconds, because a busy machine takes more seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, environment, read_results, write_results

HERE = Path(__file__).parent
TRAINED = ["--optimizer", "adam", "--loss", "sparse_categorical_crossentropy"]
RESNET = ["keras.applications:ResNet50", "--batch-size", "32", *TRAINED]
CNN = [f"{HERE / 'zoo.py'}:mnist_cnn", *TRAINED]
DECODER = [f"{ROOT / 'tests' / 'support' / 'big_decoder.py'}:decoder", "--batch-size", "4", *TRAINED]
OF_CNN, OF_RESNET = "MNIST CNN", "ResNet50, 224 × 224, batch 32"
OF_DECODER = "decoder, 32 layers of width 4096, length 512, batch 4"
IMPORTS = 3  # before the rows, and again after them
POLL_SECONDS = 0.1
SEARCH, SEARCH_OVER, SEARCH_GOAL = "max-batch", "device-cnn", 1.5


@dataclass(frozen=True)
class Row:
    """A timed command. The goal is a multiple of `import keras`."""

    model: str
    asked: str
    arguments: list[str]
    goal: float | None = None


ROWS = {
    "formula-cnn": Row(OF_CNN, "formula", ["estimate", *CNN, "--method", "formula"], 1.3),
    "auto-cnn": Row(OF_CNN, "auto", ["estimate", *CNN], 1.4),
    "device-cnn": Row(OF_CNN, "auto for 8GB", ["estimate", *CNN, "--device", "8GB"]),
    "max-batch": Row(OF_CNN, "max-batch for 8GB", ["max-batch", *CNN, "--device", "8GB"]),
    "formula": Row(OF_RESNET, "formula", ["estimate", *RESNET, "--method", "formula"], 1.3),
    "graph": Row(OF_RESNET, "graph", ["estimate", *RESNET, "--method", "graph"], 3.0),
    "xla": Row(OF_RESNET, "xla", ["estimate", *RESNET, "--method", "xla"], 4.5),
    "gpu-target": Row(
        OF_RESNET, "gpu-target", ["estimate", *RESNET, "--method", "gpu-target", "--device", "a100-80"], 6.0
    ),
    "decoder": Row(OF_DECODER, "graph", ["estimate", *DECODER, "--method", "graph"], 15.0),
}


def cost(arguments: list[str]) -> dict[str, Any]:
    """Run `kerasmem` in a new process and return its time, memory and reported size."""
    code, out, error, figures = timed(["-m", "kerasmem", *arguments, "--json"])
    if code == 2 and "pip install" in error:
        return {"skipped": error.strip().splitlines()[-1]}
    if code not in (0, 1) or not out.strip():
        return {"failed": f"exit code {code}: {error[-500:]}"}
    report = json.loads(out)
    report = report.get("report", report)
    return {**figures, "method": report["settings"]["method"], "total_bytes": report["bytes"]["total"]}


def timed(arguments: list[str]) -> tuple[int, str, str, dict[str, Any]]:
    """Run Python and return its exit code, output, messages, time and memory."""
    load, worked, begin = os.getloadavg(), _cpu_seconds(), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"},
    )
    most = 0
    while True:
        try:
            out, error = process.communicate(timeout=POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            most = max(most, _resident(process.pid))
    figures = {
        "seconds": round(time.perf_counter() - begin, 1),
        "core_seconds": round(_cpu_seconds() - worked, 1),
        "host_bytes": most,
        "load_average": {"before": round(load[0], 2), "after": round(os.getloadavg()[0], 2)},
    }
    return process.returncode, out, error, figures


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _resident(pid: int) -> int:
    """Return the resident bytes of a process and all below it, shared pages counted once."""
    try:
        root = psutil.Process(pid)
        return sum(process.memory_full_info().pss for process in [root, *root.children(recursive=True)])
    except psutil.Error:  # it has just ended
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="rows to measure")
    options = parser.parse_args()
    imports = [timed(["-c", "import keras"])[3] for _ in range(IMPORTS)]
    measured = {name: cost(ROWS[name].arguments) for name in options.only}
    imports += [timed(["-c", "import keras"])[3] for _ in range(IMPORTS)]
    once = statistics.median(run["seconds"] for run in imports)
    rows = {row["name"]: row for row in read_results("estimate_cost").get("rows", [])}
    for name, row in measured.items():
        if "seconds" in row:
            row = {**row, "import_seconds": once, "imports": round(row["seconds"] / once, 2), "goal": ROWS[name].goal}
        rows[name] = {"name": name, "model": ROWS[name].model, "asked": ROWS[name].asked, **row}
        print(json.dumps(rows[name]))
    seconds = [measured.get(name, {}).get("seconds") for name in (SEARCH, SEARCH_OVER)]
    if None not in seconds:
        rows[SEARCH] |= {"estimates": round(seconds[0] / seconds[1], 2), "estimates_goal": SEARCH_GOAL}
    data = {
        "environment": environment("tensorflow", "keras"),
        "settings": {"poll_seconds": POLL_SECONDS, "imports": 2 * IMPORTS},
        "rows": [rows[name] for name in ROWS if name in rows],
    }
    write_results("estimate_cost", data)


if __name__ == "__main__":
    main()
