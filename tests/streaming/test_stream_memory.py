"""Measured memory stays within the budget, also for files larger than the memory limit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from programs import run_python

from kerasmem import H5ChunkSequence
from kerasmem.units import MIB, parse_size

pytestmark = pytest.mark.usefixtures("loaded_python")

HERE = Path(__file__).parent
WIDTH = 1024


def write_large(path, size, chunk=1024):
    """Write `size` bytes of features chunk by chunk, not sparse, and one target per row."""
    rows = size // (4 * WIDTH) // chunk * chunk
    base = np.random.default_rng(0).standard_normal((chunk, WIDTH), "f4") * 0.01
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (rows, WIDTH), "f4", chunks=(chunk, WIDTH))
        y = file.create_dataset("y", (rows,), "f4", chunks=(chunk,))
        for start in range(0, rows, chunk):
            base[:, 0] = (start // chunk) % 7
            x[start : start + chunk] = base
            y[start : start + chunk] = base[:, 1]
    assert os.stat(path).st_blocks * 512 > 0.99 * size, "the file must not be sparse"
    return path


def run(task, path, limit, budget="128MiB"):
    done = run_python(HERE / "limited.py", task, path, limit, budget, env={"CUDA_VISIBLE_DEVICES": "-1"}, timeout=120)
    if task == "load" and done.code:  # TensorFlow aborts where NumPy would raise
        return {"loaded": False, "error": done.err[-200:]}
    assert done.code == 0, done.err[-2000:]
    return json.loads(done.out.splitlines()[-1])


def test_windows_take_what_was_planned(write):
    x = np.zeros((20_000, 100), "f8")
    path = write(x=x, y=np.zeros(20_000, "i8"), chunks=128)
    for budget in ("1MiB", "4MiB"):
        stream = H5ChunkSequence(path, memory_budget=budget)
        for _ in stream:
            held = stream.open_stream().windows.nbytes
            memory = stream.stream_plan.memory
            assert held <= memory.windows * memory.window_bytes <= parse_size(budget)
        assert held > 0.6 * parse_size(budget)
        stream.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_large(tmp_path_factory.mktemp("large") / "large.h5", 320 * MIB)


def test_training_stays_within_its_budget(path):
    small, large = (run("train", path, 8 * 2**30, budget)["grown"] for budget in ("16MiB", "96MiB"))
    # training itself, without any windows, takes some tens of MiB more the first time
    assert small < 80 * MIB
    assert large < 80 * MIB + 1.1 * (96 - 16) * MIB


def test_a_file_larger_than_the_memory_allowed(path):
    headroom = f"+{192 * MIB}"
    loaded = run("load", path, headroom)
    assert not loaded["loaded"]
    assert "Unable to allocate" in loaded["error"]
    trained = run("train", path, headroom, "48MiB")
    assert np.isfinite(trained["loss"])
    assert trained["data"] < loaded["baseline_data"] + 250 * MIB
    assert trained["rows_read"] == trained["rows"], "each row is read once"
