"""Run attacks in child processes with limits of time and memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import loaded_python
import pytest

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@dataclass(frozen=True)
class Outcome:
    """How an attacked process ended: exit code (negative for a signal) and texts."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


@pytest.fixture
def attack(tmp_path):
    """Run `kerasmem ARGUMENTS…`, or Python with `script=`, and hold it to its time and memory.

    Estimates load TensorFlow, so they run in a fork of a process that has. What both share counts for each process of
    the tree; a test that is near its limit asks for a new Python.
    """

    def run(*arguments, script: str | None = None, seconds=60.0, memory=2 * GIB, env=None, new=False) -> Outcome:
        start = ["-m", "kerasmem"] if script is None else ["-c", script]
        python = loaded_python.executable() if "estimate" in arguments and not new else sys.executable
        command = [python, *start, *map(str, arguments)]
        out, err = tmp_path / "attack.out", tmp_path / "attack.err"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", **(env or {})}
        began = time.monotonic()
        with out.open("wb") as to, err.open("wb") as wrong:
            process = subprocess.Popen(
                command, stdout=to, stderr=wrong, stdin=subprocess.DEVNULL, env=environment, cwd=tmp_path,
                start_new_session=True,
            )  # fmt: skip
            peak = 0
            while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
                peak = max(peak, tree_resident(process.pid))
                if time.monotonic() - began > seconds or peak > memory:
                    os.killpg(process.pid, 9)
                    ended = os.wait4(process.pid, 0)
                    break
                time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        took = time.monotonic() - began
        found = Outcome(process.returncode, out.read_text(errors="replace"), err.read_text(errors="replace"))
        assert took <= seconds, f"took more than {seconds} s\n{found.text[-2000:]}"
        assert peak <= memory, f"took {peak:,} bytes\n{found.text[-2000:]}"
        assert found.code >= 0, f"ended by signal {-found.code}\n{found.text[-2000:]}"
        assert "Traceback" not in found.err, found.err[-3000:]
        return found

    return run


def tree_resident(pid: int) -> int:
    """Return the resident bytes of a process and of all that it started."""
    page, total, todo = resource.getpagesize(), 0, [pid, *filter(None, [loaded_python.fork_of(pid)])]
    while todo:
        one = todo.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * page
            for task in Path(f"/proc/{one}/task").iterdir():
                todo += [int(child) for child in (task / "children").read_text().split()]
        except (OSError, ValueError, IndexError):  # it has just ended
            continue
    return total


@pytest.fixture
def secret(tmp_path):
    """A file of this machine that no data file may have anything read from."""
    folder = tmp_path / "private"
    folder.mkdir()
    path = folder / "secret.txt"
    path.write_bytes(b"TOP-SECRET-" * 64)
    return path


@pytest.fixture
def fifo(tmp_path):
    """A pipe without a writer. Opening it blocks forever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path
