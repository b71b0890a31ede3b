"""Killed conversions leave no output, and parallel conversions to one output are both complete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from converted import content, left_in

from kerasmem.data import convert

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent.parent)}
ROWS = 4000
# Convert, and end this process as the system does at a call of a function.
CODE = """
import json, os, signal, sys
import h5py, kerasmem
from kerasmem.datatools import writing
settings, point, count = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
owner, name = {
    "rows": (h5py.Dataset, "__setitem__"), "run": (writing.np, "bincount"), "move": (os, "replace"),
}[point]
original, calls = getattr(owner, name), []
def replaced(*arguments, **options):
    calls.append(1)
    if len(calls) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **options)
setattr(owner, name, replaced)
kerasmem.data.convert(**settings)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("source") / "d.npz"
    np.savez(path, x=rng.random((ROWS, 50)), y=np.arange(ROWS), label=np.arange(ROWS) % 7)
    return path


@pytest.mark.parametrize(
    ("settings", "point", "count"),
    [
        ({}, "rows", 3), ({"compression": "gzip:1", "split": "0.7,0.3"}, "rows", 9),
        ({"shuffle": True}, "run", 2), ({"shuffle": True, "compression": "zstd"}, "move", 1),
    ],
)  # fmt: skip
def test_a_repeated_call_after_a_kill_writes_the_same(tmp_path, source, settings, point, count):
    settings = {"sources": [str(source)], "memory_budget": "400KiB", **settings}
    whole = tmp_path / "whole"
    whole.mkdir()
    convert(**settings, output=whole / "out.h5")
    settings["output"] = str(tmp_path / "out.h5")
    command = [sys.executable, "-c", CODE, json.dumps(settings), point, str(count)]
    done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert all(name.startswith(".out") and name.endswith(".part") for name in left_in(tmp_path, "whole"))
    convert(**settings)
    for name in os.listdir(whole):
        one, other = content(whole / name), content(tmp_path / name)
        assert one.keys() == other.keys()
        assert all(one[key].tobytes() == other[key].tobytes() for key in one)


def test_ctrl_c_leaves_nothing(tmp_path, source):
    def interrupt(what, done, total):
        if what == "writing" and done > 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out.h5", memory_budget="400KiB", progress=interrupt)
    assert left_in(tmp_path) == []


def test_two_conversions_to_one_output_are_both_whole(tmp_path, source):
    output, results = tmp_path / "out.h5", []

    def convert_meanwhile(what, done, total):
        if what == "writing" and not results:
            results.append(convert(source, output, memory_budget="400KiB"))
            results.append(content(output)["y"])

    convert(source, output, memory_budget="400KiB", progress=convert_meanwhile)
    assert left_in(tmp_path, output) == []
    for numbers in (results[1], content(output)["y"]):
        assert np.array_equal(numbers, np.arange(ROWS))


def test_a_full_disk_leaves_nothing(tmp_path, source):
    """A limit on the size of files imitates a full disk."""
    code = (
        "import resource, signal, sys\nfrom kerasmem.cli import main\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\nmain(sys.argv[1:])"
    )
    for options in (["--shuffle", "--memory-budget", "400KiB"], ["--compression", "gzip"]):
        command = [sys.executable, "-c", code, "data", "convert", source, "-o", tmp_path / "out.h5", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
        assert done.returncode == 1 and "cannot be written: File too large" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and left_in(tmp_path) == []
