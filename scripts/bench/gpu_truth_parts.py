"""The parts that `gpu_truth.py --all` runs, the most telling first: each in a fresh process, with a file for each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from environment import environment
from gpu_truth_machine import HERE, environ_of, gpu_bytes, has, nvidia_smi
from gpu_truth_models import BATCHES

KINDS = {
    1: "plan, allocator's peak, driver and context of a training step",
    2: "the step again, under a limit of what was predicted",
    3: "workspaces of cuDNN and cuBLAS, library handles, and what autotuning takes",
    4: "unified memory and host offload: training that needs more than the card has",
    5: "a recording of NVML's answers while a process trains",
    6: "MemoryLogger's cost",
    7: "rows a second of fit from a file, against a batch that is there",
}
REHEARSED = ("mnist_cnn",)
FRAMEWORKS = ("tensorflow", "jax")


@dataclass(frozen=True)
class Part:
    """One measurement, in a process of its own.

    Attributes:
        kind: a key of KINDS.
        name: tells it from the others of its kind.
        framework: Keras's backend in it.
        task: what the process is told.
        seconds: after which it is ended.
    """

    kind: int
    name: str
    framework: str
    task: dict[str, Any] = field(default_factory=dict)
    seconds: int = 300

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.kind}-{self.name}.json"


def steps_of(models: list[str], card: str | None, half: str, steps: int, rehearsed: bool) -> list[dict[str, Any]]:
    """Return the tasks of kinds 1 and 2: every model in float32 by all ways, then in mixed precision."""
    return [
        {
            "model": model,
            "batch": 8 if rehearsed else BATCHES[model],
            "dtype": dtype,
            "framework": framework,
            "jit_compile": compiled,
            "steps": steps,
            "card": card,
            "plan": True,
        }
        for dtype in ("float32", half)
        for model in models
        for framework, compiled in (("tensorflow", True), ("tensorflow", False), ("jax", True))
    ]


def way(task: dict[str, Any]) -> str:
    """Return how a task's step runs: "jax", "xla" or "graph"."""
    return "jax" if task["framework"] == "jax" else "xla" if task["jit_compile"] else "graph"


def parts_of(
    models: list[str], kinds: list[int], card: str | None, half: str, steps: int = 5, rehearsed: bool = False
) -> list[Part]:
    """Return the parts of some kinds, those that tell most first.

    Args:
        models: names of `gpu_truth_models.py`; none: all of them.
        kinds: keys of KINDS, in the order in which they are to run.
        card: the catalogue's key; None where it has no such card.
        half: the mixed precision that the card is made for.
        steps: that are measured.
        rehearsed: whether all is to be small, for a CPU.
    """
    chosen = models or list(REHEARSED if rehearsed else BATCHES)
    found: dict[int, list[Part]] = {kind: [] for kind in KINDS}
    for task in steps_of(chosen, card, half, steps, rehearsed):
        name = f"{task['model']}-{task['batch']}-{task['dtype']}-{way(task)}"
        found[1].append(Part(1, name, task["framework"], task, 300))
        if task["model"] in chosen[:8]:
            found[2].append(Part(2, name, task["framework"], task, 420))
    small = {"rehearsed": rehearsed, "card": card}
    for framework in FRAMEWORKS:
        found[3].append(Part(3, f"handles-{framework}", framework, {"what": "handles", **small}))
    for autotuned in (True, False):
        for compiled in (False, True):
            task = {"what": "workspace", "autotuned": autotuned, "compiled": compiled, **small}
            name = f"workspace-{'xla' if compiled else 'graph'}-{'autotuned' if autotuned else 'untuned'}"
            found[3].append(Part(3, name, "tensorflow", task))
        task = {"what": "autotuning", "autotuned": autotuned, **small}
        found[3].append(Part(3, f"autotuning-jax-{'autotuned' if autotuned else 'untuned'}", "jax", task))
    for framework in FRAMEWORKS:
        task = {"model": "mnist_cnn" if rehearsed else "ResNet50", "batch": 8 if rehearsed else 64, **small}
        found[4].append(Part(4, f"unified-{framework}", framework, {"what": "unified", **task}, 900))
    found[4].append(Part(4, "offload-jax", "jax", {"what": "offload", **small}))
    found[5] = [Part(5, f"nvml-{framework}", framework, small) for framework in FRAMEWORKS]
    found[6] = [Part(6, "logger", "tensorflow", small)]
    found[7] = [Part(7, f"streaming-{framework}", framework, small) for framework in FRAMEWORKS]
    return [part for kind in kinds for part in found[kind]]


