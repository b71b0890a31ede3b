#!/usr/bin/env python3
"""What an estimate costs: seconds and host memory of whole `kerasmem` processes, and how often that is `import keras`.

    python scripts/bench/estimate_cost.py [--only graph xla …] [--quick]

Each is a fresh process, one after another: the MNIST CNN, the ResNet50 of keras.applications at 224² and batch 32, and
a decoder of seven billion parameters (decoder.py). `import keras` runs before the first and after the last, and its
median is what seconds are divided by, since machines differ. `max-batch` is divided by one estimate of the same model
too. Memory is what the process and its children have resident together, looked at while they run. Rows that are not
asked for stay as they were. On a busy machine seconds are too many: each row has the load average and the seconds that
cores worked for it. `--quick` leaves out what takes half a minute and more, and writes nothing.
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
from importlib import metadata
from pathlib import Path
from typing import Any

from environment import RESULTS, ROOT, environment, write_results

HERE = Path(__file__).parent
TRAINED = ["--optimizer", "adam", "--loss", "sparse_categorical_crossentropy"]
RESNET = ["keras.applications:ResNet50", "--batch-size", "32", *TRAINED]
CNN = [f"{HERE / 'zoo.py'}:mnist_cnn", *TRAINED]
DECODER = [f"{HERE / 'decoder.py'}:decoder", "--batch-size", "4", *TRAINED]
OF_CNN, OF_RESNET = "MNIST CNN", "ResNet50, 224 × 224, batch 32"
OF_DECODER = "decoder, 32 layers of width 4096, length 512, batch 4"
IMPORT = ["-c", "import keras"]
IMPORTS = 3  # before the rows, and again after them


@dataclass(frozen=True)
class Row:
    """A command that is timed.

    Attributes:
        model: in words.
        asked: the method, or the command where it is another than `estimate`.
        arguments: of `kerasmem`.
        goal: as often as `import keras` takes, at most.
        is_long: `--quick` leaves it out.
    """

    model: str
    asked: str
    arguments: list[str]
    goal: float | None = None
    is_long: bool = False


ROWS = {
    "formula-cnn": Row(OF_CNN, "formula", ["estimate", *CNN, "--method", "formula"], 1.3),
    "auto-cnn": Row(OF_CNN, "auto", ["estimate", *CNN], 1.4),
    "device-cnn": Row(OF_CNN, "auto for 8GB", ["estimate", *CNN, "--device", "8GB"]),
    "max-batch": Row(OF_CNN, "max-batch for 8GB", ["max-batch", *CNN, "--device", "8GB"]),
    "formula": Row(OF_RESNET, "formula", ["estimate", *RESNET, "--method", "formula"], 1.3),
    "graph": Row(OF_RESNET, "graph", ["estimate", *RESNET, "--method", "graph"], 3.0),
    "xla": Row(OF_RESNET, "xla", ["estimate", *RESNET, "--method", "xla"], 4.5),
    "gpu-target": Row(
        OF_RESNET, "gpu-target", ["estimate", *RESNET, "--method", "gpu-target", "--device", "a100-80"], 6.0, True
    ),
    "decoder": Row(OF_DECODER, "graph", ["estimate", *DECODER, "--method", "graph"], 15.0, True),
}
SEARCH, SEARCH_OVER, SEARCH_GOAL = "max-batch", "device-cnn", 1.5
POLL_SECONDS = 0.1


def cost(arguments: list[str], timeout: float = 1800) -> dict[str, Any]:
    """Run `kerasmem` in a process of its own and return what it took and what it said."""
    ran = timed(["-m", "kerasmem", *arguments, "--json"], timeout)
    code, out, err = ran.pop("code"), ran.pop("out"), ran.pop("err")
    if code == 2 and b"pip install" in err:
        return {"skipped": err.decode().strip().splitlines()[-1]}
    if code not in (0, 1) or not out.strip():
        return {"failed": f"exit code {code}: {err.decode()[-500:]}"}
    report = json.loads(out)
    found = {"largest": report["largest"], "asked_sizes": len(report["evaluations"])} if "largest" in report else {}
    report = report.get("report", report)
    return {
        **ran,
        "parameters": report["model"]["parameters"],
        "method": report["settings"]["method"],
        "total_bytes": report["bytes"]["total"],
        **found,
    }


def timed(arguments: list[str], timeout: float = 1800) -> dict[str, Any]:
    """Run Python in a process of its own and return what it took, its exit code and what it wrote."""
    load, worked, begin = os.getloadavg(), _core_seconds(), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"},
    )
    most, out, err = 0, b"", b""
    while True:
        try:
            out, err = process.communicate(timeout=POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            most = max(most, resident(process.pid))
            if time.perf_counter() - begin > timeout:
                process.kill()
    seconds = time.perf_counter() - begin
    return {
        "seconds": round(seconds, 1),
        "core_seconds": round(_core_seconds() - worked, 1),
        "host_bytes": most,
        "load_average": {"before": round(load[0], 2), "after": round(os.getloadavg()[0], 2)},
        "code": process.returncode,
        "out": out,
        "err": err,
    }


def _core_seconds() -> float:
    """Return the seconds that cores worked for processes which this one started and which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def resident(root: int) -> int:
    """Return the bytes that a process and all below it have resident, pages that they share counted once."""
    return sum(_resident(each) for each in family(root))


