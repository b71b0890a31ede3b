#!/usr/bin/env python3
"""How long the command line takes to answer, as a whole process.

    python scripts/bench/startup.py [--runs 20]

Beside it, in the same run: an empty Python, and importing TensorFlow, which `kerasmem --help` does without.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from environment import ROOT, environment, write_results

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import kerasmem": ["-c", "import kerasmem"],
    "kerasmem --help": ["-m", "kerasmem", "--help"],
    "kerasmem estimate --help": ["-m", "kerasmem", "estimate", "--help"],
    "kerasmem devices": ["-m", "kerasmem", "devices"],
    "import tensorflow": ["-c", "import tensorflow"],
}


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(options.runs + 1):
        for name, arguments in COMMANDS.items():
            taken = seconds(arguments)
            if turn:  # the first turn warms the file cache
                times[name].append(round(taken, 4))
    rows = [
        {"command": name, "median_seconds": round(statistics.median(taken), 3), "seconds": taken}
        for name, taken in times.items()
    ]
    for row in rows:
        print(f"{row['command']:26} {row['median_seconds']:.3f} s", file=sys.stderr)
    write_results(
        "startup",
        {"environment": environment("tensorflow", "click", "rich"), "settings": {"runs": options.runs}, "rows": rows},
    )


if __name__ == "__main__":
    main()
