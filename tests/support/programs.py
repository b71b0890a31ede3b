"""Run Python in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """What a command printed and its exit code."""

    code: int
    out: str
    err: str


def run_python(*arguments: object, env: dict[str, str] | None = None, timeout=300, **options) -> Result:
    """Run Python on `arguments`, with kerasmem importable and `env` on top of this process's variables."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **(env or {})},
        **options,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def json_of(*arguments: object, **options):
    """Return the JSON of the last line that Python prints, which must end without an error."""
    done = run_python(*arguments, **options)
    assert done.code == 0, done.err[-3000:]
    return json.loads(done.out.splitlines()[-1])