def run_all(
    folder: Path,
    *,
    models: list[str],
    kinds: list[int],
    card: str | None,
    gpu: str | None,
    minutes: float | None,
    steps: int = 5,
) -> int:
    """Run all parts that have no file yet, and write a summary; return the exit code.

    Args:
        folder: for the files.
        models: names of `gpu_truth_models.py`; none: all of them.
        kinds: keys of KINDS.
        card: the catalogue's key of the card, if it has one.
        gpu: the driver's name of the card; None: rehearse on the CPU.
        minutes: after which no part begins.
        steps: that are measured.
    """
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    capability = (nvidia_smi("compute_cap") or ["8.0"])[0]
    half = "mixed_bfloat16" if float(capability) >= 8 else "mixed_float16"
    parts = parts_of(models, kinds, card, half, steps, rehearsed=gpu is None)
    machine = machine_facts(gpu)
    outcomes = []
    for number, part in enumerate(parts, 1):
        path = folder / part.file
        if _outcome(path) in ("done", "rehearsed"):
            continue
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            print(f"{minutes:g} minutes are over; {len(parts) - number + 1} parts are left", file=sys.stderr)
            break
        data = {"format_version": 1, "title": KINDS[part.kind], "part": asdict(part), "machine": machine}
        data |= run_part(part, "cpu" if gpu is None else "gpu")
        write(path, data)
        outcomes.append(data["outcome"])
        why = f": {data['reason']}" if data.get("reason") else ""
        print(f"{number}/{len(parts)} {part.file} {data['outcome']}, {data['seconds']} s{why}", file=sys.stderr)
    write(folder / "summary.json", summary_of(folder))
    return 1 if "failed" in outcomes or "timed out" in outcomes else 0


def run_part(part: Part, device: str) -> dict[str, Any]:
    """Run a part in a fresh process and return its outcome, result and seconds."""
    if not has(part.framework):
        return {"outcome": "skipped", "reason": f"{part.framework} is not installed", "seconds": 0}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(HERE / "gpu_truth_child.py"), str(part.kind), json.dumps(part.task)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ_of(part.framework, device),
        start_new_session=True,  # its own children end with it
    )
    try:
        out, err = process.communicate(timeout=part.seconds)
        timed_out = False
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if timed_out:
        process.communicate()
        return {"outcome": "timed out", "reason": f"more than {part.seconds} s", "seconds": part.seconds}
    seconds = round(time.monotonic() - began, 1)
    if process.returncode:
        lines = [line for line in err.strip().splitlines() if line.strip()] or [f"exit code {process.returncode}"]
        return {"outcome": "failed", "reason": lines[-1][:500], "error": lines[-40:], "seconds": seconds}
    result = json.loads(out.splitlines()[-1])
    return {"outcome": "rehearsed" if device == "cpu" else "done", "seconds": seconds, "result": result}


def machine_facts(gpu: str | None) -> dict[str, Any]:
    """Return what a reader must know of the machine, without its name."""
    packages = [each for each in ("tensorflow", "keras", "jax", "jaxlib", "numpy", "h5py") if has(each)]
    driver = None if gpu is None else (nvidia_smi("driver_version") or [None])[0]
    return {**environment(*packages), "gpu": gpu, "driver": driver, "memory": gpu_bytes() if gpu else None}


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a file by way of a temporary name."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _outcome(path: Path) -> str | None:
    return (_read(path) or {}).get("outcome")


def summary_of(folder: Path) -> dict[str, Any]:
    """Return how the files of a folder ended, and how prediction and plan compare with what was measured."""
    files = {path.name: data for path in sorted(folder.glob("[0-9]-*.json")) if (data := _read(path))}
    outcomes = {name: data["outcome"] for name, data in files.items()}
    rows = list(_compared(files))
    ways = {}
    for each in sorted({row["way"] for row in rows}):
        ratios = [abs(row["ratio"] - 1) * 100 for row in rows if row["way"] == each]
        ways[each] = {
            "rows": len(ratios),
            "median_absolute_error_percent": round(statistics.median(ratios), 2),
            "worst_percent": round(max(ratios), 2),
            "covered": sum(row["covered"] for row in rows if row["way"] == each),
            "trained_at_high": sum(row["at_high"] == "trained" for row in rows if row["way"] == each),
        }
    return {"outcomes": outcomes, "ways": ways, "rows": rows}


def _compared(files: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each step that was both measured (kind 1) and predicted (kind 2)."""
    for name, data in files.items():
        again = files.get(f"2{name[1:]}")
        if not name.startswith("1-") or again is None or "result" not in data or "result" not in again:
            continue
        measured, found = data["result"]["measured"]["peak"], again["result"]["estimate"]
        if measured is None:
            continue
        yield {
            "name": name[2:-5],
            "way": way(data["part"]["task"]),
            "measured": measured,
            "estimated": found["total"],
            "method": found["method"],
            "ratio": round(found["total"] / measured, 4),
            "covered": found["low"] <= measured <= found["high"],
            "at_high": again["result"].get("at_high"),
        }
