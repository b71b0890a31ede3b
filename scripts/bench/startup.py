#!/usr/bin/env python3
"""Measure how long whole processes of the command line take, beside an empty Python and `import tensorflow`.

python scripts/bench/startup.py [--runs 20]
"""

from __future__ import annotations

import argparse
import statistics
import time

from common import ROOT, environment, run_python, write_results

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import kerasmem": ["-c", "import kerasmem"],
    "kerasmem --help": ["-m", "kerasmem", "--help"],
    "kerasmem estimate --help": ["-m", "kerasmem", "estimate", "--help"],
    "kerasmem devices": ["-m", "kerasmem", "devices"],
    "import tensorflow": ["-c", "import tensorflow"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="processes of each command. Defaults to 20")
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(options.runs + 1):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            if run_python(*arguments, environ={"PYTHONPATH": str(ROOT)}).code != 0:
                raise SystemExit(f"{name} failed")
            if turn:  # the first turn warms the file cache
                times[name].append(round(time.perf_counter() - start, 4))
    rows = [
        {"command": name, "median_seconds": round(statistics.median(seconds), 3), "seconds": seconds}
        for name, seconds in times.items()
    ]
    for row in rows:
        print(f"{row['command']:26} {row['median_seconds']:.3f} s")
    write_results(
        "startup",
        {"environment": environment("tensorflow", "click", "rich"), "settings": {"runs": options.runs}, "rows": rows},
    )


if __name__ == "__main__":
    main()
