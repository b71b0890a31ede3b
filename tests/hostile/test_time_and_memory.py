"""Files that would take all memory or never end: the command ends with one message that names the stage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest

import kerasmem
from kerasmem.errors import ModelError, ModelFileError, UsageError
from kerasmem.estimation import estimating

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def architecture(kind, config):
    return {"module": "keras", "class_name": kind, "registered_name": None, "config": {"name": "bomb", **config}}


def layer(kind, name, **config):
    return {
        "module": "keras.layers", "class_name": kind, "registered_name": None, "config": {"name": name, **config},
    }  # fmt: skip


def sequential(shape, *layers):
    first = layer("InputLayer", "input", batch_shape=[None, *shape], dtype="float32")
    return architecture("Sequential", {"trainable": True, "layers": [first, *layers]})


def doubling(times):
    """A model that doubles its input `times` times. Building it needs only shapes."""
    x = inputs = keras.Input((1024,))
    for _ in range(times):
        x = keras.layers.Concatenate()([x, x])
    return json.loads(
        keras.Model(inputs, keras.layers.GlobalMaxPooling1D()(keras.layers.Reshape((-1, 1))(x))).to_json()
    )


BOMBS = {
    "doubling": lambda: doubling(28),
    "unrolled": lambda: sequential([1_000_000, 4], layer("LSTM", "lstm", units=4, unroll=True)),
    "large state": lambda: sequential([10**9], layer("Normalization", "normalization", axis=-1)),
    "many layers": lambda: sequential(
        [8], *(layer("Activation", f"a{number}", activation="linear") for number in range(60_000))
    ),
}


@pytest.mark.parametrize(
    "name",
    ["doubling", "large state", *(pytest.param(each, marks=pytest.mark.slow) for each in ("unrolled", "many layers"))],
)
def test_oversized_model_ends_within_limits(attack, tmp_path, name):
    path = tmp_path / "bomb.json"
    path.write_text(json.dumps(BOMBS[name]()))
    limits = ["--time-limit", "20", "--memory-limit", "900MB"]
    found = attack("estimate", path, *limits, seconds=40, memory=2 * GIB, new=True)
    assert found.code in (0, 1) and not (found.code and found.out)
    if found.code:
        assert found.err.startswith("Error: while ") and "A damaged or hostile file can be the cause" in found.err


ENDLESS = """
def build():
    open("looping", "w").close()
    return sum(range(10**18))  # in C, where no signal is looked for
"""


@pytest.fixture
def endless(tmp_path):
    """A model that is built for ever."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    return "endless.py:build"


def test_endless_build_ends_at_the_time_limit(attack, endless, tmp_path):
    found = attack("estimate", endless, "--time-limit", "25", seconds=60, new=True)
    assert found.code == 1 and (tmp_path / "looping").exists()
    assert found.err.startswith("Error: while ") and "it took longer than 25 s" in found.err


def start(*arguments, cwd):
    command = [sys.executable, "-m", "kerasmem", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]


def child_of(process, folder):
    """Wait until the process that does the work is in its endless loop, and return its number."""
    deadline = time.monotonic() + 60
    while not (folder / "looping").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return children(process.pid)[0]


@pytest.mark.parametrize("whom", ["both", "the first"])
def test_ctrl_c_ends_an_endless_command(endless, tmp_path, whom):
    process = start("estimate", endless, cwd=tmp_path)
    child = child_of(process, tmp_path)
    began = time.monotonic()
    if whom == "both":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "") and "Traceback" not in err
    assert time.monotonic() - began < 6 and not os.path.exists(f"/proc/{child}")


def test_killed_command_leaves_no_child(endless, tmp_path):
    process = start("estimate", endless, cwd=tmp_path)
    child = child_of(process, tmp_path)
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{child}")


CRASH = """
import importlib, os, sys
module, name, *sys.argv[1:] = sys.argv[1:]
setattr(importlib.import_module(module), name, lambda *a, **o: os.kill(os.getpid(), 11))
from kerasmem.cli import main
main()
"""
CONVERSION, INSPECTION = "kerasmem.datatools.conversion", "kerasmem.datatools.inspection"
CRASHES = {
    "x.h5": (INSPECTION, "inspect", "data", "inspect", "x.h5"),
    "x.csv": (CONVERSION, "convert", "data", "convert", "x.csv", "-o", "y.h5"),
    "m.json": ("kerasmem.models.spec", "open_model", "estimate", "m.json"),
}


@pytest.mark.parametrize("file", CRASHES)
def test_crash_message_names_the_file(attack, tmp_path, file):
    (tmp_path / "m.json").write_text(json.dumps(sequential([8], layer("Dense", "dense", units=1))))
    found = attack(*CRASHES[file], script=CRASH)
    assert found.code == 1
    assert found.err == (
        f"Error: while reading {file}: the process was ended by SIGSEGV. A damaged or hostile file can be the cause\n"
    )


def test_an_isolated_estimate_from_python(tmp_path, monkeypatch):
    keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]).save(tmp_path / "small.keras")
    for method in ("formula", "graph"):
        here, there = (
            kerasmem.estimate(tmp_path / "small.keras", method=method, isolated=each) for each in (False, True)
        )
        assert here.bytes.total == there.bytes.total and here.layers == there.layers
    with pytest.raises(ModelFileError, match=r"absent\.keras"):
        kerasmem.estimate(tmp_path / "absent.keras", isolated=True)
    with pytest.raises(UsageError, match="isolated=True needs"):
        kerasmem.estimate(keras.Sequential(), isolated=True)
    monkeypatch.setattr(estimating, "default_memory_limit", lambda: 2**20)
    with pytest.raises(ModelError, match=r"small\.keras.*more than the limit of 1\.00 MiB"):
        kerasmem.estimate(tmp_path / "small.keras", isolated=True)


@pytest.mark.parametrize(("option", "value"), [("--memory-limit", "much"), ("--time-limit", "0")])
def test_invalid_limits(cli, option, value):
    done = cli("data", "inspect", "data.h5", option, value)
    assert done.code == 2 and option in done.err