def family(root: int) -> list[int]:
    """Return a process and all below it, by their numbers."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):  # it has just ended
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found, pending = [], [root]
    while pending:
        found.append(pending.pop())
        pending += children.get(found[-1], [])
    return found


def _resident(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):  # it has just ended
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="run these rows alone")
    parser.add_argument("--quick", action="store_true", help="leave out the long rows, and write nothing")
    options = parser.parse_args()
    names = [name for name in options.only if not (options.quick and ROWS[name].is_long)]
    times = _imports()
    found = {name: cost(ROWS[name].arguments) for name in names}
    times += _imports()
    once = statistics.median(each["seconds"] for each in times)
    rows = {} if options.quick else _earlier()
    for name, row in found.items():
        if "seconds" in row:
            row = {**row, "import_seconds": once, "imports": round(row["seconds"] / once, 2), "goal": ROWS[name].goal}
        rows[name] = {"name": name, "model": ROWS[name].model, "asked": ROWS[name].asked, **row}
        print(_line(rows[name]), file=sys.stderr)
    if {SEARCH, SEARCH_OVER} <= found.keys() and all("seconds" in found[name] for name in (SEARCH, SEARCH_OVER)):
        times_one = found[SEARCH]["seconds"] / found[SEARCH_OVER]["seconds"]
        rows[SEARCH] |= {"estimates": round(times_one, 2), "estimates_goal": SEARCH_GOAL}
        print(f"max-batch takes {times_one:.2f} of one estimate (goal {SEARCH_GOAL:g})", file=sys.stderr)
    if not options.quick:
        _write(rows)


def _imports() -> list[dict[str, Any]]:
    return [timed(IMPORT) for _ in range(IMPORTS)]


def _write(rows: dict[str, dict[str, Any]]) -> None:
    packages = ["tensorflow", "keras", *(each for each in ("jax",) if _is_installed(each))]
    data = {
        "environment": environment(*packages),
        "settings": {"poll_seconds": POLL_SECONDS, "imports": 2 * IMPORTS},
        "rows": [rows[name] for name in ROWS if name in rows],
    }
    write_results("estimate_cost", data)


def _earlier() -> dict[str, dict[str, Any]]:
    """Return the rows of the last run, by name."""
    path = RESULTS / "estimate_cost.json"
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def _line(row: dict[str, Any]) -> str:
    what = f"{row['model']}, {row['asked']}"
    if "seconds" not in row:
        return f"{what}: {row.get('skipped') or row['failed']}"
    goal = "" if row["goal"] is None else f" (goal {row['goal']:g})"
    taken = f"{row['seconds']:6.1f} s ({row['core_seconds']:.1f} s of cores)"
    return f"{what:66} {taken} {row['host_bytes'] / 2**30:5.2f} GiB {row['imports']:5.2f} × import keras{goal}"


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
