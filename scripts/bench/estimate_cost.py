#!/usr/bin/env python3
"""What an estimate costs: seconds and host memory of whole `kerasmem estimate` processes.

    python scripts/bench/estimate_cost.py [--only graph xla gpu-target decoder]

The ResNet50 of keras.applications at 224² and batch 32, by each method that looks at the step, and a decoder of seven
billion parameters (decoder.py) by graph. Each is a fresh process, one after another. Memory is what the process and
its children have resident together, looked at while they run. Rows that are not asked for stay as they were. On a busy
machine seconds are too many: each row has the load average and the seconds that cores worked for it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from environment import RESULTS, ROOT, environment, write_results

RESNET = [
    "keras.applications:ResNet50", "--batch-size", "32", "--optimizer", "adam",
    "--loss", "sparse_categorical_crossentropy",
]  # fmt: skip
COMMANDS = {
    "graph": [*RESNET, "--method", "graph"],
    "xla": [*RESNET, "--method", "xla"],
    "gpu-target": [*RESNET, "--method", "gpu-target", "--device", "a100-80"],
    "decoder": [
        f"{Path(__file__).with_name('decoder.py')}:decoder", "--batch-size", "4", "--optimizer", "adam",
        "--loss", "sparse_categorical_crossentropy", "--method", "graph",
    ],
}  # fmt: skip
MODELS = {"decoder": "decoder, 32 layers of width 4096, length 512, batch 4"}
METHODS = {"decoder": "graph"}
POLL_SECONDS = 0.1


def cost(arguments: list[str], timeout: float = 1800) -> dict[str, Any]:
    """Run `kerasmem estimate` in a process of its own and return what it took and what it said."""
    load, worked, begin = os.getloadavg(), _core_seconds(), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "kerasmem", "estimate", *arguments, "--no-cache", "--json"],
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
    if process.returncode == 2 and b"pip install" in err:
        return {"skipped": err.decode().strip().splitlines()[-1]}
    if process.returncode not in (0, 1) or not out.strip():
        return {"failed": f"exit code {process.returncode}: {err.decode()[-500:]}"}
    report = json.loads(out)
    return {
        "seconds": round(seconds, 1),
        "core_seconds": round(_core_seconds() - worked, 1),
        "host_bytes": most,
        "load_average": {"before": round(load[0], 2), "after": round(os.getloadavg()[0], 2)},
        "parameters": report["model"]["parameters"],
        "method": report["settings"]["method"],
        "total_bytes": report["bytes"]["total"],
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
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS), help="run these rows alone")
    options = parser.parse_args()
    rows = _earlier()
    for name in options.only:
        rows[name] = row = {
            "name": name,
            "model": MODELS.get(name, "ResNet50, 224 × 224, batch 32"),
            "asked": METHODS.get(name, name),
            **cost(COMMANDS[name]),
        }
        print(_line(row), file=sys.stderr)
        _write(rows)


def _write(rows: dict[str, dict[str, Any]]) -> None:
    packages = ["tensorflow", "keras", *(each for each in ("jax",) if _is_installed(each))]
    data = {
        "environment": environment(*packages),
        "settings": {"poll_seconds": POLL_SECONDS},
        "rows": [rows[name] for name in COMMANDS if name in rows],
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
    taken = f"{row['seconds']:6.1f} s ({row['core_seconds']:.1f} s of cores)"
    return f"{what:62} {taken} {row['host_bytes'] / 2**30:6.2f} GiB"


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
