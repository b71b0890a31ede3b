"""The rows of the estimates' bench on disk, and the processes that fill them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from environment import RESULTS, ROOT

from kerasmem.estimation.truth.rows import Rows

ROWS = RESULTS / "estimates.jsonl"
CHILD = Path(__file__).resolve().parent / "estimates_child.py"
_OUT_OF_MEMORY = re.compile(r"OOM when allocating|RESOURCE_EXHAUSTED|ResourceExhausted|ran out of memory|Out of memory")
_FOLDERS = re.compile(r"(?<![\w.])/[\w./+-]*/")


class Store(Rows):
    """Rows of measurements by their key, one JSON line each; several processes may add to the same file."""

    def __init__(self, path: Path = ROWS) -> None:
        super().__init__(path)

    def put(self, key: str, facts: Mapping[str, Any], part: str, value: Any) -> None:
        """Set one part of one row, on top of what the file holds by now."""
        with self._locked():
            super().put(key, facts, part, value)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def in_a_fresh_process(
    part: str, row: Mapping[str, Any], timeout: float, limit_mib: int | None = None
) -> dict[str, Any]:
    """Return what a part of a row gave, or {"error": …}; {"outcome": "out of memory"} where it ran out.

    Args:
        part: "truth", "estimate", "capped" or "rivals".
        row: what the child is told.
        timeout: seconds after which the child and its children are ended.
        limit_mib: the most that the child's allocator may take.
    """
    variables = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONPATH": str(ROOT)}
    variables["TF_ENABLE_ONEDNN_OPTS"] = str(int(row["kernels"] == "onednn"))
    if part in ("truth", "capped"):
        variables["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
    if limit_mib is not None:
        variables["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit_mib)
    child = subprocess.Popen(
        [sys.executable, str(CHILD), part, json.dumps(row)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
        start_new_session=True,
    )
    try:
        out, error = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {timeout:.0f} s"}
    finally:
        if child.poll() is None:  # a timeout, or the user's Ctrl-C
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    if child.returncode == 0:
        answer: dict[str, Any] = json.loads(_FOLDERS.sub("", out.splitlines()[-1]))
        return answer
    if _OUT_OF_MEMORY.search(error):
        return {"outcome": "out of memory", "error": "out of memory"}
    return {"error": reason(error, child.returncode)}


def reason(error: str, code: int) -> str:
    """Return the last line that says something, without this machine's folders."""
    lines = [line.strip() for line in error.splitlines() if re.match(r"\S*(Error|Exception|Interrupt)\b", line)]
    last = lines[-1] if lines else (error.strip().splitlines() or [""])[-1].strip()
    return f"exit {code}: {_FOLDERS.sub('', last)[:300]}"
